"""vLLM servers: starting one (`pvg serve`), talking to it, updating its weights, and the code that runs inside it.

- `command`, `process`, `supervisor`: how `pvg serve` starts and stops vLLM.
- `served_model`: one model on several servers. It combines the modules below for prover and verifier alike.
- `pool`, `control`, `fleet`: connections, control routes, and the state of each server.
- `publishing`, `transports`: weight updates. pvg.rollout.vllm_engine has the proof that they arrived.
- `server_side/pvg_vllm`: loaded by vLLM in its own environment; imports no other part of pvg.

No module imports torch at import time, except server_side.
"""

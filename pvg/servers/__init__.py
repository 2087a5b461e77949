"""vLLM servers: starting one (`pvg serve`), talking to it, and what runs inside of it.

- `server_side/pvg_vllm`: loaded by vLLM itself, in vLLM's own environment: it imports nothing of pvg.
- `process`, `models`: how `pvg serve` starts vLLM and stops it again.
- `pool`, `control`, `labels`, `keys`: the client's side, which needs no vLLM.

Nothing here imports torch at module level.
"""

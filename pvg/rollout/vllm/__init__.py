"""Sampling from vLLM servers over HTTP. vLLM runs in other processes and is not imported here.

- `engine`: `VllmEngine`, the `Engine` over a fleet of servers (pvg.servers.fleet).
- `wire`: requests and replies as JSON.
- `opening`: builds the engine from an experiment.
"""

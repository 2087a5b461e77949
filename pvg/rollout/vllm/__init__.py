"""Sampling from vLLM servers: token ids in, token ids out, over HTTP.

- `wire`: requests and replies as JSON.
- `fleet`: the servers, which of them live and have the newest weights, and which one gets the next request.
- `engine`: `VllmEngine`, which ties these to `Engine`.

Nothing here imports vLLM, which lives in another process and often in another environment.
"""

"""The part of pvg that runs inside vLLM: an ASGI middleware with control routes, and a worker extension for weights.

    PYTHONPATH=pvg/servers/server_side PVG_CONTROL_KEY=... PVG_WEIGHTS_ROOT=... \\
    python -m vllm.entrypoints.openai.api_server --model DIR \\
        --middleware pvg_vllm.middleware.PvgMiddleware --worker-extension-cls pvg_vllm.worker.PvgWorker

vLLM has a separate environment, so this package imports no other part of pvg: only the standard library and, in
`worker`, what vLLM installs. `accepted_weights` and `middleware` therefore repeat parts of pvg.servers.publishing and
pvg.telemetry.events; tests keep them consistent.
"""

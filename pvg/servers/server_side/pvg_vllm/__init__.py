"""What runs inside vLLM: an ASGI middleware with the control routes, and a worker extension that loads weights.

    PYTHONPATH=pvg/servers/server_side PVG_CONTROL_KEY=... PVG_WEIGHTS_ROOT=... \\
    python -m vllm.entrypoints.openai.api_server --model DIR \\
        --middleware pvg_vllm.middleware.PvgMiddleware --worker-extension-cls pvg_vllm.worker.PvgWorker

vLLM lives in an environment of its own, so nothing of pvg is imported here: the standard library, and in `worker` what
vLLM brings. `labels` and `events` therefore say again what pvg.servers.labels and pvg.telemetry.events say; the tests
hold them together.
"""

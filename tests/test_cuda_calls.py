"""No call of torch.cuda leaves the GPU to torch's choice: that is the first one, whatever `models.device` says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = ("pvg", "cli", "benchmarks", "examples")
# Functions of torch.cuda that are about one GPU, with the place of their argument for it.
OF_ONE_GPU = {
    **dict.fromkeys(("Stream", "current_stream", "device", "set_device", "synchronize"), 0),
    **dict.fromkeys(("get_device_capability", "get_device_name", "get_device_properties"), 0),
    **dict.fromkeys(("mem_get_info", "memory_allocated", "memory_reserved", "memory_stats"), 0),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"), 0),
    "graph": 2,  # the stream
}
# Functions of the whole process, and types.
OF_ALL_GPUS = {"CUDAGraph", "Event", "device_count", "empty_cache", "is_available", "is_initialized"}


def name_of(node: ast.expr) -> str:
    """torch.cuda.x for such an expression; empty for any other."""
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def complaints(tree: ast.AST, path: str) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    bound = {id(call.args[0]) for call in calls if name_of(call.func) == "partial" and len(call.args) > 1}
    passed = {id(call.func) for call in calls} | bound
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.cuda":
            names = {alias.name for alias in node.names} - {"Event"}  # a type
            if names:
                yield f"{path}:{node.lineno} imports {', '.join(sorted(names))}; write torch.cuda.NAME"
        if isinstance(node, ast.Call):
            yield from _complaints_of(node, path)
        elif isinstance(node, ast.Attribute) and id(node) not in passed:
            name = name_of(node)
            if name == "torch.cuda.synchronize":
                yield f"{path}:{node.lineno} passes {name} on; bind the GPU: partial({name}, device)"


def _complaints_of(call: ast.Call, path: str) -> Iterator[str]:
    place, name = f"{path}:{call.lineno}", name_of(call.func)
    if name.lower().endswith("event.record") and not call.args:
        yield f"{place} records an event on the current stream of the thread's GPU"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args:
        yield f"{place} moves something to the first GPU; write .to(device)"
    if not name.startswith("torch.cuda."):
        return
    function = name.removeprefix("torch.cuda.")
    if function in OF_ONE_GPU:
        if len(call.args) <= OF_ONE_GPU[function] and not {"device", "stream"} & {k.arg for k in call.keywords}:
            yield f"{place} calls {name} without saying of which GPU"
    elif function not in OF_ALL_GPUS:
        yield f"{place} calls {name}: add it to a list of this test"


def sources() -> list[Path]:
    return [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]


def test_every_call_names_its_gpu() -> None:
    found = [
        complaint
        for path in sources()
        if "cuda" in (text := path.read_text(encoding="utf-8"))
        for complaint in complaints(ast.parse(text), str(path.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("torch.cuda.synchronize()", True),
        ("torch.cuda.synchronize(device)", False),
        ("torch.cuda.synchronize(device=device)", False),
        ("run(torch.cuda.synchronize)", True),
        ("run(partial(torch.cuda.synchronize, device))", False),
        ("run(partial(torch.cuda.synchronize))", True),
        ("torch.cuda.current_device()", True),
        ("event.record()", True),
        ("event.record(stream)", False),
        ("weights.cuda()", True),
        ("torch.cuda.is_available()", False),
        ("torch.cuda.graph(graph)", True),
        ("torch.cuda.graph(graph, pool, stream)", False),
        ("from torch.cuda import synchronize", True),
        ("from torch.cuda import Event", False),
    ],
)
def test_what_counts_as_wrong(line: str, wrong: bool) -> None:
    assert bool(list(complaints(ast.parse(line), "x.py"))) == wrong

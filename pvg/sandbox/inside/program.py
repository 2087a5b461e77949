"""Runs a solution on its cases in the confined process, and reports each case.

The solution can read and change everything here. So the process knows only the inputs, and the reported outputs are
compared with the expected ones elsewhere.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import fcntl
import io
import json
import math
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

# Converts a function's result to plain JSON data that two processes can compare.


# Relative tolerance for floats (near 0 and next to an integer, CLOSE / 1000 absolute).
CLOSE = 1e-6


class NotPlainError(ValueError):
    """A value of a type that an answer may not have."""


def plain(value: Any) -> Any:
    """`value` as JSON data: tuples as lists, sets and dictionaries as sorted lists with a type name. Raises
    NotPlainError, and RecursionError for a list that contains itself."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (list, tuple):
        return [plain(item) for item in value]
    if kind in (set, frozenset):
        return {"set": sorted((plain(item) for item in value), key=json.dumps)}
    if kind is dict:
        return {"dict": sorted(([plain(k), plain(v)] for k, v in value.items()), key=json.dumps)}
    raise NotPlainError(f"a value of type {kind.__name__} is not a valid answer")


def same(left: Any, right: Any) -> bool:
    """Whether two values of `plain` are the same answer: numbers by value, floats up to CLOSE. A bool is not a
    number."""
    if _is_number(left) and _is_number(right):
        return _same_number(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_number(left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=CLOSE, abs_tol=CLOSE / 1000)
    whole, broken = (left, right) if isinstance(left, int) else (right, left)
    if not math.isfinite(broken):  # a forged report may contain it
        return False
    nearest = round(broken)  # exact, because floats cannot represent every integer above 2**53
    return bool(whole == nearest and abs(broken - nearest) <= CLOSE / 1000)


LONGEST_COMPLAINT = 200


def run(job: dict[str, Any], reports: int) -> None:
    """Run `job["source"]` and write a JSON line for each case to the descriptor `reports`: ["value", plain value] or
    ["error", sentence]. With `entry`, a case is an argument list of that function, as a Python literal. Without it, a
    case is the program's standard input, and the value is what it prints.

    Raises what the program raises outside a case.
    """
    random.seed(0)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the module `site` sets them, and the warden starts without it
    code = compile(job["source"], "solution.py", "exec")
    entry = job["entry"]
    if entry is None:
        for case in job["cases"]:
            _tell(reports, partial(_printed, code, case))
        return
    namespace = _namespace("solution")
    exec(code, namespace)
    function = _function(namespace, entry)
    for case in job["cases"]:
        arguments = ast.literal_eval(case)
        _tell(reports, partial(_returned, function, arguments))


def _namespace(name: str) -> dict[str, Any]:
    """The namespace of a new module in sys.modules, where dataclasses and typing look up names in annotations."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = "solution.py"
    return vars(module)


def _returned(function: Callable[..., Any], arguments: list[Any]) -> Any:
    return plain(function(*arguments))


def _function(namespace: dict[str, Any], entry: str) -> Callable[..., Any]:
    """The function itself, or a method of the class `Solution`, which many problems ask for."""
    found = namespace.get(entry)
    if found is None and "Solution" in namespace:
        found = getattr(namespace["Solution"](), entry, None)
    if not callable(found):
        raise NameError(f"there is no function {entry!r}")
    return found  # type: ignore[no-any-return]


def _tell(reports: int, work: Callable[[], Any]) -> None:
    try:
        line = json.dumps(["value", work()])
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        line = json.dumps(["error", complaint(error)])
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(reports, data) :]


def complaint(error: BaseException) -> str:
    """One line about an exception; safe for any exception class."""
    try:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:LONGEST_COMPLAINT]
    except BaseException:  # noqa: BLE001 - the exception's class may raise anything
        return "an exception without a readable message"


def _printed(code: Any, text: str) -> str:
    with _streams(text) as output:
        try:
            exec(code, _namespace("__main__"))
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        finally:  # as at an interpreter's end; output of these threads belongs to this case
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
        sys.stdout.flush()
        return output.getvalue().decode(errors="replace")


@contextlib.contextmanager
def _streams(text: str) -> Iterator[io.BytesIO]:
    """Standard streams with binary buffers, which many programs use, and descriptor 0, which some open."""
    kept, output = (sys.stdin, sys.stdout), _Output()
    data = text.encode()
    _give_input(data)
    sys.stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(output, encoding="utf-8", errors="replace", write_through=True)
    try:
        yield output
    finally:
        sys.stdin, sys.stdout = kept


class _Output(io.BytesIO):
    """Keeps its content when a program closes it."""

    def close(self) -> None:
        pass


def _give_input(data: bytes) -> None:
    """Make descriptor 0 a pipe that contains `data` and then ends."""
    reading, writing = os.pipe()
    if reading != 0:
        os.dup2(reading, 0)
        os.close(reading)
    fcntl.fcntl(writing, fcntl.F_SETFL, os.O_NONBLOCK)
    try:
        rest = data[os.write(writing, data) :] if data else b""
    except BlockingIOError:
        rest = data
    if not rest:
        os.close(writing)
        return
    fcntl.fcntl(writing, fcntl.F_SETFL, 0)
    threading.Thread(target=_feed, args=(writing, rest), daemon=True).start()  # if it exceeds a pipe's capacity


def _feed(writing: int, rest: bytes) -> None:
    with contextlib.suppress(OSError):  # the program has stopped reading, or the next case has begun
        while rest:
            rest = rest[os.write(writing, rest) :]
    with contextlib.suppress(OSError):
        os.close(writing)

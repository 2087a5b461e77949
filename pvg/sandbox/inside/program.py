"""Runs a solution on its cases in the confined process, and reports each case.

The solution can read and change everything here. So the process knows only the inputs, and the reported outputs are
compared with the expected ones elsewhere.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import io
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .values import plain

LONGEST_COMPLAINT = 200


def run(job: dict[str, Any], reports: int) -> None:
    """Run `job["source"]` and write a JSON line for each case to the descriptor `reports`: ["value", plain value] or
    ["error", sentence]. With `entry`, a case is an argument list of that function, as a Python literal. Without it, a
    case is the program's standard input, and the value is what it prints.

    Raises what the program raises outside a case.
    """
    random.seed(0)
    code = compile(job["source"], "solution.py", "exec")
    entry = job["entry"]
    if entry is None:
        for case in job["cases"]:
            _tell(reports, partial(_printed, code, case))
        return
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(code, namespace)
    function = _function(namespace, entry)
    for case in job["cases"]:
        arguments = ast.literal_eval(case)
        _tell(reports, partial(_returned, function, arguments))


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
            exec(code, {"__name__": "__main__"})
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

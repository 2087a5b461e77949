"""Before any test imports torch; and the tests that `make check` should leave out.

`make check` leaves out the tests with the mark `slow`: files and functions that take more than 0.3 seconds. The summary
of a run names tests that miss the mark.
"""

from __future__ import annotations

import gc
import re
import resource
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from pvg.torch_environment import set_torch_environment

set_torch_environment()
# A script that starts the tests with `&` makes them ignore SIGINT, and so would the commands that they start and stop.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Without another profile, as in `make test`: few examples, but new ones in each run. CI takes the usual number. No test
# may fail because the machine is busy.
settings.register_profile("quick", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")
# `make fuzz`: far more examples where a test does not say how many, from a new seed each time.
settings.register_profile(
    "fuzz", max_examples=3000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# `make mutants`: the same examples each time, and no search for a smaller one that fails.
settings.register_profile(
    "mutants", max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)

UNMARKED_S = 1.0  # CPU seconds from which the summary names a test without the mark; more than 0.3, for busy machines


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Imports torch and all tests without looking for garbage, and then never looks at what they made again. Each test
    process saves a third of its CPU time until its first test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    began = cpu_s()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", cpu_s() - began))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    unmarked: dict[str, float] = {}
    for report in terminalreporter.getreports("passed"):
        took_s = dict(report.user_properties).get("cpu_s", 0.0)
        if took_s > UNMARKED_S and not {"slow", "drill"} & set(report.keywords):
            unmarked[re.sub(r"\[.*", "", report.nodeid, flags=re.DOTALL)] = took_s
    if unmarked:
        terminalreporter.section("`make check` is faster if these tests have the mark `slow`")
        for function, took_s in sorted(unmarked.items()):
            terminalreporter.line(f"{function} {took_s:.1f}")


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)

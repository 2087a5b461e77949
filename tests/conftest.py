"""Before any test imports torch; and which tests are slow.

`make check` leaves out the tests that tests/slow_tests.txt names. `make slow-tests` measures all tests and writes that
file. A line names a test function and its seconds, or a whole file that was not measured yet. The summary of a run
names new tests that belong there.
"""

from __future__ import annotations

import gc
import re
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from pvg.spinning import bound_spinning

bound_spinning()
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

SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
SLOW_S = 0.1  # CPU seconds of one test, with its share of fixtures
SLOW_TOGETHER_S = 0.5  # CPU seconds of one function with all its parameters
LONG_WAIT_S = 0.5  # seconds that one test waits, such as for a timeout
UNLISTED_S = 1.0  # CPU seconds from which the summary names a test that is not listed; more, for busy machines
# The checks of the whole repository run in every `make check`, whatever they take.
NEVER_SLOW = ("tests/test_structure.py", "tests/test_links.py", "tests/test_settings_page.py")
SCHEDULED = Path("/proc/self/schedstat")  # Linux: nanoseconds that the main thread ran, and that it waited for a core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-slow-tests", action="store_true", help=f"measure the tests that run, in {SLOW_TESTS.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-slow-tests"):
        config.pluginmanager.register(TestTimes(), "test-times")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    listed = {line.split()[0] for line in SLOW_TESTS.read_text().splitlines()}
    for item in items:
        function = function_of(item.nodeid)
        if function in listed or function.partition("::")[0] in listed:
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    began = cpu_s()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", cpu_s() - began))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    unlisted: dict[str, float] = {}
    for report in terminalreporter.getreports("passed"):
        took_s = dict(report.user_properties).get("cpu_s", 0.0)
        if took_s > UNLISTED_S and not {"slow", "drill"} & set(report.keywords):
            unlisted[function_of(report.nodeid)] = took_s
    if unlisted:
        terminalreporter.section(f"`make check` is faster with these lines in tests/{SLOW_TESTS.name}")
        for function, took_s in sorted(unlisted.items()):
            terminalreporter.line(f"{function} {took_s:.1f}")


def function_of(nodeid: str) -> str:
    """The node id without its parameters."""
    return re.sub(r"\[.*", "", nodeid, flags=re.DOTALL)


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def slept_s() -> float:
    """Seconds that the main thread has slept, from any start: neither on a core nor queued for one."""
    if not SCHEDULED.exists():
        return 0.0
    ran_ns, queued_ns, _ = SCHEDULED.read_text().split()
    return time.monotonic() - (int(ran_ns) + int(queued_ns)) / 1e9


class TestTimes:
    """Measures each test, and writes the slow ones. A test that uses a fixture of its module or of the session counts
    the whole fixture, because it may be the only one that runs."""

    def __init__(self) -> None:
        self._by_test: dict[str, float] = defaultdict(float)
        self._together: dict[str, float] = defaultdict(float)
        self._waits: dict[str, float] = defaultdict(float)
        self._fixtures: dict[str, float] = {}
        self._shared_s = 0.0  # of the fixtures that were set up since the test began

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        began = cpu_s()
        result = yield
        if fixturedef.scope != "function":
            place = f"{fixturedef.baseid}::{fixturedef.argname}"
            self._fixtures[place] = cpu_s() - began
            self._shared_s += cpu_s() - began
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        began, slept, self._shared_s = cpu_s(), slept_s(), 0.0
        result = yield
        slept = slept_s() - slept
        own_s = max(0.0, cpu_s() - began - self._shared_s)
        places = [
            f"{base}::{name}"
            for name in getattr(item, "fixturenames", ())
            for base in (item.nodeid.partition("::")[0], "")
        ]
        shared_s = sum(self._fixtures.get(place, 0.0) for place in places)
        function = function_of(item.nodeid)
        self._by_test[function] = max(self._by_test[function], own_s + shared_s)
        self._together[function] += own_s
        self._waits[function] = max(self._waits[function], slept)
        return result

    def pytest_sessionfinish(self) -> None:
        """Lines of files that did not run stay."""
        ran = {function.partition("::")[0] for function in self._by_test}
        kept = [line for line in SLOW_TESTS.read_text().splitlines() if line.split("::")[0].split()[0] not in ran]
        found = [
            f"{function} {max(took, self._together[function], self._waits[function]):.1f}"
            for function, took in self._by_test.items()
            if self._is_slow(function) and not function.startswith(NEVER_SLOW)
        ]
        SLOW_TESTS.write_text("\n".join(sorted(kept + found)) + "\n")

    def _is_slow(self, function: str) -> bool:
        return (
            self._by_test[function] > SLOW_S
            or self._together[function] > SLOW_TOGETHER_S
            or self._waits[function] > LONG_WAIT_S
        )

"""Before any test imports torch; and which tests are slow.

`make check` leaves out the tests that tests/slow_tests.txt names. `make slow-tests` measures all tests and writes that
file. A line names a test function, or a whole file that was not measured yet.
"""

from __future__ import annotations

import re
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from pvg.spinning import bound_spinning

bound_spinning()
# `make fuzz`: far more examples where a test does not say how many, from a new seed each time.
settings.register_profile(
    "fuzz", max_examples=3000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)

SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
SLOW_S = 0.1  # CPU seconds of one test, with its share of fixtures


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-slow-tests", action="store_true", help=f"measure the tests that run, in {SLOW_TESTS.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-slow-tests"):
        config.pluginmanager.register(CpuTimes(), "cpu-times")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    listed = {line.split()[0] for line in SLOW_TESTS.read_text().splitlines()}
    for item in items:
        function = function_of(item.nodeid)
        if function in listed or function.partition("::")[0] in listed:
            item.add_marker("slow")


def function_of(nodeid: str) -> str:
    """The node id without its parameters."""
    return re.sub(r"\[.*", "", nodeid, flags=re.DOTALL)


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class CpuTimes:
    """Measures each test, and writes the slow ones. A test that uses a fixture of its module or of the session counts
    the whole fixture, because it may be the only one that runs."""

    def __init__(self) -> None:
        self._by_test: dict[str, float] = defaultdict(float)
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
        began, self._shared_s = cpu_s(), 0.0
        result = yield
        own_s = max(0.0, cpu_s() - began - self._shared_s)
        places = [
            f"{base}::{name}"
            for name in getattr(item, "fixturenames", ())
            for base in (item.nodeid.partition("::")[0], "")
        ]
        shared_s = sum(self._fixtures.get(place, 0.0) for place in places)
        function = function_of(item.nodeid)
        self._by_test[function] = max(self._by_test[function], own_s + shared_s)
        return result

    def pytest_sessionfinish(self) -> None:
        """Lines of files that did not run stay."""
        ran = {function.partition("::")[0] for function in self._by_test}
        kept = [line for line in SLOW_TESTS.read_text().splitlines() if line.split("::")[0].split()[0] not in ran]
        found = [f"{function} {took:.1f}" for function, took in self._by_test.items() if took > SLOW_S]
        SLOW_TESTS.write_text("\n".join(sorted(kept + found)) + "\n")

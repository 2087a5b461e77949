"""Running programs: what comes back, what is cached, what happens when the sandbox itself fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from pvg.errors import MissingRequirementError
from pvg.sandbox import sandbox as sandbox_module
from pvg.sandbox.sandbox import (
    TAIL,
    Execution,
    Isolation,
    Limits,
    Program,
    Sandbox,
    WardenFailedError,
    WardenProcess,
    probe,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox("reduced", Limits(cpu_s=5.0, wall_s=120.0), workers=2) as found:
        yield found


def ran(box: Sandbox, source: str, entry: str | None, *cases: str) -> Execution:
    return box.run(Program(source, entry, cases))


def test_functions_give_values_and_errors_case_by_case(box: Sandbox) -> None:
    found = ran(box, "def half(x):\n    print('x')\n    return 6 / x, {1}\n", "half", "[2]", "[0]", "[3, 4]")
    assert found.status == "ok"
    assert found.cases[0].value == [3.0, {"set": [1]}]
    assert found.cases[1].error == "ZeroDivisionError: division by zero"
    assert found.cases[2].error.startswith("TypeError: half()")
    assert found.stdout == "x\nx\n"  # the third call never got in
    assert found.cpu_s > 0


def test_what_is_told_can_be_printed_and_stored(box: Sandbox) -> None:
    raised = ran(box, "def f():\n    raise Exception('\\ud800\\x1b[2J\\u202e\\r!')\n", "f", "[]")
    assert raised.cases[0].error == "Exception: ? [2J  !"
    forged = (
        "import json, os\ndef f(x):\n    os.write(3, json.dumps(['error', x * 9]).encode() + b'\\n')\n    os._exit(0)\n"
    )
    assert ran(box, forged, "f", repr(["A" * 100])).cases[0].error == "A" * 200
    assert ran(box, forged, "f", r"['\n\x07']").cases[0].error == "its report cannot be read"
    outside = ran(box, "import os\nos.write(2, b'\\x1b[2J well')\n1 / 0", "f", "[]")
    assert all(case.error.isprintable() for case in outside.cases)


def test_programs_read_and_print(box: Sandbox) -> None:
    found = ran(
        box, "import sys\nn = int(input())\nprint(n, sum(map(int, sys.stdin.read().split())))", None, "2\n3 4\n", "1\n"
    )
    assert [case.value for case in found.cases] == ["2 7\n", "1 0\n"]
    by_bytes = "import sys\ndata = sys.stdin.buffer.read()\nsys.stdout.buffer.write(data[::-1])\nsys.exit()"
    assert ran(box, by_bytes, None, "abc").cases[0].value == "cba"
    main = "if __name__ == '__main__':\n    print('main')\nraise SystemExit(3)"
    assert ran(box, main, None, "").cases[0].error == "SystemExit: 3"


def test_programs_find_what_an_interpreter_would_give_them(box: Sandbox) -> None:
    for leave in ("exit()", "quit(0)"):
        assert ran(box, f"print(2 * int(input()))\n{leave}\nprint('never')", None, "4", "5").cases[1].value == "10\n"
    node = "from dataclasses import dataclass\n@dataclass\nclass N:\n    v: int\n    nxt: 'N' = None\n"
    assert ran(box, node + "def f(x):\n    return N(x).v\n", "f", "[3]").cases[0].value == 3
    later = "from __future__ import annotations\n" + node.replace("'", "") + "def f(x):\n    return N(x).v\n"
    assert ran(box, later, "f", "[3]").cases[0].value == 3
    copied = (
        node + "import pickle, typing\nprint(pickle.loads(pickle.dumps(N(3))).v, typing.get_type_hints(N)['nxt'] is N)"
    )
    assert ran(box, copied, None, "", "").cases[1].value == "3 True\n"


def test_what_fails_outside_of_a_case_says_so_for_all(box: Sandbox) -> None:
    for source, said in (
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "NameError"),
        ("\ud800", "UnicodeEncodeError"),
    ):
        found = ran(box, source, "f", "[1]", "[2]")
        assert found.status == "error"
        assert {case.error.partition(":")[0] for case in found.cases} == {said}, source


def test_hostile_exceptions_and_reports_are_told_apart_from_answers(box: Sandbox) -> None:
    nasty = "class E(BaseException):\n    def __str__(self): raise self\ndef f(): raise E\n"
    assert ran(box, nasty, "f", "[]").cases[0].error == "an exception without a readable message"
    forged = "import os\ndef f(x):\n    os.write(3, b'not json\\n[1]\\n{}\\n')\n    return x\n"
    assert {case.error for case in ran(box, forged, "f", "[1]", "[2]", "[3]").cases} == {"its report cannot be read"}
    deep = "import os\ndef f():\n    os.write(3, b'[' * 100000 + b'\\n')\n"
    assert ran(box, deep, "f", "[]").cases[0].error == "its report cannot be read"
    early = ran(box, "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x\n", "f", "[1]", "[2]", "[3]")
    assert [case.value for case in early.cases] == [1, None, None]
    assert early.cases[1].error == early.cases[2].error == "it ended early"


def test_programs_have_no_chance_but_their_own(box: Sandbox) -> None:
    """Sets of texts and random numbers are the same in every process: a grade must not depend on luck."""
    source = "import random\ndef f(x):\n    return [list({'a', 'b', 'c', 'd', 'e'}), random.random(), x]\n"
    first = ran(box, source, "f", "[0]").cases[0].value
    with Sandbox("reduced", workers=1) as other:
        assert ran(other, source, "f", "[0]").cases[0].value == first


def test_outcomes_are_cached_by_content_unless_time_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    count = "import time\ndef f():\n    return time.perf_counter_ns()\n"
    with Sandbox("reduced", Limits(cpu_s=5.0), workers=1, cache_entries=2) as box:
        program = Program.of_function(count, "f", [[]])
        first = box.run(program)
        assert box.run(program) == first
        assert box.run(program, Limits(cpu_s=6.0)) != first  # other limits, another question
        assert box.run(Program.of_function(count + "\n", "f", [[]])) != first
        assert box.run(program) != first  # two others came since
        late = Program("while True: pass", None, ("",))
        assert box.run(late, Limits(cpu_s=0.05)) != box.run(late, Limits(cpu_s=0.05))
        commented = Program.of_function(count + "#", "f", [[]])
        twice = box.run_many([commented] * 2)
        assert twice[0] == twice[1]
        anew = box.run_many([commented] * 2, fresh=True)
        assert len({execution.cases[0].value for execution in (*twice, *anew)}) == 3


def test_the_cache_is_bounded_in_bytes() -> None:
    long = "def f():\n    print('y' * 50_000)\n    return 'x' * 30_000\n"
    with Sandbox("reduced", Limits(cpu_s=5.0), workers=1, cache_bytes=100_000) as box:
        for number in range(6):
            found = box.run(Program.of_function(f"{long}#{number}", "f", [[]]))
            assert len(found.stdout) <= TAIL
        kept = list(box._cache._found.values())
        assert len(kept) == 3  # what is printed beside the report takes no room
        assert box._cache.bytes == sum(answer.size for answer in kept) <= 100_000
        box._cache.keep("again", kept[0])
        box._cache.keep("again", kept[0])
        assert box._cache.bytes == sum(answer.size for answer in box._cache._found.values())


def test_many_run_side_by_side_in_order(box: Sandbox) -> None:
    programs = [Program.of_function(f"def f(x): return x * {n}", "f", [[n]]) for n in range(12)]
    assert [e.cases[0].value for e in box.run_many(programs)] == [n * n for n in range(12)]


def test_a_warden_that_dies_is_replaced(box: Sandbox) -> None:
    for warden in box._wardens._idle:
        os.killpg(warden._process.pid, signal.SIGKILL)
        warden._process.wait()
    assert ran(box, "def f(): return 'again'", "f", "[]").cases[0].value == "again"


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set()


def test_a_warden_that_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "CODE", "import time; time.sleep(600)")
    monkeypatch.setattr(sandbox_module, "START_S", 0.2)
    before, children = descriptors(), psutil.Process().children()
    with pytest.raises(WardenFailedError, match="does not answer"):
        WardenProcess(frozenset())
    assert psutil.Process().children() == children
    assert len(descriptors()) == len(before)


def test_what_waits_is_cancelled_and_what_runs_is_ended() -> None:
    sleeps = [Program(f"import time\ntime.sleep(600)\n#{n}", None, ("",)) for n in range(4)]
    box = Sandbox("reduced", Limits(wall_s=600.0), workers=1)
    waiting = [box._submit(program, box.limits) for program in sleeps]
    deadline = time.monotonic() + 60
    while not box._wardens._busy and time.monotonic() < deadline:
        time.sleep(0.01)
    box.close()  # it would take forty minutes otherwise
    with pytest.raises(MissingRequirementError):
        waiting[0].result(0)
    assert all(future.cancelled() for future in waiting[1:])
    assert not box._wardens._busy


def test_no_verdict_is_made_up_when_the_sandbox_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox("reduced", workers=1) as box:
        monkeypatch.setattr("pvg.sandbox.sandbox.CODE", "raise SystemExit('no room')")
        (warden,) = box._wardens._idle
        os.killpg(warden._process.pid, signal.SIGKILL)
        warden._process.wait()
        with pytest.raises(MissingRequirementError, match=r"(?s)The sandbox fails.*no room"):
            ran(box, "def f(): pass", "f", "[]")


def test_less_isolation_than_asked_for_is_refused() -> None:
    for offered, said in (
        (frozenset(), "no system call filter"),
        ({"seccomp"}, "no separate file system"),
        ({"namespaces", "landlock"}, "no system call filter"),
    ):
        with pytest.raises(MissingRequirementError, match=said) as refused:
            Sandbox("full", mechanisms=offered)
        assert "task.sandbox = 'reduced'" in refused.value.remedy
        Sandbox("reduced", workers=1, mechanisms=offered).close()


def test_a_way_out_that_is_open_is_found_by_trying() -> None:
    """The mechanisms may be there and yet not hold: what was tried decides."""
    assert {"a program could read a file", "a program could signal a process"} <= set(probe(frozenset()).complaints)
    held = Isolation(frozenset({"seccomp", "landlock"}))
    assert held.complaints == []
    assert held.describe() == "full (landlock, seccomp)"
    unlimited = Isolation(held.walls, {}, (), ("memory",))
    assert unlimited.complaints == ["nothing limits memory (this process cannot see it in /proc)"]
    leaking = Isolation(held.walls, {}, ("reach_the_network",))
    assert leaking.complaints == ["a program could reach the network"]
    assert leaking.describe().startswith("reduced")


@pytest.mark.parametrize(
    ("blind", "offered", "said"),
    [
        (
            "_address_space = lambda: 0",
            {"namespaces", "landlock", "seccomp"},
            {"nothing limits memory", "a program could use too much memory"},
        ),
        ("threads_of = lambda pid: 0", {"landlock", "seccomp"}, {"nothing limits threads"}),
    ],
)
def test_what_cannot_be_limited_is_not_full(
    monkeypatch: pytest.MonkeyPatch, blind: str, offered: set[str], said: set[str]
) -> None:
    """Where /proc tells nothing."""
    monkeypatch.setattr(
        sandbox_module, "CODE", sandbox_module.CODE.replace("import main; main()", f"import main; W.{blind}; main()")
    )
    begun = sandbox_module.CODE.replace("from inside", "import inside.warden as W; from inside")
    monkeypatch.setattr(sandbox_module, "CODE", begun)
    assert said <= {complaint.partition(" (")[0] for complaint in probe(frozenset(offered)).complaints}
    with pytest.raises(MissingRequirementError, match="nothing limits"):
        Sandbox("full", mechanisms=offered)


HOLDER = """
import sys
from pvg.sandbox.sandbox import Limits, Program, Sandbox
box = Sandbox("reduced", Limits(cpu_s=600.0, wall_s=600.0), workers=1)
print(box._wardens._idle[0]._process.pid, flush=True)
box.run(Program("import time; time.sleep(600)", None, ("",)))
"""


@pytest.mark.parametrize("does_first", ["", "os.closerange(0, 64);"])
def test_nothing_outlives_a_pvg_that_is_killed(does_first: str) -> None:
    source = HOLDER.replace("import time;", f"import os, time; {does_first}")
    holder = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    warden = psutil.Process(int(holder.stdout.readline()))
    deadline = time.monotonic() + 60
    while len(family := [warden, *warden.children(recursive=True)]) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(family) == 3  # warden, keeper, program
    time.sleep(0.3 if does_first else 0.0)  # for it to be done
    holder.kill()
    holder.wait()
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert len(gone) == 3
    holder.stdout.close()


def test_closing_ends_all_processes() -> None:
    with Sandbox("reduced", workers=2) as box:
        box.run_many([Program.of_function(f"def f(): return {n}", "f", [[]]) for n in range(4)])
        wardens = [warden._process for warden in box._wardens._idle]
    assert wardens
    assert all(process.returncode == -signal.SIGKILL for process in wardens)

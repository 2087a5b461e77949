"""The system call filter, run by an interpreter of BPF written for this test, on both machines that it knows."""

from __future__ import annotations

import platform

import pytest

from pvg.sandbox.inside import walls

ALLOWED, DENIED, KILLED, UNKNOWN = "allowed", "EPERM", "killed", "ENOSYS"
OUTCOMES = {0x7FFF0000: ALLOWED, 0x00050001: DENIED, 0x80000000: KILLED, 0x00050026: UNKNOWN}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def outcome(program, architecture: int, number: int, *arguments: int) -> str:
    """What a filter says of a call (seccomp(2): struct seccomp_data; bpf(4): the instructions)."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = number.to_bytes(4, "little") + architecture.to_bytes(4, "little") + bytes(8)
    data += b"".join((argument % 2**64).to_bytes(8, "little") for argument in padded)
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, k = program[at]
        at += 1
        if code == 0x20:
            loaded = int.from_bytes(data[k : k + 4], "little")
        elif code == 0x06:
            return OUTCOMES[k]
        else:
            holds = {0x15: loaded == k, 0x35: loaded >= k, 0x45: bool(loaded & k)}[code]
            at += if_true if holds else if_false


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return str(request.param)


def test_the_filter_is_one_that_a_kernel_takes(machine: str) -> None:
    program = walls.filter_program(7, processes=True)
    assert len(program) < 4096
    for at, (code, if_true, if_false, _) in enumerate(program):
        assert 0 <= if_true < 256
        assert 0 <= if_false < 256
        assert code == 0x06 or at + 1 + max(if_true, if_false) < len(program)
    assert program[-1][0] == 0x06


@pytest.mark.parametrize("processes", [False, True])
def test_calls_by_number(machine: str, processes: bool) -> None:
    program, column = walls.filter_program(7, processes=processes), walls.ARCHITECTURES[machine][0]
    named = {numbers[column] for numbers in walls.CALLS.values()}
    forks = {numbers[column] for numbers in walls.FORKS.values()} if processes else set()
    by_argument = {call[column] for call in (walls.CLONE, walls.KILL, walls.TGKILL, walls.IOCTL)}
    by_argument |= {walls.FCNTL[column], walls.PRLIMIT[column], walls.CLONE3[column]}
    for number in set(range(600)) - by_argument:
        expected = ALLOWED if number in named | forks else DENIED
        assert outcome(program, ARCHITECTURE[machine], number) == expected, number
    assert outcome(program, ARCHITECTURE[machine], walls.CLONE3[column]) == UNKNOWN


def test_calls_of_other_machines_end_the_process(machine: str) -> None:
    program = walls.filter_program(7, processes=False)
    read = walls.CALLS["read"][walls.ARCHITECTURES[machine][0]]
    assert outcome(program, 0x40000003, read) == KILLED  # i386
    if machine == "x86_64":
        assert outcome(program, ARCHITECTURE[machine], 0x40000000 + read) == KILLED


def test_arguments_decide(machine: str) -> None:
    column, arch = walls.ARCHITECTURES[machine]
    alone, forking = (walls.filter_program(7, processes=processes) for processes in (False, True))

    def said(program, call, *arguments: int) -> str:
        return outcome(program, arch, call[column], *arguments)

    for call in (walls.KILL, walls.TGKILL):
        assert said(alone, call, 7) == ALLOWED
        assert {said(program, call, pid) for program in (alone, forking) for pid in (0, 1, 8, -1, -7)} == {DENIED}
    thread, process, user_namespace = 0x003D0F00, 17, 0x10000000
    assert [said(alone, walls.CLONE, flags) for flags in (thread, process)] == [ALLOWED, DENIED]
    assert [said(forking, walls.CLONE, flags) for flags in (thread, process)] == [ALLOWED, ALLOWED]
    for program in (alone, forking):
        assert said(program, walls.CLONE, thread | user_namespace) == DENIED
    assert said(alone, walls.IOCTL, 0, 0x5401) == ALLOWED
    assert said(alone, walls.IOCTL, 0, 0x5412) == DENIED  # TIOCSTI: typing into another terminal
    allowed = {command for command in range(2000) if said(alone, walls.FCNTL, 0, command, 7) == ALLOWED}
    assert allowed == {*range(8), 1030}  # F_SETOWN is 8, F_SETSIG 10, F_SETOWN_EX 15, F_SETLEASE 1024, F_NOTIFY 1026
    assert {said(alone, walls.FCNTL, 0, 2**32 - n) for n in range(1, 9)} == {DENIED}
    assert said(alone, walls.PRLIMIT, 0, 1, 0) == ALLOWED
    assert {said(alone, walls.PRLIMIT, 0, 1, pointer) for pointer in (1, 2**32, 2**63)} == {DENIED}

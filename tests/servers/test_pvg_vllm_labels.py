"""The server's idea of labels is the client's; which weights may follow which."""

from __future__ import annotations

import re

import pytest

from pvg.servers.server_side.pvg_vllm import accepted_weights as server
from pvg.servers.server_side.pvg_vllm.accepted_weights import Refusal
from pvg.servers.server_side.pvg_vllm.middleware import tell
from pvg.telemetry.events import format_event


def code_of(current: str, new: str) -> str:
    label = server.ServedLabel.parse(new)
    assert label is not None
    try:
        server.check_order(current, label)
    except Refusal as refusal:
        return f"{refusal.status} {refusal.code}"
    return ""


@pytest.mark.parametrize(
    ("current", "new", "code"),
    [
        ("default", "5-a/0", ""),
        ("something another client set", "5-a/0", ""),
        ("5-a/3", "5-a/4", ""),
        ("5-a/3", "5-a/2", "409 version_backwards"),
        ("5-a/3", "6-b/0", ""),
        ("5-a/3", "4-b/9", "409 older_session"),
        ("5-a/3", "5-b/0", ""),  # two sessions of the same nanosecond: neither is older
        ("broken:5-a/3", "5-a/3", ""),
        ("broken:5-a/3", "5-a/1", ""),
        ("broken:5-a/3", "6-b/0", ""),
        ("broken:5-a/3", "4-b/9", "409 older_session"),
        ("broken:", "4-b/9", ""),
    ],
)
def test_which_weights_may_follow_which(current: str, new: str, code: str) -> None:
    assert code_of(current, new) == code


def test_the_servers_log_lines_have_the_form_of_the_clients(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"trace": "1f 3a", "version": 12, "rpc_ms": 1.23456789, "nothing": ""}
    tell("rpc.done", **fields)
    there = capsys.readouterr().err.removesuffix("\n")
    here = format_event("weights", event="rpc.done", **fields)
    without_time = [re.sub(r"t=[0-9.]+", "t=", line) for line in (here, there)]
    assert without_time[0] == without_time[1]


def test_a_trace_cannot_write_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    tell("server.recv", trace="a\r\n[weights] t=1 event=rpc.done")
    assert capsys.readouterr().err.count("\n") == 1

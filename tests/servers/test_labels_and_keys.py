"""Labels of weights, as client and server read them; the control key, made by any process first."""

from __future__ import annotations

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.errors import ConfigurationError
from pvg.servers.control import KEY_FILE, KEY_VARIABLE, control_key
from pvg.servers.publishing import PublishingSession, WeightLabel
from pvg.servers.server_side.pvg_vllm.accepted_weights import Refusal, ServedLabel, check_order
from pvg.servers.server_side.pvg_vllm.middleware import tell
from pvg.telemetry.events import format_event

TAILS = st.text("0123456789abcdef-", min_size=1, max_size=12)
LABELS = st.builds(WeightLabel, st.builds(PublishingSession, st.integers(0, 2**64), TAILS), st.integers(0, 10**12))


@given(LABELS)
def test_a_label_is_read_as_it_was_written(label: WeightLabel) -> None:
    assert WeightLabel.parse(str(label)) == label


@given(st.one_of(st.text(), st.from_regex(r"[0-9a-fA-F_+ -]{0,4}-?[a-f0-9-]{0,4}/?[-+0-9_ ]{0,4}", fullmatch=True)))
def test_what_is_no_label_is_none_and_client_and_server_agree_on_it(text: str) -> None:
    found, theirs = WeightLabel.parse(text), ServedLabel.parse(text)
    assert (found is None) == (theirs is None)
    assert found is None or str(found) == str(theirs) == text


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_the_first_makes_the_key_and_all_others_read_it(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "weights"
    key = control_key(root)
    assert len(key) >= 40
    assert control_key(root) == key
    assert stat.S_IMODE((root / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in root.iterdir()] == [KEY_FILE]
    assert control_key(tmp_path / "other") != key


def test_the_environment_wins_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "given-by-the-user")
    assert control_key(tmp_path / "weights") == "given-by-the-user"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "key", ["two words of a key", "ein-langer-schlüssel", "with-a-line\nbreak-in-it", "with-a-tab-in-it\t", "short"]
)
def test_a_key_that_is_none_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigurationError, match=f"{KEY_VARIABLE} is not a valid key") as caught:
        control_key(tmp_path)
    assert key not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00", b"two words"])
def test_a_file_that_holds_no_key_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="is not a valid key"):
        control_key(tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_is_refused_with_the_command_that_mends_it(mode: int, tmp_path: Path) -> None:
    control_key(tmp_path)
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(ConfigurationError, match=r"is readable by others.*chmod 600"):
        control_key(tmp_path)


def test_a_place_where_no_key_can_lie_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=f"cannot be read: Not a directory.*set {KEY_VARIABLE}"):
        control_key(tmp_path / "file" / "weights")
    (tmp_path / KEY_FILE).mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        control_key(tmp_path)


def test_threads_that_make_the_key_at_once_get_the_same_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        for number in range(20):
            assert len(set(threads.map(control_key, [tmp_path / str(number)] * 4))) == 1


def code_of(current: str, new: str) -> str:
    label = ServedLabel.parse(new)
    assert label is not None
    try:
        check_order(current, label)
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

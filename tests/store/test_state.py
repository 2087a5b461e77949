"""The committed state: damage, going back one commit, and what must not be pruned."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import flip_byte, names_below, rollout

from pvg.errors import StateError
from pvg.store.atomic import DamagedFileError
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.store.state import FileStateStore, LoadedState

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_what_is_saved_is_loaded(state) -> None:
    with TemporaryDirectory() as directory:
        store = FileStateStore(Path(directory) / "state.json")
        assert store.load() == LoadedState(None)
        store.save(state)
        assert store.load() == LoadedState(state)
        assert FileStateStore(store.path).commits() == [state]


@pytest.mark.parametrize("state", [{"x": math.nan}, {"x": (1, 2)}, {"x": [math.inf]}])
def test_what_json_cannot_give_back_is_refused(tmp_path: Path, state) -> None:
    store = FileStateStore(tmp_path / "state.json")
    with pytest.raises(ValueError, match="not plain JSON"):
        store.save(state)
    assert names_below(tmp_path) == set()


@pytest.fixture
def store(tmp_path: Path) -> FileStateStore:
    """Three commits; the last two are on disk."""
    store = FileStateStore(tmp_path / "state.json")
    for step in (1, 2, 3):
        store.save({"step": step, "loss": 0.1})
    return store


def test_the_commit_before_is_kept(store: FileStateStore) -> None:
    assert store.commits() == [{"step": 3, "loss": 0.1}, {"step": 2, "loss": 0.1}]


@pytest.mark.slow
def test_any_flipped_byte_and_any_cut_goes_back_one_commit(store: FileStateStore) -> None:
    whole = store.path.read_bytes()
    meaning = orjson.loads(whole)
    for place in range(len(whole)):
        flip_byte(store.path, place)
        loaded = store.load()
        assert loaded.state == {"step": 2, "loss": 0.1}, place
        assert "state.json" in loaded.notice
        assert "Went back to the previous commit" in loaded.notice
        store.path.write_bytes(whole)
    for length in range(0, len(whole) - 1, 7):  # the last byte is a newline, which JSON does not need
        store.path.write_bytes(whole[:length])
        assert store.load().state == {"step": 2, "loss": 0.1}
    meaning["state"]["step"] = 4
    store.path.write_bytes(orjson.dumps(meaning))
    assert "checksum" in store.load().notice
    store.path.write_bytes(whole)
    assert store.load() == LoadedState({"step": 3, "loss": 0.1})


def test_a_missing_state_beside_a_previous_one_goes_back(store: FileStateStore) -> None:
    store.path.unlink()
    loaded = store.load()
    assert loaded.state == {"step": 2, "loss": 0.1}
    assert "missing" in loaded.notice


def test_a_damaged_state_never_replaces_a_good_previous_one(store: FileStateStore) -> None:
    store.path.write_bytes(store.path.read_bytes()[:40])
    store.save({"step": 3})
    assert store.commits() == [{"step": 3}, {"step": 2, "loss": 0.1}]


def test_with_both_damaged_there_is_nothing_to_resume(store: FileStateStore) -> None:
    for path in (store.path, store.previous_path):
        path.write_bytes(b"{}")
    with pytest.raises(StateError, match="cannot be used either") as caught:
        store.load()
    assert "start a new run" in caught.value.remedy
    assert store.commits() == []


def test_loading_changes_no_file(store: FileStateStore) -> None:
    flip_byte(store.path, 5)
    before = {name: (store.path.parent / name).read_bytes() for name in names_below(store.path.parent)}
    store.load()
    assert {name: (store.path.parent / name).read_bytes() for name in names_below(store.path.parent)} == before


def test_another_schema_is_no_damage(store: FileStateStore, monkeypatch) -> None:
    monkeypatch.setattr("pvg.store.state.STATE_SCHEMA", 2)
    with pytest.raises(StateError, match="schema 1, but this pvg reads schema 2") as caught:
        store.load()
    assert not isinstance(caught.value, DamagedFileError)


def test_a_commit_whose_files_are_damaged_is_passed_over(tmp_path: Path) -> None:
    store, shards = FileStateStore(tmp_path / "state.json"), RolloutShards(tmp_path)
    infos: list[ShardInfo] = []
    for k in range(2):
        infos.append(shards.write(0, f"mint-{k:05d}", [rollout(k)]))
        store.save({"shards": [info.plain() for info in infos]})

    def check(state) -> None:
        for plain in state["shards"]:
            shards.verify(ShardInfo.from_plain(plain))

    assert store.load(check).notice == ""
    flip_byte(tmp_path / infos[1].path, 100)
    loaded = store.load(check)
    assert loaded.state == {"shards": [infos[0].plain()]}
    assert "mint-00001" in loaded.notice
    flip_byte(tmp_path / infos[0].path, 100)
    with pytest.raises(StateError, match=r"mint-00000.* cannot be used either: .*mint-00000"):
        store.load(check)

    def other_complaint(_) -> None:
        raise StateError("The configuration differs.")

    with pytest.raises(StateError, match="configuration differs"):  # no damage: the user must hear of it
        store.load(other_complaint)


def test_leftovers_of_a_killed_save_are_cleaned_and_others_stay(store: FileStateStore) -> None:
    mine = store.path.parent / ".tmp-state.json-0a1b2c3d"
    others = store.path.parent / ".tmp-report.html-0a1b2c3d"
    for path in (mine, others):
        path.write_bytes(b"half")
    store.save({"step": 4})
    assert not mine.exists()
    assert others.exists()


def test_going_back_leaves_one_commit_and_needs_one(store: FileStateStore, tmp_path: Path) -> None:
    store.go_back()
    assert store.load() == LoadedState({"step": 2, "loss": 0.1})
    assert store.commits() == [{"step": 2, "loss": 0.1}] * 2
    store.previous_path.write_bytes(b"{")
    with pytest.raises(DamagedFileError, match="previous"):
        store.go_back()
    assert store.load().state == {"step": 2, "loss": 0.1}

"""Downloads from a hub on loopback: what reaches the disk, what a failure says, and what a second call still needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, close_session, constants, file_download
from loopback_hub import TOKEN, Hub, commit_of

from pvg import hub as pvg_hub
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError, MissingRequirementError, PvgError, UsageError
from pvg.hub import HubId, fetch, fetch_config, hub_ids, parse, pinned, pinned_as, upload
from pvg.planning.memory import read_shape

pytestmark = pytest.mark.slow

QUIET = [].append


def experiment(source: str, **more: str) -> Experiment:
    return build_experiment({"models": {"prover": {"source": source}}, **more})


def read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:Qwen/Qwen2.5-0.5B-Instruct", HubId("Qwen/Qwen2.5-0.5B-Instruct")),
        ("hf:gpt2", HubId("gpt2")),
        ("hf:a/b_c@v1.0", HubId("a/b_c", "v1.0")),
        ("hf:a/b@refs/pr/1", HubId("a/b", "refs/pr/1")),
    ],
)
def test_a_hub_id_is_read_and_written(source: str, expected: HubId) -> None:
    assert parse(source) == expected
    assert str(expected) == source
    assert not expected.is_pinned


@pytest.mark.parametrize(
    "source",
    [
        *("hf:", "hf:/a", "hf:a/", "hf:a/b/c", "hf:a b/c", "hf:../b", "hf:a/b@", "hf:a/b@../c", "hf:a/b@x y"),
        *("hf:a--b/c", "hf:-a/b", f"hf:a/{'b' * 95}", "hf:a/b\n", "hf:a/ü", "hf:a/b@v\0"),
    ],
)
def test_what_no_repository_is_called_is_refused_with_the_key(source: str) -> None:
    with pytest.raises(ConfigurationError, match=r"models\.prover\.source: .* is not an id of the Hugging Face hub"):
        experiment(source)


def test_only_safetensors_and_text_are_downloaded(hub: Hub, here: Path, model: dict[str, bytes]) -> None:
    commit = hub.add("tiny/prover", model)
    said: list[str] = []
    folder = fetch("hf:tiny/prover", "model", said.append)
    wanted = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert read(folder) == {name: model[name] for name in wanted}
    assert sorted(hub.downloads()) == sorted(wanted)
    assert folder.name == commit
    (line,) = said
    assert line.startswith("tiny/prover: 5 of 5 files to download, ")
    assert line.endswith(f" MB, to {here}.")


def test_a_commit_in_the_cache_needs_no_network(hub: Hub, here: Path, model: dict[str, bytes]) -> None:
    commit = hub.add("tiny/prover", model)
    first = fetch(f"hf:tiny/prover@{commit}", "model", QUIET)
    hub.forget()
    said: list[str] = []
    assert fetch(f"hf:tiny/prover@{commit}", "model", said.append) == first
    assert (hub.seen, said) == ([], [])


@pytest.mark.parametrize("revision", ["main", "v1", "refs/pr/1"])
def test_a_revision_is_resolved_to_its_commit(hub: Hub, here: Path, model: dict[str, bytes], revision: str) -> None:
    old = hub.add("tiny/prover", model)
    new = hub.add("tiny/prover", model)
    hub.repositories["models/tiny/prover"].refs |= {"v1": old, "refs/pr/1": old}
    expected = new if revision == "main" else old
    (found,) = hub_ids(pinned(experiment(f"hf:tiny/prover@{revision}").sources(), QUIET)).values()
    assert found == f"hf:tiny/prover@{expected}"
    assert fetch(f"hf:tiny/prover@{revision}", "model", QUIET).name == expected


def test_a_resumed_run_keeps_its_commit_unless_another_revision_is_named(here: Path) -> None:
    commit = commit_of("a")
    run = experiment(f"hf:tiny/prover@{commit}").sources()
    assert pinned_as(experiment("hf:tiny/prover").sources(), run) == run
    for other in ("hf:tiny/other", "hf:tiny/prover@v2", f"hf:tiny/prover@{commit_of('b')}", "embedded:modchain-prover"):
        assert pinned_as(experiment(other).sources(), run) == experiment(other).sources()


@pytest.mark.parametrize(
    ("source", "error", "says", "remedy"),
    [
        ("hf:nosuch/model", UsageError, "'nosuch/model'", "HF_TOKEN"),
        ("hf:tiny/prover@v9", UsageError, "'v9'", "commits"),
        (f"hf:tiny/prover@{commit_of('x')}", UsageError, "has no revision", "commits"),
        ("hf:tiny/gated", MissingRequirementError, "is gated", "Request access at http"),
        ("hf:tiny/pickled", ConfigurationError, "only as pytorch_model.bin, a pickle", "@refs/pr/1"),
        ("hf:tiny/empty", ConfigurationError, "has no model.safetensors", "another model"),
        ("hf:tiny/headless", ConfigurationError, "has no config.json", ""),
    ],
)
def test_a_repository_that_cannot_be_used_is_told_in_one_line(
    hub: Hub, here: Path, model: dict[str, bytes], source: str, error: type[PvgError], says: str, remedy: str
) -> None:
    hub.add("tiny/prover", model)
    hub.add("tiny/gated", model, gated=True)
    hub.add("tiny/pickled", {name: data for name, data in model.items() if not name.endswith(".safetensors")})
    hub.add("tiny/empty", {"config.json": b"{}"})
    hub.add("tiny/headless", {"model.safetensors": b"x"})
    with pytest.raises(error) as caught:
        fetch(source, "model", QUIET)
    assert says in caught.value.message
    assert remedy in caught.value.remedy
    assert "\n" not in str(caught.value)
    assert hub.downloads() == []


def test_a_token_opens_a_gated_model_and_a_wrong_one_is_told(
    hub: Hub, here: Path, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("tiny/gated", model, gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(MissingRequirementError, match="does not accept your token"):
        fetch("hf:tiny/gated", "model", QUIET)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetch("hf:tiny/gated", "model", QUIET) / "model.safetensors").is_file()


def test_a_connection_that_breaks_is_resumed_where_it_broke(
    hub: Hub, here: Path, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    hub.add("tiny/prover", model)
    hub.cuts["model.safetensors"] = [50_000]
    folder = fetch("hf:tiny/prover", "model", QUIET)
    assert (folder / "model.safetensors").read_bytes() == model["model.safetensors"]
    ranges = [line for line in hub.seen if line.startswith("GET") and "model.safetensors" in line]
    assert len(ranges) == 2
    assert "bytes=" in ranges[1]
    assert 0 < int(ranges[1].rpartition("bytes=")[2].split("-")[0]) <= 50_000


def test_a_download_that_stops_goes_on_with_the_same_command(
    hub: Hub, here: Path, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("tiny/prover", model)
    hub.cuts["model.safetensors"] = [1000] * 6  # huggingface_hub tries six times, a second apart
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    with pytest.raises(MissingRequirementError, match="tiny/prover") as caught:
        fetch("hf:tiny/prover", "model", QUIET)
    assert "Run the same command again" in caught.value.remedy
    first = set(hub.downloads()) - {"model.safetensors"}
    hub.forget()
    folder = fetch("hf:tiny/prover", "model", QUIET)
    assert (folder / "model.safetensors").read_bytes() == model["model.safetensors"]
    assert "model.safetensors" in hub.downloads()
    assert "tokenizer.json" in first
    assert "tokenizer.json" not in hub.downloads()


def test_offline_the_cache_serves_and_says_so(
    hub: Hub, here: Path, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("tiny/prover", model)
    folder = fetch("hf:tiny/prover", "model", QUIET)
    hub.forget()
    pvg_hub._commit.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said: list[str] = []
    assert fetch("hf:tiny/prover", "model", said.append) == folder
    assert said == [f"HF_HUB_OFFLINE is set. hf:tiny/prover is commit {commit}, from the cache."]
    assert hub.seen == []
    with pytest.raises(MissingRequirementError, match="HF_HUB_OFFLINE is set, but hf:tiny/other is not completely"):
        fetch("hf:tiny/other", "model", QUIET)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(MissingRequirementError, match="is not completely in the cache"):
        fetch(f"hf:tiny/prover@{commit}", "model", QUIET)


def test_a_hub_that_does_not_answer_is_told_and_the_cache_serves(
    hub: Hub, here: Path, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("tiny/prover", model)
    folder = fetch("hf:tiny/prover", "model", QUIET)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    pvg_hub._commit.cache_clear()
    said: list[str] = []
    assert fetch("hf:tiny/prover", "model", said.append) == folder
    assert "http://127.0.0.1:9" in said[0]
    assert said[0].endswith(f". hf:tiny/prover is commit {commit}, from the cache.")
    with pytest.raises(MissingRequirementError, match=r"http://127\.0\.0\.1:9: .*Check the network"):
        fetch("hf:tiny/other", "model", QUIET)


def test_a_defect_of_a_library_is_not_the_network_s(
    hub: Hub, here: Path, model: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("tiny/prover", model)
    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: {}["siblings"])
    with pytest.raises(MissingRequirementError, match=r"failed \(KeyError: 'siblings'\)") as caught:
        fetch("hf:tiny/prover", "model", QUIET)
    assert "network" not in caught.value.remedy.partition(". ")[0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9"),
        ("ALL_PROXY", "socks://127.0.0.1:9"),
        ("HTTPS_PROXY", "ftp://127.0.0.1:9"),
        ("http_proxy", "http://127.0.0.1:port"),
        ("SSL_CERT_FILE", "/no/such.pem"),
        ("SSL_CERT_FILE", "/dev/null"),
        ("HF_TOKEN", "hf_é"),
    ],
)
def test_a_variable_that_allows_no_request_is_named(
    hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("SSL_CERT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, value)
    close_session()
    try:
        for send in (
            lambda: fetch("hf:some/model", "model", QUIET),
            lambda: upload(here.parent, "some/model", public=False),
        ):
            with pytest.raises(MissingRequirementError) as caught:
                send()
            assert variable in str(caught.value.__cause__ if "upload" in str(caught.value) else caught.value)
    finally:
        close_session()


def test_huggingface_hub_is_loaded_for_a_download_alone() -> None:
    code = (
        "import sys, pvg, pvg.hub, pvg_cli.main; print([m for m in ('torch', 'huggingface_hub') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_config_is_downloaded_without_the_weights(hub: Hub, here: Path, model: dict[str, bytes]) -> None:
    commit = hub.add("tiny/prover", model)
    assert fetch_config(f"hf:tiny/prover@{commit}", QUIET).read_bytes() == model["config.json"]
    assert {path.name for path in here.rglob("snapshots/*/*")} == {"config.json"}
    shape = read_shape(f"hf:tiny/prover@{commit}", QUIET)
    assert shape.parameters == read_shape("embedded:modchain-prover", QUIET).parameters
    assert set(hub.downloads()) == {"config.json"}
    with pytest.raises((UsageError, MissingRequirementError)):
        fetch_config("hf:tiny/nowhere", QUIET)

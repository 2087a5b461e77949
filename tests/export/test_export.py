"""Exports open with transformers and peft alone, and give the scores and log-probs that pvg computes."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import orjson
import pytest
import torch
from game.kill_drill import TINY_PROVER
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from verifier.tiny_verifiers import CHAT, english_tokenizer, language_model, perturb, verifier

import pvg
from pvg.config.load import build_experiment
from pvg.config.rollout import FRAME
from pvg.config.training import YES_NO_QUESTION, Verifier
from pvg.errors import ConfigurationError, UsageError
from pvg.export.finished import FinishedRound
from pvg.export.folders import LABELS, LOADER, WRITERS, export_player, intervals, loader_source
from pvg.models.heads import ScoreScales, VerifierEnsemble, VerifierModel, build_verifier
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer
from pvg.verifier.data import VerifierTemplate

pytestmark = pytest.mark.slow

# Reads lists of parts, and writes the date.
PARTS = CHAT.replace("m.content", "m.content[0].text + ''") + "{{ strftime_now('%d %b') }}"
QUESTION_OF_TEST = "7+5+8+3+6?"
SOLUTIONS = ["7+5=2;2+8=0;0+3=3;3+6=9;A9", "7+5=2;2+8=0;0+3=4;4+6=0;A0", "A9", ""]


@pytest.fixture(scope="module")
def implicit(folder: Path) -> FinishedRound:
    """The embedded models, and the implicit head."""
    return FinishedRound.open(pvg.Run("mine").directory)


@pytest.fixture(scope="module")
def scalar(folder: Path) -> FinishedRound:
    """A Llama directory with adapters for both players, and a scalar head."""
    shutil.copytree(TINY_PROVER, folder / "llama")
    settings = {
        "game.rounds": 1,
        "models.prover.source": str(folder / "llama"),
        "models.verifier.source": str(folder / "llama"),
        "training.adapters.rank": 2,
        "verifier.adapters.rank": 2,
        "verifier.head": "scalar",
    }
    return FinishedRound.open(pvg.play("small.toml", settings, name="scalar").directory)


def loader(folder: Path) -> Any:
    """The loader file of an export, imported from there."""
    spec = importlib.util.spec_from_file_location("exported_loader", folder / LOADER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ExportedVerifier(folder)


def pvg_scores(finished: FinishedRound) -> list[float]:
    with finished.scorer() as scorer:
        return [float(score) for score in scorer.score_texts(QUESTION_OF_TEST, SOLUTIONS)]


def facts_of(model: VerifierModel, head: str, style: str = "plain") -> dict[str, Any]:
    asks = YES_NO_QUESTION if head == "yes_token" else None
    return {
        "head": head,
        "score_bias": 0.0,
        "threshold": 0.0,
        "template": {"style": style, "asks": asks, "frame": FRAME},
    }


def scores_of(model: VerifierModel, style: Any, rows: list[tuple[str, str]]) -> list[float]:
    template = VerifierTemplate(model.tokenizer, style, model.reads)
    found = []
    for question, solution in rows:
        ids, start = template.tokens(question, solution, None, None)
        with torch.inference_mode():
            row = torch.from_numpy(ids).long()[None]
            found.append(model(row, torch.tensor([len(ids)]), torch.tensor([start])).item())
    return found


def test_a_prover_opens_as_a_causal_language_model(implicit: FinishedRound, folder: Path) -> None:
    export_player(implicit, "prover", folder / "prover")
    model, tokenizer = (kind.from_pretrained(folder / "prover") for kind in (AutoModelForCausalLM, AutoTokenizer))
    tensors, _ = implicit.read_weights(implicit.prover_name)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert tokenizer.decode(tokenizer("H7+5?").input_ids) == "H7+5?"
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.temperature == implicit.experiment.rollout.temperature
    assert model.generation_config.max_new_tokens == implicit.experiment.rollout.max_tokens
    assert model.config.pvg["run"] == "mine"


def test_an_implicit_verifier_scores_with_its_loader_as_pvg_does(implicit: FinishedRound, folder: Path) -> None:
    export_player(implicit, "verifier", folder / "implicit")
    weights = list((folder / "implicit").rglob("*.safetensors"))  # two models
    assert {path.stat().st_mode for path in weights} == {(folder / "implicit" / "config.json").stat().st_mode}
    exported = loader(folder / "implicit")
    wanted = pvg_scores(implicit)
    assert len({round(score, 3) for score in wanted}) == len(SOLUTIONS)
    assert [exported.score(QUESTION_OF_TEST, text) for text in SOLUTIONS] == pytest.approx(wanted, abs=1e-4)
    assert exported.threshold == pytest.approx(implicit.metrics["threshold"])
    long = "1+1=2;" * 100
    for question, solution in (
        ("é", "A9"),
        ("7+5?", "é"),
        ("", "A9"),
        (" ", "A9"),
        ("7+5?", long),
        (7, "A9"),
        ("7+5?", None),
    ):
        with pytest.raises(ValueError, match=r"cannot express 'é'|is empty|context of 128|not a text"):
            exported.score(question, solution)
    with pytest.raises(ValueError, match="calibration"):
        exported.probability(QUESTION_OF_TEST, "A9")
    exported.facts["calibration"] = {"slope": 1e6, "offset": 0.5}
    assert exported.probability(QUESTION_OF_TEST, "A9") in (0.0, 1.0)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_an_implicit_verifier_is_exported_with_its_share_of_the_reference(
    weight: float, implicit: FinishedRound, folder: Path
) -> None:
    plain = implicit.experiment.plain()
    plain["verifier"]["head"]["reference"] = weight
    finished = replace(implicit, experiment=build_experiment(plain))
    place = folder / f"implicit-{weight}"
    export_player(finished, "verifier", place)
    assert (place / "reference").is_dir() == (weight > 0)
    wanted = pvg_scores(finished)
    assert wanted != pytest.approx(pvg_scores(implicit), abs=1e-2)
    exported = loader(place)
    assert [exported.score(QUESTION_OF_TEST, text) for text in SOLUTIONS] == pytest.approx(wanted, abs=1e-4)


def test_a_scalar_verifier_with_adapters_is_a_classifier(scalar: FinishedRound, folder: Path) -> None:
    facts = export_player(scalar, "verifier", folder / "classifier")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(folder / "classifier")
    rows = [[*tokenizer(QUESTION_OF_TEST + text).input_ids, tokenizer.eos_token_id] for text in SOLUTIONS]
    found = [model(torch.tensor([row])).logits[0, 0].item() + facts["score_bias"] for row in rows]
    assert found == pytest.approx(pvg_scores(scalar), abs=1e-5)
    assert model.config.num_labels == 1
    exported = loader(folder / "classifier")
    assert [exported.score(QUESTION_OF_TEST, text) for text in SOLUTIONS] == pytest.approx(found, abs=1e-6)
    longest = max(map(len, rows))
    padded = torch.tensor([row + [model.config.pad_token_id] * (longest - len(row)) for row in rows])
    together = [value + facts["score_bias"] for value in model(padded).logits[:, 0].tolist()]
    assert together == pytest.approx(found, abs=1e-5)


def test_adapters_open_with_peft_and_equal_the_merged_model(scalar: FinishedRound, folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="`make install`")
    export_player(scalar, "prover", folder / "adapter")
    export_player(scalar, "prover", folder / "merged", merge=True)
    assert not list((folder / "adapter").glob("model*"))
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder / "adapter")("H7+5+8?7+5=2;").input_ids])
    assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype="float32")
    assert not torch.allclose(base(ids).logits, merged(ids).logits, atol=1e-5)


def test_the_code_of_a_model_card_runs_without_pvg(
    scalar: FinishedRound, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", {"me/mine": "card-me/mine"}.__getitem__)
    wanted = pvg_scores(scalar)[0]
    for player, repository in (("prover", ""), ("verifier", ""), ("verifier", "me/mine")):
        out = folder / f"card-{repository or player}"
        export_player(scalar, player, out, repository=repository)  # type: ignore[arg-type]
        card = (out / "README.md").read_text()
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        names: dict[str, Any] = {}
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "pvg", None)
            without.delitem(sys.modules, "pvg_verifier", raising=False)
            exec(code, names)
        if player == "verifier":
            assert names["verifier"].score(QUESTION_OF_TEST, SOLUTIONS[0]) == pytest.approx(wanted, abs=1e-5)
            assert f"| {LABELS['fooled_rate']} | {scalar.metrics['fooled_rate']:.1%}".replace("%", " %") in card


def test_the_intervals_of_a_card_hold_the_metrics_of_the_run(implicit: FinishedRound) -> None:
    found = intervals(implicit)
    for name in ("helpful_accuracy", "sneaky_error_rate", "fooled_rate", "accepted_helpful"):
        estimate = found[name]
        assert estimate.value == pytest.approx(implicit.metrics[name])
        assert estimate.low <= estimate.value <= estimate.high


def gpt2(tokenizer: Tokenizer) -> LanguageModel:
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=tokenizer.vocab_size,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
    )
    return LanguageModel(GPT2LMHeadModel(config), tokenizer, "gpt2")


def qwen2(tokenizer: Tokenizer) -> LanguageModel:
    torch.manual_seed(6)
    config = Qwen2Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LanguageModel(Qwen2ForCausalLM(config), tokenizer, "qwen2")


@pytest.mark.parametrize("family", [gpt2, qwen2, lambda tokenizer: language_model(tokenizer, context=128)])
@pytest.mark.parametrize("style", ["plain", "chat", "parts"])
@pytest.mark.parametrize("head", ["scalar", "yes_token", "implicit"])
def test_every_head_on_every_family_scores_the_same(tmp_path: Path, family: Any, style: str, head: str) -> None:
    parts, style = style == "parts", "chat" if style == "parts" else style
    tokenizer = english_tokenizer(PARTS if parts else CHAT)
    model = build_verifier(Verifier(head=head), family(tokenizer))
    perturb(model)
    facts = facts_of(model, head, style)
    if parts:
        facts["template"] |= {"parts": True, "chat_template": tokenizer.chat_template}
    WRITERS[type(model)](model, tmp_path, facts)
    written = orjson.loads((tmp_path / "config.json").read_bytes())
    assert written["pvg"]["head"] == head
    (tmp_path / LOADER).write_text(loader_source())
    rows = [("7 + 5?", "It is 12."), ("a<|start|>b", "yes<|e<|end|>nd|>no<pad>7<|eos|>"), ("7 + 5?", "")]
    exported = loader(tmp_path)
    # For Qwen 2, AutoTokenizer replaces the tokenizer of characters by Qwen's own rules.
    exported.tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert [exported.score(*row) for row in rows] == pytest.approx(scores_of(model, style, rows), abs=2e-4)


def test_an_ensemble_is_refused(implicit: FinishedRound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble = VerifierEnsemble([verifier("scalar"), verifier("scalar", 1)], "mean", ScoreScales.none(2))
    monkeypatch.setattr(FinishedRound, "read_verifier", lambda *_: (ensemble, 0.0))
    with pytest.raises(ConfigurationError, match="an ensemble of verifiers, which has no form"):
        export_player(implicit, "verifier", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_export_is_replaced(implicit: FinishedRound, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_player(implicit, "prover", out)
    with pytest.raises(UsageError, match="--overwrite"):
        export_player(implicit, "prover", out)
    (out / "stale").write_text("")
    export_player(implicit, "prover", out, overwrite=True)
    assert not (out / "stale").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="not an export"):
        export_player(implicit, "prover", other, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_a_failed_export_leaves_nothing(
    implicit: FinishedRound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pvg.export.folders.model_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_player(implicit, "prover", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_round_that_is_not_finished_is_refused(implicit: FinishedRound) -> None:
    with pytest.raises(UsageError, match="Round 3 of the run 'mine' is not finished"):
        FinishedRound.open(implicit.run, 3)

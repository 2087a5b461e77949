"""Writes a player of a finished round as a Hugging Face directory.

Invariants: a directory gets its name when it is complete. Weights are safetensors. An existing directory is replaced
only if it is an earlier export and the caller allows it.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import orjson
import tomli_w
import torch
from jinja2 import ChainableUndefined, Environment, PackageLoader

from pvg import __version__
from pvg.config.base import is_hub_id, is_run_id, parse, shown_source
from pvg.config.experiment import Experiment
from pvg.config.rollout import FRAME
from pvg.config.training import YES_NO_QUESTION, AnswerHead
from pvg.errors import ConfigurationError, UsageError, user_paths
from pvg.evaluation.opened_run import OpenedRun
from pvg.export import pvg_verifier
from pvg.export.finished import FinishedRound
from pvg.export.target import MARK, check_target, put, resolved
from pvg.game.statistics import RolloutColumns, shares_of
from pvg.inputs import expanded
from pvg.models import open_model
from pvg.models.heads import GenerativeHead, ImplicitHead, ScalarHead, VerifierModel, YesTokenHead
from pvg.models.language_model import LanguageModel, LowRankAdapter, without_progress_bars
from pvg.models.logprobs import finish_logits
from pvg.models.tokenizer import Tokenizer
from pvg.records import Role, source_of_round
from pvg.store.atomic import disk_full_explained, make_directory, share_weights, temporary_beside
from pvg.store.run_players import WARMED_PROVER, adapter_name
from pvg.tasks import opened_task
from pvg.tasks.task import ConcealsText
from pvg.verifier.intervals import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pvg.models.tokenizer import Tokenizer


# The model card of an export: README.md, made from the run.

SECTIONS = ("task", "models", "game", "verifier", "training", "prompts", "rollout", "warmup", "seed")  # in the card
LABELS = {
    "helpful_accuracy": "Correct solutions of the helpful prover",
    "sneaky_error_rate": "Wrong solutions of the sneaky prover",
    "fooled_rate": "Wrong sneaky solutions that the verifier accepts",
    "accepted_helpful": "Correct helpful solutions that the verifier accepts",
}
PROMPT_CHARACTERS = 4_000  # of an example prompt; enough to see its form


def intervals(finished: FinishedRound) -> dict[str, Estimate]:
    """The round's shares with intervals, from the stored samples on test problems. Empty for a run without them."""
    opened = OpenedRun.open(finished.run)
    own = source_of_round(finished.round)
    kept = [r for r in opened.read_rollouts(finished.round, "checkpoint") if r.source == own and r.score is not None]
    threshold = finished.metrics.get("threshold")
    if not kept or threshold is None:
        return {}
    return shares_of(RolloutColumns(kept, np.array([r.score for r in kept], dtype=np.float32)), threshold)


def example_prompts(finished: FinishedRound, tokenizer: Tokenizer) -> dict[str, str]:
    """By role, the prompt of the round's first stored sample, with special tokens, and cut after PROMPT_CHARACTERS. The
    reader of an export must write such prompts, because the prover learned from them. Empty for a run without stored
    samples."""
    found: dict[str, str] = {}
    for rollout in OpenedRun.open(finished.run).read_rollouts(finished.round, "checkpoint"):
        if rollout.role.value not in found:
            prompt = tokenizer.shown(rollout.prompt_ids)
            left_out = len(prompt) - PROMPT_CHARACTERS
            note = f"\n[pvg cut this prompt here: {left_out:,} more characters]" if left_out > 0 else ""
            found[rollout.role.value] = prompt[:PROMPT_CHARACTERS] + note
        if len(found) == len(Role):
            break
    return found


def model_card(finished: FinishedRound, facts: dict[str, Any], folder: str, repository: str = "") -> str:
    """README.md of an export with these facts. The code of the card loads `folder`, or `repository` of the hub."""
    loader = PackageLoader("pvg.export")
    templates = Environment(loader=loader, undefined=ChainableUndefined, keep_trailing_newline=True)  # no HTML
    templates.filters["fenced"] = _fenced
    place = "folder" if repository and facts["player"] == "verifier" else repr(repository or folder)
    plain = finished.experiment.model_dump(mode="json", exclude_none=True)
    values = {
        **facts,
        "hub_base": parse(facts["base"]).repository if is_hub_id(facts["base"]) else "",
        "rounds": finished.experiment.game.rounds,
        "code": templates.get_template("load.py.j2").render(facts, place=place, repository=repository),
        "shares": {LABELS[name]: found for name, found in intervals(finished).items() if found.value is not None},
        "auc": finished.metrics.get("verifier_auc"),
        "settings": tomli_w.dumps({name: _public(plain[name]) for name in SECTIONS if name in plain}),
    }
    return templates.get_template("card.md.j2").render(values)


def _fenced(text: str, language: str) -> str:
    """As a block of code. The fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _public(value: Any) -> Any:
    """A setting as the card shows it. Cards are published, so absolute paths lose their beginnings."""
    if isinstance(value, dict):
        return {name: _public(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_public(entry) for entry in value]
    if isinstance(value, str) and value.startswith("run:/"):  # run:RUN/round-0/prover@DIGEST
        return "run:" + "/".join(Path(value).parts[-3:])
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


Player = Literal["prover", "verifier"]
FORMAT = 1
LOADER = "pvg_verifier.py"
REFERENCE = "reference"  # the implicit head's second model, in its own folder
CPU = torch.device("cpu")


def export_player(
    finished: FinishedRound,
    player: Player,
    out: Path,
    *,
    merge: bool = False,
    overwrite: bool = False,
    repository: str = "",
) -> dict[str, Any]:
    """Write `out` and return its facts, which are also in `pvg.json` and in config.json under "pvg".

    A prover with adapters becomes a peft directory, or with `merge` a whole model. `repository`: of the hub, if the
    caller uploads the folder, for the code of the model card. Raises UsageError if `out` exists,
    and ConfigurationError for a verifier that has no Hugging Face form.
    """
    with user_paths():
        check_target(out, overwrite)
        place = resolved(out)  # of a link, the folder that it leads to
    with user_paths(), disk_full_explained(out, of_run=False):
        make_directory(place.parent)
        temporary = temporary_beside(place)
        temporary.mkdir()
        try:
            with without_progress_bars():
                facts = (
                    _write_prover(finished, temporary, merge)
                    if player == "prover"
                    else _write_verifier(finished, temporary)
                )
            (temporary / MARK).write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
            card = model_card(finished, facts, out.name, repository)
            (temporary / "README.md").write_text(card, encoding="utf-8")
            share_weights(temporary)
            put(temporary, place)
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)
    return facts


def _common(finished: FinishedRound, player: Player, source: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "pvg_version": __version__,
        "player": player,
        "run": finished.run.name,
        "experiment": finished.experiment.name,
        "task": finished.experiment.task.kind,
        "round": finished.round,
        "base": shown_source(source),
    }


# --- the prover -------------------------------------------------------------------------------------------------------


def _write_prover(finished: FinishedRound, folder: Path, merge: bool) -> dict[str, Any]:
    models, adapters = finished.experiment.models, adapter_name(finished.prover_name)
    facts = _common(finished, "prover", models.prover.source)
    whole = merge or adapters not in finished.weights
    # The merged weights of a run in 16 bits are rounded.
    exact = whole and adapters in finished.weights and models.dtype == "bfloat16"
    dtype = facts["dtype"] = "float32" if exact else models.dtype
    facts["prompts"] = finished.experiment.prompts.kind
    with open_model(models.prover, CPU, dtype) as model:
        facts["example_prompts"] = example_prompts(finished, model.tokenizer)
        if not whole:
            facts["form"] = "adapter"
            _write_adapter(finished, adapters, folder)
        else:
            facts["form"] = "model"
            if exact:
                from pvg.models.adapters import load_sum

                tensors, meta = finished.read_weights(adapters)
                load_sum(model, LowRankAdapter(tensors, meta["config"]))
            else:
                model.load_weights(finished.read_weights(finished.prover_name)[0])
            _set_generation(model, finished)
            _write_module(model.module, folder, facts)
        model.tokenizer.save(folder)
    return facts


def _write_adapter(finished: FinishedRound, name: str, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors, meta = finished.read_weights(name)
    if WARMED_PROVER in finished.weights:
        raise UsageError(
            "These adapters belong to the prover after the warm start, which peft cannot find.",
            "Add --merge, which writes a whole model.",
        )
    base, revision = _base_for_peft(finished.experiment.models.prover.source)
    config = {**meta["config"], "base_model_name_or_path": base, "revision": revision}
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))


def _base_for_peft(source: str) -> tuple[str, str | None]:
    """The name under which peft finds the base, and its revision."""
    if is_hub_id(source):
        found = parse(source)
        return found.repository, found.revision
    if source.partition(":")[0] in ("embedded", "gguf") or is_run_id(source):
        raise UsageError(
            f"peft cannot open the base of these adapters, {shown_source(source)!r}.",
            "Add --merge, which writes a whole model.",
        )
    return str(expanded(source, "models").resolve()), None


def _set_generation(model: LanguageModel, finished: FinishedRound) -> None:
    """Sampling as in the run, without settings of the base that the run does not have, such as a repetition penalty."""
    from transformers import GenerationConfig

    rollout, tokenizer = finished.experiment.rollout, model.tokenizer
    model.module.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_id if len(tokenizer.end_ids) == 1 else list(tokenizer.end_ids),
        pad_token_id=tokenizer.pad_id,
        max_new_tokens=rollout.max_tokens,
        do_sample=True,
        temperature=rollout.temperature,
        top_p=1.0,
        top_k=0,
    )


def _write_module(module: PreTrainedModel, folder: Path, facts: dict[str, Any]) -> None:
    cast(Any, module.config).pvg = facts
    module.save_pretrained(folder)


# --- the verifier -----------------------------------------------------------------------------------------------------


def _write_verifier(finished: FinishedRound, folder: Path) -> dict[str, Any]:
    verifier, threshold = finished.read_verifier(CPU)
    try:
        if not isinstance(verifier, VerifierModel):
            raise _no_form("an ensemble of verifiers", "Set verifier.ensemble to none in the next run")
        if isinstance(verifier, GenerativeHead):
            raise _no_form("a generative verifier, whose scores are votes", "Score with pvg score or pvg serve")
        write = WRITERS.get(type(verifier))
        if write is None:
            raise _no_form("a verifier head from a file of your own", "Score with pvg score or pvg serve")
        section, calibration = finished.experiment, finished.calibration()
        with opened_task(section.task) as task:
            conceals = isinstance(task, ConcealsText)  # it hides a part of each solution from the verifier
        facts = {
            **_common(finished, "verifier", section.models.verifier.source),
            "head": section.verifier.head.kind,
            "threshold": threshold,
            "score_bias": 0.0,
            "calibration": None if calibration is None else {"slope": calibration.slope, "offset": calibration.offset},
            "template": exported_template(section, verifier.tokenizer),
            "conceals_text": conceals,
        }
        write(verifier, folder, facts)
        (folder / LOADER).write_text(loader_source(), encoding="utf-8")
        return facts
    finally:
        verifier.close()


def loader_source() -> str:
    """The loader without pvg: the source of pvg's functions stands where it imports them."""
    before, line, after = re.split(r"^(from pvg.+)$", inspect.getsource(pvg_verifier), flags=re.MULTILINE)
    functions = re.findall(r"\w+", line.partition("#")[0].partition(" import ")[2])
    return before + "\n" + "\n\n".join(inspect.getsource(getattr(pvg_verifier, name)) for name in functions) + after


def exported_template(experiment: Experiment, tokenizer: Tokenizer) -> dict[str, Any]:
    """The verifier's input as the loader makes it: the style, the question of a yes_token head, the control and end
    tokens, and for "chat" the frame, and the chat template as pvg renders it."""
    prompts, head = experiment.prompts, experiment.verifier.head
    asks = YES_NO_QUESTION if isinstance(head, AnswerHead) else None
    style = prompts.kind if prompts.kind in ("chat", "text") else "plain"
    tokens = {"end_ids": list(tokenizer.end_ids), "controls": sorted(tokenizer.controls)}
    chat = (
        {"parts": tokenizer.layout(("user",)).parts, "chat_template": tokenizer.chat_template}
        if style == "chat"
        else {}
    )
    return {"style": style, "asks": asks, "frame": FRAME, **tokens, **chat}


def _no_form(what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"This run has {what}, which has no form that transformers can open.", f"{remedy}.")


def _write_scalar(verifier: VerifierModel, folder: Path, facts: dict[str, Any]) -> None:
    assert isinstance(verifier, ScalarHead)
    facts["score_bias"] = float(verifier.bias.detach())
    with verifier.trained_model() as model:
        _write_classifier(model, verifier.weight_D.detach(), folder, facts)


def _write_yes_token(verifier: VerifierModel, folder: Path, facts: dict[str, Any]) -> None:
    """logit("yes") - logit("no") = (w_yes - w_no) h + (b_yes - b_no), so a classifier with one label expresses it."""
    assert isinstance(verifier, YesTokenHead)
    yes, no = verifier.answer_ids
    with verifier.trained_model() as model:
        probe = torch.tensor([1.0, -1.0, 100.0])
        finished = finish_logits(model.module, probe)
        factor = float(finished[0])
        if not torch.allclose(finished, probe * factor):
            raise _no_form("a yes_token head on a model that caps its logits", "Score with pvg score or pvg serve")
        head = cast(Any, model.module.get_output_embeddings())
        weight_D = (head.weight[yes].float() - head.weight[no].float()).detach() * factor
        if getattr(head, "bias", None) is not None:
            facts["score_bias"] = float((head.bias[yes].float() - head.bias[no].float()).detach()) * factor
        _write_classifier(model, weight_D, folder, facts)


def _write_implicit(verifier: VerifierModel, folder: Path, facts: dict[str, Any]) -> None:
    assert isinstance(verifier, ImplicitHead)
    facts["score_bias"], facts["beta"] = float(verifier.bias.detach()), verifier.beta
    facts["reference"] = verifier.weight
    with verifier.trained_model() as model:
        _write_module(model.module, folder, facts)
        if verifier.needs_reference:
            cast("PreTrainedModel", verifier.start).save_pretrained(folder / REFERENCE)
        model.tokenizer.save(folder)


def _write_classifier(model: LanguageModel, weight_D: torch.Tensor, folder: Path, facts: dict[str, Any]) -> None:
    """The backbone of `model` with one linear layer on the last token, as *ForSequenceClassification."""
    from transformers import AutoModelForSequenceClassification

    module = model.module
    labels: dict[str, Any] = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config = type(module.config).from_dict({**module.config.to_dict(), **labels})
    # What transformers skips at the end of a row. It must not be the end token, which ends every row.
    pad, end = model.tokenizer.pad_id, model.tokenizer.eos_id
    config.pad_token_id = pad if pad != end else int(end == 0)
    try:
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError:
        raise _no_form(
            f"a {facts['head']} head on {type(module).__name__}, an architecture without a classifier",
            "Score with pvg score or pvg serve",
        ) from None
    layer: Any = getattr(classifier, "score", None)
    if not isinstance(layer, torch.nn.Linear) or [*layer.state_dict()] != ["weight"]:
        raise _no_form(f"a {facts['head']} head on {type(module).__name__}", "Score with pvg score or pvg serve")
    classifier.base_model.load_state_dict(module.base_model.state_dict())
    with torch.no_grad():
        layer.weight.copy_(weight_D[None])
    _write_module(classifier, folder, facts)
    model.tokenizer.save(folder)


WRITERS: dict[type[VerifierModel], Callable[[VerifierModel, Path, dict[str, Any]], None]] = {
    ScalarHead: _write_scalar,
    YesTokenHead: _write_yes_token,
    ImplicitHead: _write_implicit,
}


def weights_size(folder: Path) -> int:
    """Bytes of all weight files."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))

"""The model card of an export: README.md, generated from the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pvg.config.base import is_hub_id, parse
from pvg.errors import one_line
from pvg.evaluation.intervals import Estimate, share_of
from pvg.evaluation.opened_run import OpenedRun
from pvg.export.finished import FinishedRound
from pvg.game.statistics import RolloutColumns
from pvg.records import Role, source_of_round

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pvg.models.tokenizer import Tokenizer

# The settings that a reader needs to judge the model, with all keys of a table. All others are in experiment.toml.
SETTINGS = (
    "task",
    "models.prover.source",
    "models.verifier.source",
    "game.reward",
    "game.protocol",
    "game.rounds",
    "game.start",
    "game.mint_problems",
    "game.growing",
    "game.mixture",
    "training.steps",
    "training.learning_rate",
    "verifier.head.kind",
    "verifier.loss",
    "verifier.steps",
    "prompts.kind",
    "rollout.max_tokens",
    "rollout.temperature",
    "seed",
)
# Self-play has no verifier, and goes on from the previous round whatever game.start is.
NOT_SELF_PLAY = ("models.verifier.source", "game.reward", "game.start", "verifier.")
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
    columns = RolloutColumns(kept, np.array([r.score for r in kept], dtype=np.float32))
    _, problems_N = np.unique([r.problem_id for r in kept], return_inverse=True)
    accepted_N = columns.scores_N >= np.float32(threshold)

    def share(holds_N: NDArray[np.bool_], among_N: NDArray[np.bool_]) -> Estimate:
        return share_of(holds_N[among_N], problems_N[among_N])

    return {
        "helpful_accuracy": share(columns.correct_N, columns.helpful_N),
        "sneaky_error_rate": share(columns.flaws_N, ~columns.helpful_N),
        "fooled_rate": share(accepted_N, columns.flaws_N),
        "accepted_helpful": share(accepted_N, columns.solutions_N),
    }


def example_prompts(finished: FinishedRound, tokenizer: Tokenizer) -> dict[str, str]:
    """By role, the prompt of the round's first stored sample, with special tokens, and cut after PROMPT_CHARACTERS. The
    reader of an export must write such prompts, because the prover learned from them. Empty for a run without stored
    samples."""
    found: dict[str, str] = {}
    for rollout in OpenedRun.open(finished.run).read_rollouts(finished.round, "checkpoint"):
        if rollout.role.value not in found:
            found[rollout.role.value] = _cut(tokenizer.shown(rollout.prompt_ids))
        if len(found) == len(Role):
            break
    return found


def _cut(prompt: str) -> str:
    left_out = len(prompt) - PROMPT_CHARACTERS
    if left_out <= 0:
        return prompt
    return f"{prompt[:PROMPT_CHARACTERS]}\n[pvg cut this prompt here: {left_out:,} more characters]"


def model_card(finished: FinishedRound, facts: dict[str, Any], folder: str, repository: str = "") -> str:
    """README.md of an export with these facts. The code of the card loads `folder`, or `repository` of the hub."""
    player, base = facts["player"], facts["base"]
    head = ["---", "library_name: " + ("peft" if facts.get("form") == "adapter" else "transformers")]
    if is_hub_id(base):
        head.append(f"base_model: {parse(base).repository}")
    head += ["tags:", "- prover-verifier-game", "- pvg", "---", ""]
    parts = [
        f"# {player.capitalize()} of the run {facts['run']}, round {facts['round']}",
        f"The {player} of a prover-verifier game on the task `{facts['task']}`, exported by pvg "
        f"{facts['pvg_version']}. It was trained from `{base}`. This is round "
        f"{facts['round']} of {finished.experiment.game.rounds}, counted from 0.",
        "## Load it",
        f"```python\n{loading_code(facts, folder, repository)}```",
        *([_verdicts(facts)] if player == "verifier" else _prompts(facts)),
        "## Measurements",
        _measurements(finished),
        "## Settings",
        _settings(finished),
        "## Licence",
        _licence(base),
    ]
    return "\n".join(head) + "\n" + "\n\n".join(parts) + "\n"


def loading_code(facts: dict[str, Any], folder: str, repository: str = "") -> str:
    """Python that loads the export with transformers (and peft for adapters)."""
    if facts["player"] == "prover":
        code = _PEFT if facts["form"] == "adapter" else _PROVER
        return code.format(folder=f'"{repository or folder}"', dtype=facts.get("dtype"))
    code = _IMPLICIT if facts["head"] == "implicit" else _CLASSIFIER
    if repository:
        return _DOWNLOAD.format(repository=repository) + code.format(folder="folder")
    return code.format(folder=f'"{folder}"')


_DOWNLOAD = """from huggingface_hub import snapshot_download

folder = snapshot_download("{repository}")

"""


_PROVER = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({folder})
tokenizer = AutoTokenizer.from_pretrained({folder})
"""
_PEFT = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained({folder}, dtype="{dtype}")
tokenizer = AutoTokenizer.from_pretrained({folder})
"""
_CLASSIFIER = """from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained({folder})
tokenizer = AutoTokenizer.from_pretrained({folder})
# A score is model(input_ids).logits[0, 0] + model.config.pvg["score_bias"].

import sys

sys.path.insert(0, {folder})
from pvg_verifier import ExportedVerifier  # renders a question and a solution as in the run

verifier = ExportedVerifier({folder})
# verifier.score(question, solution) >= verifier.threshold
"""
_IMPLICIT = """import sys

sys.path.insert(0, {folder})
from pvg_verifier import ExportedVerifier

verifier = ExportedVerifier({folder})
# verifier.score(question, solution) >= verifier.threshold
"""


def _prompts(facts: dict[str, Any]) -> list[str]:
    shown = facts["example_prompts"]
    if not shown:
        return []
    blocks = [f"The prompt of the {role} role for one problem:\n\n{_fenced(text)}" for role, text in shown.items()]
    return ["## Prompts", "The prover learned from prompts of this form.", *blocks]


def _fenced(text: str) -> str:
    """As a block of code. The fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _verdicts(facts: dict[str, Any]) -> str:
    fit = facts["calibration"]
    text = (
        f"The verifier accepts a solution with a score of at least {facts['threshold']:.6g}. A score is a logit, and "
        "higher is better. "
    )
    if facts["head"] == "implicit":
        text += (
            "The score is the scaled difference between the log-probs of the solution under two models: the one in "
            "this folder, and the one in `reference/`. "
        )
    if fit is None:
        text += "There is no calibration: `pvg evaluate` was not run before the export."
    else:
        sign = "-" if fit["offset"] < 0 else "+"
        text += f"P(correct) = 1 / (1 + exp(-({fit['slope']:.6g} * score {sign} {abs(fit['offset']):.6g})))."
    if facts["conceals_text"]:
        text += (
            " The task hides a part of each solution from the verifier. Pass only the visible part, or score with "
            "`pvg score`, which removes the rest."
        )
    return text


def _measurements(finished: FinishedRound) -> str:
    found = intervals(finished)
    rows = ["| Share | Value | 95 % interval | Solutions | Problems |", "|---|---|---|---|---|"]
    for name, estimate in found.items():
        if estimate.value is not None:
            known = estimate.low is not None and estimate.high is not None
            interval = f"{estimate.low:.1%} to {estimate.high:.1%}" if known else "none"
            rows.append(f"| {LABELS[name]} | {estimate.value:.1%} | {interval} | {estimate.n} | {estimate.problems} |")
    auc = finished.metrics.get("verifier_auc")
    after = [] if auc is None else [f"AUC of the verifier on these solutions: {auc:.3f}."]
    if len(rows) == 2:
        return "\n\n".join(["The run has no stored solutions of this round on test problems.", *after])
    intro = "From solutions on test problems at the end of the round. Solutions of one problem count as one cluster."
    return "\n\n".join([intro, "\n".join(rows), *after])


def _settings(finished: FinishedRound) -> str:
    experiment = finished.experiment
    plain = experiment.model_dump(mode="json")
    rows = ["| Setting | Value |", "|---|---|"]
    for key in SETTINGS:
        if experiment.task.kind == "play" and key.startswith(NOT_SELF_PLAY):
            continue
        value: Any = plain
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {key: value}
        rows += [f"| `{name}` | {_cell(entry)} |" for name, entry in found.items() if entry is not None]
    return "\n".join(rows)


def _cell(value: Any) -> str:
    """A value as code in a cell of a table. Cards are published, so an absolute path loses its beginning."""
    shown = value
    if isinstance(value, str) and Path(value).is_absolute():
        shown = Path(value).name
    elif isinstance(value, str) and value.startswith("run:/"):  # run:RUN/round-0/prover@DIGEST
        shown = "run:" + "/".join(Path(value).parts[-3:])
    text = one_line(str(shown)).replace("|", "\\|")
    quotes = "``" if "`" in text else "`"
    return f"{quotes}{text}{quotes}"


def _licence(base: str) -> str:
    if is_hub_id(base):
        return f"These weights derive from {parse(base).repository}. Its licence applies to them."
    if base.startswith("embedded:"):
        return f"These weights derive from `{base}`, which comes with pvg under the Apache License 2.0."
    return f"These weights derive from `{base}`. The licence of that model applies to them."

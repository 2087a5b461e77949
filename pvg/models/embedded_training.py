"""Trains the models that ship with pvg, from scratch, on the CPU:

    python -m pvg.models.embedded_training all                 # about 2 minutes per model on one core
    python -m pvg.models.embedded_training prover --steps 600 --out /tmp/models

Each is a small Llama that imitates written solutions, of modchain or of the plan game. The prover's solutions contain
deliberate flaws, more of them under the sneaky tag, which leaves headroom for reinforcement learning. The critic also
names the first wrong step of a solution; some of its labels are wrong for the same reason. The verifiers saw only
flawless solutions without tags.

Invariant: no model is trained on the default task's test problems. tests/models/test_embedded_models.py measures the
shipped models on these.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import Regex, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pvg.config.load import EMBEDDED
from pvg.config.task import DiplomacyMiniTask, ModchainTask
from pvg.config.training import ModelSection
from pvg.models import open_model
from pvg.models.language_model import LanguageModel
from pvg.models.tokenizer import Tokenizer
from pvg.records import Problem
from pvg.tasks.diplomacy_mini import DiplomacyMini, listed_problems, replies_to
from pvg.tasks.modchain import Modchain, chain_problem, clean_trace, flawed_trace, possible_mistakes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The tokenizers of the embedded models: one token per character; pad and end are the only special tokens.

PAD, EOS = "<pad>", "<eos>"
# Digits, the symbols of a trace (`7+5=2;2+8=0;A0`), the question mark that ends a prompt, and the two role tags.
CHARACTERS = "0123456789+=;?AHS"
# Provinces, the symbols of a plan (`deg/bf>d?d.;e+d;g.!bd;f.`), the adjudicator's answers (`=+`, `=-`), the role tags.
DIPLOMACY_CHARACTERS = "abcdefgh/>?.;+-=!HS"


def modchain_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(CHARACTERS)


def diplomacy_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(DIPLOMACY_CHARACTERS)


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Ids: pad 0, end 1, then `characters` in order. Other text becomes pad, which pvg's Tokenizer rejects."""
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, *characters])}
    rules = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    rules.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    rules.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=rules, pad_token=PAD, eos_token=EOS, model_max_length=256, clean_up_tokenization_spaces=False
    )


# The training rows and figures of the embedded models of the plan game on the mini board
# (pvg.tasks.diplomacy_mini).

Row = tuple[str, str]  # prompt, completion


@cache
def training_problems() -> list[Problem]:
    """All problems that are not in the default task's test split."""
    section = DiplomacyMiniTask()
    count = len(listed_problems()) - section.test_problems
    return list(DiplomacyMini(section.model_copy(update={"problems": count})).problems("train"))


def rows_of(flawed: Mapping[str, float], count: int, rng: np.random.Generator) -> list[Row]:
    """`count` rows of the prover, whose solutions have role tags in turn, or of the verifier. `flawed` maps each tag
    to its share of flawed solutions."""
    tags = list(flawed)
    return [
        _solution(tags[index % len(tags)], flawed, rng) if "H" in flawed else _verifier_row(index, rng)
        for index in range(count)
    ]


def _solution(tag: str, flawed: Mapping[str, float], rng: np.random.Generator) -> Row:
    problem = training_problems()[int(rng.integers(len(training_problems())))]
    table = replies_to(problem)
    if rng.random() >= flawed[tag]:
        return tag + problem.question, table.plan_texts[_row(table.sound_P, rng)]
    row = _row(table.stands_PR[:, 0] & ~table.sound_P, rng)
    plan = table.plan_texts[row]
    if tag == "S":
        plan += f"!{table.reply_texts[_row(~table.stands_PR[row], rng)]}"
    return tag + problem.question, plan


def _verifier_row(index: int, rng: np.random.Generator) -> Row:
    """A sound plan, or an answer of the adjudicator about any plan, in turn."""
    problem = training_problems()[int(rng.integers(len(training_problems())))]
    table = replies_to(problem)
    if index % 2:
        return problem.question, table.plan_texts[_row(table.sound_P, rng)]
    row = _row(table.stands_PR[:, 0], rng)
    stands = bool(rng.random() < 0.5) or bool(table.sound_P[row])
    reply = table.reply_texts[_row(table.stands_PR[row] == stands, rng)]
    return f"{problem.question}{table.plan_texts[row]}?{reply}", "=+" if stands else "=-"


def _row(mask_P: NDArray[np.bool_], rng: np.random.Generator) -> int:
    """A random place at which the mask is True."""
    return int(rng.choice(np.flatnonzero(mask_P)))


CRITIC = "?"  # the first character of a prompt that asks for a verdict
# A label per solution teaches verdicts too slowly. While the critic trains, linear probes learn parts of the verdict
# from its hidden states: the true sum at each stated one; the digit that belongs at each operand, sum and answer, and
# whether another one is there; the verdict so far after each step. They are not saved. name: (layer, classes)
VERDICTS = ModchainTask().max_terms + 1
PROBES = {"sum": (1, 10), "expected": (2, 10), "wrong": (2, 2), "verdict": (3, VERDICTS)}
IGNORED = -100  # cross_entropy ignores positions with this target
MAX_POSITIONS = 128
TERMS, MODULUS = ModchainTask().max_terms, ModchainTask().modulus


@dataclass(frozen=True, slots=True)
class EmbeddedModelRecipe:
    """All settings of an embedded model. `flawed` maps each prompt tag to its share of flawed solutions.

    `dialogues`: one third of the rows are solutions, one third translate a solver's solution, and one third answer a
    question about a step (see `translation` and `answered_step`). `unfaithful` maps each tag to its share of unfaithful
    translations. `mistaken`: two thirds of the rows are verdicts on solutions (see `verdict`), and this share of
    those on "clean" and on "flawed" solutions is wrong; empty: no verdicts. `start`: the embedded model that training
    starts from; "": random weights. `game`: the task whose solutions it imitates.
    """

    name: str
    layers: int
    width: int
    intermediate: int
    heads: int
    steps: int
    flawed: Mapping[str, float]
    unfaithful: Mapping[str, float] = field(default_factory=dict)
    dialogues: bool = False
    mistaken: Mapping[str, float] = field(default_factory=dict)
    start: str = ""
    batch: int = 128
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.01
    gradient_clip: float = 1.0
    seed: int = 0
    game: Literal["modchain", "plans"] = "modchain"


ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RECIPES = {key: EmbeddedModelRecipe(**row) for key, row in ROWS.items()}
TOKENIZERS = {"modchain": modchain_tokenizer, "plans": diplomacy_tokenizer}


# --- data --------------------------------------------------------------------------------------------------------


def draw_problem(rng: np.random.Generator, excluded: frozenset[str]) -> Problem:
    """A random chain of the default task's length, uniform over all except the `excluded` ids."""
    while True:
        problem = chain_problem([int(number) for number in rng.integers(MODULUS, size=TERMS)], MODULUS)
        if problem.id not in excluded:
            return problem


def draw_solution(problem: Problem, flawed_share: float, rng: np.random.Generator) -> str:
    """A flawless solution or, with probability `flawed_share`, one with a single mistake of a uniformly drawn kind."""
    if rng.random() >= flawed_share:
        return clean_trace(problem)
    kinds = possible_mistakes(problem)
    return flawed_trace(problem, kinds[int(rng.integers(len(kinds)))], rng)


def training_rows(recipe: EmbeddedModelRecipe, rng: np.random.Generator, excluded: frozenset[str]) -> list[Row]:
    """The rows of one batch."""
    if recipe.game == "plans":
        return rows_of(recipe.flawed, recipe.batch, rng)
    tags = list(recipe.flawed)
    rows = []
    for index in range(recipe.batch):
        tag = tags[index % len(tags)]
        problem = draw_problem(rng, excluded)
        kind = index // len(tags) % 3 if recipe.dialogues or recipe.mistaken else 0
        if kind == 0:
            rows.append((tag + problem.question, draw_solution(problem, recipe.flawed[tag], rng)))
        elif recipe.mistaken:
            rows.append(verdict(problem, index % 2 == 1, recipe, rng))
        elif kind == 1:
            rows.append(translation(problem, tag, recipe, rng))
        else:
            rows.append(answered_step(problem, tag, recipe, rng))
    return rows


def translation(problem: Problem, tag: str, recipe: EmbeddedModelRecipe, rng: np.random.Generator) -> tuple[str, str]:
    """(prompt, completion): a solver's solution, flawed as often as a helpful one, and its translation. A faithful
    translation is a copy; an unfaithful one is another solution with another answer. The prompt has the format of
    pvg.game.roles, style "tag"."""
    solution = draw_solution(problem, recipe.flawed["H"], rng)
    written = solution
    if rng.random() < recipe.unfaithful[tag]:
        while written.rpartition("A")[2] == solution.rpartition("A")[2]:
            written = draw_solution(problem, 1.0, rng)
    return f"{tag}{problem.question}{solution}?", written


def answered_step(problem: Problem, tag: str, recipe: EmbeddedModelRecipe, rng: np.random.Generator) -> tuple[str, str]:
    """(transcript, answer): a question about a step of a written solution, and this step as written. The question has
    the format of pvg.game.protocols, style "tag"."""
    solution = draw_solution(problem, recipe.flawed[tag], rng)
    steps = solution.split(";")[:-1]
    number = int(rng.integers(len(steps)))
    return f"{tag}{problem.question}{solution}{EOS}{number + 1}?", f"{steps[number]};"


def verdict(problem: Problem, flawed: bool, recipe: EmbeddedModelRecipe, rng: np.random.Generator) -> Row:
    """(prompt, completion): a written solution, and the number of its first wrong step from 1 on, 0 without one."""
    solution = draw_solution(problem, float(flawed), rng)
    flaw = Modchain(ModchainTask()).flaw(problem, solution)
    number = 0 if flaw is None else flaw + 1
    if rng.random() < recipe.mistaken["flawed" if flawed else "clean"]:
        number = (number + int(rng.integers(1, VERDICTS))) % VERDICTS
    return f"{CRITIC}{problem.question}{solution}?", str(number)


def probe_targets(rows: Sequence[Row], length: int) -> dict[str, Tensor]:
    """int64 [rows, `length`] for each of PROBES, IGNORED where it learns nothing. A place in a text is one in its
    tokens, because a token is a character."""
    found = {name: np.full((len(rows), length), IGNORED, dtype=np.int64) for name in PROBES}

    def learn(row: int, place: int, written: str, expected: int) -> bool:
        found["expected"][row, place] = expected
        found["wrong"][row, place] = wrong = int(written) != expected
        return wrong

    for row, prompt in enumerate(prompt for prompt, _ in rows):
        if prompt[0] != CRITIC:
            continue
        question, solution, _ = prompt[1:].split("?")
        *steps, answer = solution.split(";")
        operands, running, place, number = list(map(int, question.split("+"))), 0, len(question) + 2, 0
        for index, step in enumerate(steps, 1):
            total = (int(step[0]) + int(step[2])) % MODULUS
            found["sum"][row, place + 4] = total
            wrong = [learn(row, place + 2, step[2], operands[index]), learn(row, place + 4, step[4], total)]
            found["verdict"][row, place + 5] = number = number or index * any(wrong)
            place, running = place + len(step) + 1, int(step[4])
        wrong = [learn(row, place + 1, answer[1], running), len(steps) < len(operands) - 1]
        found["verdict"][row, place + 2] = number or (len(steps) + 1) * any(wrong)
    return {name: torch.from_numpy(targets_BL) for name, targets_BL in found.items()}


def rows_to_tensors(rows: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """(ids_BL, targets_BL) of (prompt, solution) texts, with the end token, padded on the right."""
    encoded = [(tokenizer.encode(prompt), tokenizer.encode(solution)) for prompt, solution in rows]
    length = max(len(prompt) + len(solution) for prompt, solution in encoded)
    ids_BL = np.full((len(rows), length), tokenizer.pad_id, dtype=np.int64)
    targets_BL = np.full((len(rows), length), IGNORED, dtype=np.int64)
    for row, (prompt, solution) in enumerate(encoded):
        end = len(prompt) + len(solution)
        ids_BL[row, :end] = np.concatenate([prompt, solution])
        targets_BL[row, len(prompt) - 1 : end] = [*solution, tokenizer.eos_id]
    return torch.from_numpy(ids_BL), torch.from_numpy(targets_BL)


# --- training ----------------------------------------------------------------------------------------------------


def build_module(recipe: EmbeddedModelRecipe, tokenizer: Tokenizer) -> PreTrainedModel:
    """A Llama with tied embeddings and random weights from torch's global generator."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=recipe.width,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            initializer_range=0.04,  # the default 0.02 suits far wider models and learns more slowly here
            pad_token_id=tokenizer.pad_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_id,
            attn_implementation="sdpa",
        )
    )


def train(recipe: EmbeddedModelRecipe) -> LanguageModel:
    """Train by `recipe`, then round to float16 and back. The caller owns the model."""
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    tokenizer = Tokenizer(TOKENIZERS[recipe.game](), recipe.name)
    module = build_module(recipe, tokenizer).train()
    if recipe.start:
        with open_model(ModelSection(source=f"embedded:{recipe.start}"), torch.device("cpu")) as start:
            module.load_state_dict(start.module.state_dict())
    excluded = frozenset(problem.id for problem in held_out_problems())
    probes = torch.nn.ModuleDict(
        {name: torch.nn.Linear(recipe.width, classes) for name, (_, classes) in PROBES.items() if recipe.mistaken}
    )
    trained = [*module.parameters(), *probes.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, recipe))
    for _ in track(range(recipe.steps), recipe.name):
        rows = training_rows(recipe, rng, excluded)
        ids_BL, targets_BL = rows_to_tensors(rows, tokenizer)
        output = module(input_ids=ids_BL, use_cache=False, output_hidden_states=bool(probes))
        loss = cross_entropy(output.logits, targets_BL)
        for name, probed_BL in probe_targets(rows, ids_BL.shape[1]).items() if probes else ():
            hidden_BLE = module.model.norm(output.hidden_states[PROBES[name][0]])
            loss = loss + cross_entropy(probes[name](hidden_BLE), probed_BL)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.gradient_clip)
        optimizer.step()
        schedule.step()
    return LanguageModel(module.half().float(), tokenizer, recipe.name)


def cross_entropy(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean over the targets that are not IGNORED."""
    return functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), ignore_index=IGNORED)


def learning_rate_factor(step: int, recipe: EmbeddedModelRecipe) -> float:
    """Linear warm-up, then cosine decay to a hundredth."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.01 + 0.99 * 0.5 * (1 + float(np.cos(np.pi * done)))


def held_out_problems() -> list[Problem]:
    """The default task's test split. No embedded model was trained on it."""
    return list(Modchain(ModchainTask()).problems("test"))


# --- the command -------------------------------------------------------------------------------------------------


def make(key: str, recipe: EmbeddedModelRecipe, out: Path) -> None:
    """Train and save one model under `out`. Its settings go to its recipe.json."""
    started = time.perf_counter()
    with train(recipe) as model:
        seconds = time.perf_counter() - started
        record = {
            "command": f"python -m pvg.models.embedded_training {key} --steps {recipe.steps}",
            "recipe": asdict(recipe),
            "parameters": model.num_parameters,
            "made_with": {"torch": torch.__version__, "threads": torch.get_num_threads(), "seconds": round(seconds)},
        }
        directory = out / recipe.name
        directory.mkdir(parents=True, exist_ok=True)
        model.module.half()
        model.save(directory)
        (directory / "recipe.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pvg.models.embedded_training", description=__doc__.split("\n")[0])
    parser.add_argument("which", choices=[*RECIPES, "all"])
    parser.add_argument("--steps", type=int, help="training steps; default: those of the recipe")
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="folder for the models' directories")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # another number rounds differently
    for key in RECIPES if options.which == "all" else [options.which]:
        recipe = RECIPES[key]
        make(key, replace(recipe, steps=options.steps or recipe.steps), options.out)


if __name__ == "__main__":
    main()

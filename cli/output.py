"""Printing for people: consoles, TOML with colours, tables. Without a terminal: the same text, no escape codes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pvg.config.describe import Setting
    from pvg.config.experiment import BatchArithmetic, Experiment

PIPE_WIDTH = 100  # columns where no terminal says how many there are


def console(stream: TextIO) -> Console:
    """A console on stdout or stderr. What the stream cannot encode is replaced instead of raising."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def stdout() -> Console:
    return console(sys.stdout)


def stderr() -> Console:
    return console(sys.stderr)


def print_toml(text: str) -> None:
    """TOML, coloured on a terminal; byte for byte the text in a pipe, so that it can be saved and used."""
    if sys.stdout.isatty():
        stdout().print(Syntax(text.rstrip(), "toml", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        sys.stdout.write(text)


def arithmetic_table(experiment: Experiment) -> Table:
    """The numbers that follow from the settings, each with where it comes from."""
    numbers = experiment.arithmetic()
    table = quiet_table()
    table.add_column("derived")
    table.add_column("", justify="right", style="bold")
    table.add_column("from", style="bright_black")
    for label, value, origin in _arithmetic_rows(experiment, numbers):
        table.add_row(label, f"{value:,}", origin)
    return table


def _arithmetic_rows(experiment: Experiment, numbers: BatchArithmetic) -> list[tuple[str, int, str]]:
    training, game, verifier = experiment.training, experiment.game, experiment.verifier
    micro = f"at most {training.micro_batch_tokens:,} tokens each"
    if training.micro_batch_memory_mb:
        micro += f", fewer if these take over {training.micro_batch_memory_mb:,} MB"
    pairs = f"{verifier.steps} steps x {verifier.pairs}"
    if verifier.ensemble > 1:
        pairs = f"{verifier.ensemble} members x {pairs}"
    prover = f"{training.steps} steps"
    if training.dynamic_sampling:
        prover += f", up to {1 + training.dynamic_sampling} times as many to fill batches up"
    return [
        ("rollouts per batch", numbers.rollouts_per_batch, f"{numbers.groups} groups x {numbers.group_size}"),
        ("optimizer steps per batch", numbers.optimizer_steps_per_batch, "training.minibatches"),
        ("rollouts per optimizer step", numbers.rollouts_per_optimizer_step, "batch / optimizer steps"),
        ("rollouts per micro-batch, about", numbers.micro_batch_rollouts, micro),
        ("accumulation steps, about", numbers.accumulation_steps, "micro-batches per optimizer step"),
        (
            "completion tokens per batch, at most",
            numbers.completion_tokens_per_batch,
            f"{numbers.rollouts_per_batch:,} rollouts x {experiment.rollout.max_tokens}",
        ),
        (
            "mint rollouts per round",
            numbers.mint_rollouts_per_round,
            f"{game.mint_problems:,} problems x {game.mint_samples}",
        ),
        ("verifier pairs per round", numbers.verifier_pairs_per_round, pairs),
        ("prover rollouts per round", numbers.prover_rollouts_per_round, prover),
        ("optimizer steps in all", numbers.optimizer_steps, f"{game.rounds} rounds x (verifier + prover)"),
    ]


def print_schema(experiment: Experiment | None) -> None:
    """Every key with its type and its default, or an experiment's value."""
    from pvg.config.describe import settings, toml_value

    table = quiet_table()
    table.add_column("key", no_wrap=True)
    table.add_column("type", style="cyan", max_width=22)
    table.add_column("default" if experiment is None else experiment.name, min_width=30)
    for setting in settings():
        if experiment is None:
            table.add_row(Text(setting.label), Text(setting.type), Text(toml_value(setting.default)))
        elif (value := value_at(experiment, setting)) is not ABSENT:
            table.add_row(Text(setting.key), Text(setting.type), Text(toml_value(value)))
    stdout().print(table)


ABSENT = object()


def value_at(experiment: Experiment, setting: Setting) -> Any:
    """The experiment's value; ABSENT for a setting of another kind of a table."""
    *parts, leaf = setting.key.split(".")
    node: Any = experiment
    for part in parts:
        node = getattr(node, part)
    return ABSENT if setting.kinds and node.kind not in setting.kinds else getattr(node, leaf)


def print_explained(told: dict[str, Any]) -> None:
    """A setting or a tagged table: meaning, type, default, and the experiments that set it."""
    out = stdout()
    out.print(Text(told["key"], style="bold"))
    for form in told.get("forms", []):
        kinds = f" (kind {', '.join(form['kinds'])})" if form["kinds"] else ""
        out.print(Text(f"  {form['meaning']}{kinds}"))
        out.print(Text(f"  {form['type']}; default: {form['default'] or 'unset'}"))
    for kind, meaning in told.get("kinds", {}).items():
        mark = "  (default)" if told["default"] in kind.split(", ") else ""
        out.print(Text(f"  {kind}{mark}: {meaning}"))
    where = ", ".join(f"{name} = {value}" for name, value in told["experiments"].items())
    out.print(Text(f"  experiments: {where or 'none sets it'}"))


def quiet_table() -> Table:
    return Table(
        box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bright_black", border_style="bright_black"
    )

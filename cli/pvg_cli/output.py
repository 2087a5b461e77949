"""Printing for people: consoles, TOML with colours, tables. Without a terminal: the same text, no escape codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from pvg.errors import system_module

if TYPE_CHECKING:
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


@contextlib.contextmanager
def silent_control_keys() -> Iterator[None]:
    """Keep the terminal from echoing `^C`: at the end of a full line the echo would scroll the panel by one line."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    termios = system_module("termios")
    before = termios.tcgetattr(sys.stdin)
    silent = termios.tcgetattr(sys.stdin)
    silent[3] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


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
        prover += f", up to {1 + training.dynamic_sampling_rounds} times as many to fill batches up"
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


def quiet_table() -> Table:
    return Table(
        box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bright_black", border_style="bright_black"
    )

"""The `pvg` command. A command's module is imported when it is called, and heavy packages when it runs.

pvg train            play the embedded game on the CPU
pvg view             look at the newest run, while it plays or afterwards
pvg study NAME       play several experiments with several seeds, and compare them
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand

from pvg import __version__
from pvg.torch_environment import set_torch_environment
from pvg_cli.boundary import Command, Commands

# Otherwise transformers draws progress bars into the live display while it loads weights.
os.environ.setdefault("TQDM_DISABLE", "1")
set_torch_environment()
# Python's are 700, 10, 10. With them, the collector scans the objects of torch and transformers again and again while
# they are loaded. These thresholds stay afterwards, because no command makes many cycles of objects.
gc.set_threshold(2_000, 10, 200)
# When Python ends, it looks for garbage once more, and not among frozen objects, such as those of torch.
atexit.register(gc.freeze)

# Group in `pvg --help` -> command -> its place in this package (MODULE:NAME), and its line there.
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Start here": {
        "train": ("train:train", "Play a prover-verifier game, or resume one."),
        "view": ("view:view", "Look at a run, finished or not; with --live, follow it in a browser."),
        "evaluate": ("evaluate:evaluate", "Find out how well the verifiers of a run resist new attackers."),
        "measure": ("measure:measure", "Measure whether the reasoning in any texts leads to their answers."),
        "attack": ("attack:attack", "Find wrong solutions that your grader, reward model or judge accepts."),
    },
    "Prepare an experiment": {
        "check": ("check:check", "Check an experiment: settings, problems, prompts, grades, time and memory."),
        "rollout": ("rollout:rollout", "Sample and grade some solutions, without a verifier and without training."),
        "init": ("init:init", "Write an example of your own experiment, with a task, data and a test."),
        "config": ("config:app", "Show and explain settings."),
        "doctor": ("doctor:doctor", "Check the installation, and say how to install what is missing."),
    },
    "Several runs": {
        "runs": ("run_folders:app", "List and remove runs."),
        "compare": ("compare:compare", "Compare two runs, or two benchmark reports."),
        "report": ("report:report", "Write the page of one run, or of several together, to a file."),
        "study": ("study:study", "Play several experiments with several seeds, and compare the results."),
    },
    "Use a trained model": {
        "score": ("score:score", "Score solutions with the verifier of a run."),
        "export": ("export:export", "Write a model of a run as a Hugging Face folder, with a model card."),
        "serve": ("serve:serve", "Start a vLLM server for an experiment, or serve the verifier of a run."),
    },
    "Speed, and tools for developers": {
        "diagnose": ("diagnose:diagnose", "Find what slows a run down."),
        "plan": ("plan:plan", "Predict the time and the memory of an experiment, also on other hardware."),
        "bench": ("bench:bench", "Measure the speed of a fixed piece of work on this machine."),
        "profile": ("profile:profile", "Record what a piece of work spends its time on."),
        "schemas": ("documents:print_schemas", "List or print the JSON Schemas of what pvg prints with --json."),
    },
}
PLACES = {name: place for group in GROUPS.values() for name, (place, _) in group.items()}


class LazyCommands(Commands):
    """All commands. Their names and lines in the help come from GROUPS; a module is imported to run its command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for panel, group in GROUPS.items():
            for name, (_, line) in group.items():
                self.add_command(TyperCommand(name, help=line, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, None if found is None or name is None else load_command(name), rest


def load_command(name: str) -> Any:
    module, _, attribute = PLACES[name].partition(":")
    found = getattr(import_module(f"pvg_cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=Command)(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="pvg",
    cls=LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Play, train and measure prover-verifier games with language models.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pvg {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Play, train and measure prover-verifier games with language models."""

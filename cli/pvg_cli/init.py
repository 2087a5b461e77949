"""`pvg init [DIR]`: a new folder with an experiment, a task, its data and its test, which plays as it is. With
`--protocol NAME`: with an experiment, a protocol and its test."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from pvg.errors import UsageError, user_paths
from pvg_cli.boundary import emit
from pvg_cli.options import DebugOption, JsonOption

TASK, PROTOCOL = (Path(__file__).parent / name for name in ("scaffold", "scaffold_protocol"))


def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder for the files. Default: this folder.")] = Path(),
    protocol: Annotated[str | None, Option(metavar="NAME", help="Write a protocol in place of a task.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write an example of your own experiment: its settings, a task with wording and grader, data, and a test.

    With --protocol, its settings, a protocol, and a test. The command never replaces a file.
    """
    own = _filled(TASK, {"@NAME@": experiment_name(folder)}) if protocol is None else protocol_texts(protocol)
    written = write_scaffold(folder, own)
    steps = next_steps(folder, protocol)
    if as_json:
        emit({"files": [str(path) for path in written], "next": steps})
        return
    for path in written:
        typer.echo(f"wrote {path}")
    typer.echo("\nNext:")
    width = max(map(len, steps))
    for command, meaning in steps.items():
        typer.echo(f"  {command:<{width}}   {meaning}")


def protocol_texts(name: str) -> dict[str, bytes]:
    """File name -> content, of a protocol. Raises UsageError for a name that no module of your own can have."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} cannot be the name of a Python file.",
            "Use small letters, digits and underscores: pvg init DIR --protocol my_protocol",
        )
    if importlib.util.find_spec(name) is not None:
        raise UsageError(f"Python already has a module {name!r}.", f"Choose another name, such as my_{name}.")
    rules = "".join(part.capitalize() for part in name.split("_")) + "Rules"
    texts = _filled(PROTOCOL, {"@NAME@": name, "@CLASS@": rules, "@RUN@": experiment_name(Path(name))})
    return {file.replace("protocol", name): text for file, text in texts.items()}


def _filled(templates: Path, values: dict[str, str]) -> dict[str, bytes]:
    """File name -> content."""
    texts = {path.name.removesuffix(".template"): path.read_text(encoding="utf-8") for path in templates.iterdir()}
    for key, value in values.items():
        texts = {name: text.replace(key, value) for name, text in texts.items()}
    return {name: texts[name].encode() for name in sorted(texts)}


def write_scaffold(folder: Path, texts: dict[str, bytes]) -> list[Path]:
    """Write the files and return their paths. Raises UsageError if one of them exists, and writes none then."""
    from pvg.store.atomic import write_output

    with user_paths():
        there = [name for name in texts if os.path.lexists(folder / name)]
        same = [name for name in there if (folder / name).is_file() and (folder / name).read_bytes() == texts[name]]
        if there and (there != same or len(same) == len(texts)):  # otherwise a killed call has written some
            where = "This folder" if folder == Path() else f"The folder {folder}"
            raise UsageError(
                f"{where} already has {', '.join(there)}, and pvg init replaces no file.",
                "Name a new folder: pvg init DIR",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # a file system that refuses new folders, such as /proc
            raise UsageError(f"{folder} cannot be created.", "Name another folder: pvg init DIR") from error
        for name in texts.keys() - set(there):
            write_output(folder / name, texts[name])
    return [folder / name for name in texts]


def experiment_name(folder: Path) -> str:
    """The name of the folder, with the characters that a run's name may have. Not a name of a part of a run."""
    from pvg.store.run_directory import PARTS_OF_A_RUN, as_run_name

    name = as_run_name(folder.resolve().name, 50) or "experiment"
    return f"my-{name}" if PARTS_OF_A_RUN.fullmatch(name) else name


def next_steps(folder: Path, protocol: str | None) -> dict[str, str]:
    """Command -> its purpose, to be typed from here."""
    from pvg.installation import install_packages, pvg_command, python_command

    steps = {}
    if importlib.util.find_spec("pytest") is None:
        steps[install_packages("pytest")] = "install the test runner"
    if folder.resolve() != Path.cwd():
        steps[f"cd {shlex.quote(str(folder))}"] = "all paths are relative to it"
    pvg = shlex.join(pvg_command())
    experiment, what = ("experiment.toml", "task") if protocol is None else (f"{protocol}.toml", "protocol")
    return steps | {
        f"{shlex.quote(python_command())} -m pytest": f"test the {what}",
        f"{pvg} check {experiment}": "look at prompts and grades" if protocol is None else "look at an episode",
        f"{pvg} train {experiment} --dry-run": "look at time, memory and batch sizes",
        f"{pvg} train {experiment}": "play it",
    }

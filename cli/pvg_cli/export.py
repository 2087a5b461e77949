"""`pvg export RUN`: write a player of a run as a Hugging Face directory."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from pvg.errors import UsageError, user_paths
from pvg_cli.boundary import announce_loading, emit, say
from pvg_cli.options import DebugOption, JsonOption, RoundOption, RunArgument, RunsOption


def export(
    *,
    run: RunArgument,
    player: Annotated[Literal["prover", "verifier"], Option(help="The model to export.")],
    out: Annotated[Path | None, Option(metavar="DIR", help="The new folder. Required.", show_default=False)] = None,
    round_: RoundOption = -1,
    merge: Annotated[bool, Option("--merge", help="Write a prover with adapters as a whole model.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an earlier export in --out.")] = False,
    push: Annotated[str | None, Option(metavar="ORG/NAME", help="Upload the folder to the hub.")] = None,
    public: Annotated[bool, Option("--public", help="Let everyone see what --push creates.")] = False,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a player of a run as a Hugging Face folder, with a model card.

    The prover opens as AutoModelForCausalLM. A verifier with a scalar or yes_token head opens as
    AutoModelForSequenceClassification, and every verifier opens with the small file pvg_verifier.py in the folder.
    """
    from pvg.export.finished import FinishedRound
    from pvg.export.target import check_push, check_target
    from pvg.hub import upload
    from pvg.store.run_directory import RunDirectory

    if out is None:
        example = f"pvg export {shlex.quote(run)} --player {player} --out {shlex.quote(f'{Path(run).name}-{player}')}"
        raise UsageError("The option --out is missing.", f"Give a new folder: {example}")
    if merge and player == "verifier":
        raise UsageError(
            "--merge is for a prover with adapters, and a verifier is always a whole model.", "Leave out --merge."
        )
    if public and push is None:
        raise UsageError("--public has no meaning without --push.", "Add --push ORG/NAME, or leave out --public.")
    if push is not None:
        check_push(push)
    finished = FinishedRound.open(RunDirectory.open(run, runs), round_, player)
    if player == "verifier":
        finished.verifier_name  # noqa: B018 - raises for a run without a verifier
    with user_paths():  # before torch is loaded
        check_target(out, overwrite)

    announce_loading()
    from pvg.export.folders import export_player, weights_size

    facts = export_player(finished, player, out, merge=merge, overwrite=overwrite, repository=push or "")
    say(f"Wrote the {player} of {run}, round {finished.round}, to {out} ({weights_size(out) / 1e6:.1f} MB of weights).")
    url = None
    if push is not None:
        if facts.get("example_prompts"):
            say(
                "The model card and other files of the export contain the prompt of each role for a problem of the "
                f"run's data. Everyone who can see {push} can read it."
            )
        url, visible_to = upload(out, push, public=public)
        say(f"Uploaded to {url}. Visible to: {visible_to}.")
    if as_json:
        emit({"out": str(out), "url": url, **facts})

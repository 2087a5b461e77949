"""`pvg score RUN FILE`: score solutions with the verifier of a run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from pvg.errors import StoppedAtStart, UsageError, counted, user_paths
from pvg_cli import kept_for_documents, write_utf8
from pvg_cli.boundary import announce_loading, emit, say
from pvg_cli.options import DebugOption, JsonOption, RoundOption, RunArgument, RunsOption, check_output

if TYPE_CHECKING:
    from pvg.export.finished import FinishedRound


def score(
    run: RunArgument,
    file: Annotated[
        Path, Argument(metavar="FILE.jsonl|-", help='Lines of {"question": "...", "solution": "..."}. -: stdin.')
    ],
    round_: RoundOption = -1,
    out: Annotated[Path | None, Option(metavar="FILE", help="Of the results. Default: stdout.")] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score solutions with the verifier of a run: one line of JSON per solution.

    `score` is the verifier's logit, `accepted` says whether it reaches the run's threshold, and `probability` is the
    calibrated probability that the solution is correct (only after `pvg evaluate`). With --json, stdout holds a
    summary, and --out is required.
    """
    import asyncio

    from pvg.export.finished import FinishedRound, check_rows
    from pvg.store.run_directory import RunDirectory

    if as_json and out is None:
        raise UsageError("--json prints a summary, so the results need a file.", "Add --out FILE")
    finished = FinishedRound.open(RunDirectory.open(run, runs), round_)
    finished.verifier_name  # noqa: B018 - raises for a run without a verifier
    check_output("--out", out, b'{"line":', file)
    if file == Path("-"):
        holder = TemporaryDirectory()  # removed when this function ends
        file = Path(holder.name, "stdin")
        with file.open("wb") as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
    check_rows(file)  # before torch and the model are loaded, and before the first result is written
    if (kind := finished.experiment.game.protocol.kind) not in ("direct", "decoupled", "consultancy"):
        say(
            f"This verifier has learned from dialogues (game.protocol = {kind!r}). It judges bare solutions less well, "
            "and its acceptance threshold is one for dialogues."
        )
    announce_loading()
    try:
        summary = _write(finished, file, out, as_json)
    except (KeyboardInterrupt, asyncio.CancelledError):
        left = "" if out is None else f" {out} was not written."
        raise StoppedAtStart(f"Stopped before all solutions were scored.{left}") from None
    if as_json:
        emit(summary)
    scored = counted(summary["rows"], "solution")
    say(f"Scored {scored} with {run}, round {finished.round}: {summary['accepted']:,} accepted.")


def _write(finished: FinishedRound, file: Path, out: Path | None, as_json: bool) -> dict[str, Any]:
    """Score all rows. A file gets its name when it is complete."""
    import asyncio

    import orjson

    from pvg.export.finished import score_rows
    from pvg.store.atomic import is_temporary, output_file
    from pvg_cli.driving import cancelled_at_signals, killed_document

    calibration = finished.calibration()
    rows = accepted = 0
    unfinished: Path | None = None

    def remove_unfinished() -> None:
        if unfinished is not None and is_temporary(unfinished):
            unfinished.unlink(missing_ok=True)

    killed = killed_document(finished.run.name, "Call pvg score again.", as_json)
    with cancelled_at_signals(lambda: killed, remove_unfinished) as attach, finished.scorer() as scorer:

        async def work(write: Callable[[bytes], object]) -> None:
            nonlocal rows, accepted
            # Not asyncio's own handler of Ctrl-C: it may cancel a future between a test and the setting of its result.
            attach()
            async for result, verdict in score_rows(scorer, file, calibration):
                write(orjson.dumps(result) + b"\n")
                rows, accepted = rows + 1, accepted + verdict.accepted

        if out is None:
            with kept_for_documents(True):
                asyncio.run(work(write_utf8))
        else:
            with user_paths(), output_file(out) as target:
                unfinished = Path(target.name)
                asyncio.run(work(target.write))
        return {
            "run": finished.run.name,
            "round": finished.round,
            "rows": rows,
            "accepted": accepted,
            "threshold": scorer.threshold,
            "calibrated": calibration is not None,
            "verifier_version": scorer.version,
            "out": None if out is None else str(out),
        }

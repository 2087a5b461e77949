"""Traces from files: a run of pvg, JSON lines, completions of TRL, results of verifiers and prime-rl, inspect-ai logs.

A file is read strictly: what it lacks, or what has a wrong type, is one error with its place, before any model is
loaded. Which column has what is guessed from its name and said; `fields` overrides a guess.
"""

from __future__ import annotations

import hashlib
import lzma
import math
import os
import re
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import pyarrow

from pvg.errors import ConfigurationError, UsageError, counted, listed, shortened, user_paths
from pvg.inputs import open_input
from pvg.records import BASE_SOURCE, Rollout, source_of_round
from pvg.store.run_directory import RunDirectory
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.tasks.answers import UNCLEAR, FinalAnswer, extract, parse_number, read, same_answer
from pvg.tasks.data import Choice, Number, json_rows, parquet_rows

if TYPE_CHECKING:
    from pvg.verifier.data import Style

# --- one trace --------------------------------------------------------------------------------------------------------

Message = tuple[str, str]  # role and content; the role "" marks a raw text, which the trace continues
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MARKERS = tuple(re.compile(pattern, re.DOTALL) for pattern in TABLE["markers"])
THOUGHT = "</think>"
PLAIN_CUE = "\n\nThe final answer is"  # for a trace whose answer has no marker
NUMBER_MARKED = re.compile(r"####|boxed|answer", re.IGNORECASE)  # the markers of pvg.tasks.answers
STEP_NOTE = re.compile(r"\bstep (\d+)\b")


class TraceParts(NamedTuple):
    """A trace cut before its final answer: reasoning + cue + answer (+ end) is the trace's text up to there, without
    what repeats the answer between the reasoning and its last statement. A space before the answer belongs to the
    answer, as in most vocabularies."""

    reasoning: str
    cue: str
    answer: str
    end: str


def parts_of(text: str, pattern: re.Pattern[str] | None = None, answer: str | None = None) -> TraceParts | None:
    """Where `text` states its final answer: by `pattern` (its first group is the answer), or by MARKERS. None if it
    states none and `answer`, which a file names, is None."""
    group: str | int = "answer" if pattern is None else 1
    matches = [match for marker in ((pattern,) if pattern else MARKERS) for match in marker.finditer(text)]
    matches = sorted((match for match in matches if match[group] is not None), key=re.Match.start)
    if not matches:
        return None if answer is None else TraceParts(text.rstrip(), PLAIN_CUE, f" {answer}", "")
    *earlier, found = matches
    (begin, end), stated = found.span(group), found.start()
    start = max(text.rfind(THOUGHT, 0, stated), 0) or stated
    for match in reversed(earlier):
        if match.start() < start:
            if re.search(r"\w", text[match.end() : start]) or not same_answer(
                match[group].strip(), found[group].strip()
            ):
                break
            start = match.start()  # reasoning that ends with the stated answer would tell it
    start, stop = len(text[:start].rstrip()), begin + len(text[begin:end].rstrip())
    cue, floor = "", start
    if re.search(r"\w", (between := text[start:stated]).replace(THOUGHT, "")):
        cue, floor = (THOUGHT if THOUGHT in between else "") + "\n", stated
    begin = max(floor, min(stop, end - len(text[begin:end].lstrip())))
    begin -= text[begin - 1 : begin] == " " and begin > floor
    closing = text[stop : found.end()] if pattern is None and found["end"] else ""
    return TraceParts(text[:start], cue + text[floor:begin], text[begin:stop], closing)


def steps_in(reasoning: str) -> list[tuple[int, int]]:
    """Start and end of each step: lines, in one line parts between semicolons, or else sentences. Together they are the
    whole text."""
    line = "\n" not in reasoning.strip()
    pattern = r"[^\n]*\n*" if not line else r"[^;]*;?\s*" if ";" in reasoning else r".+?(?:[.!?](?:\s+|$)|$)"
    return [match.span() for match in re.finditer(pattern, reasoning, re.DOTALL) if match.group().strip()]


@dataclass(frozen=True)
class Trace:
    """A written solution. `place`: where the file has it. `step`: of the training, or the round. `score`: the judge's;
    `accepted`: its verdict. `flaw`: the first wrong step, `named`: the one that the judge named, both from 1; None: not
    known. `known`: whether it is correct, if the file says so."""

    place: str
    problem: tuple[Message, ...]
    text: str
    truth: str | None = None
    answer: str | None = None
    known: bool | None = None
    step: int | None = None
    role: str | None = None
    score: float | None = None
    accepted: bool | None = None
    flaw: int | None = None
    named: int | None = None
    pattern: re.Pattern[str] | None = field(default=None, compare=False)

    @cached_property
    def problem_id(self) -> str:
        return hashlib.sha256(orjson.dumps(self.problem)).hexdigest()[:16]

    @cached_property
    def parts(self) -> TraceParts | None:
        return parts_of(self.text, self.pattern, self.answer)

    @cached_property
    def correct(self) -> bool | None:
        """What the file says, or whether the stated answer is the true one; None without both. If this is a number,
        pvg.tasks.answers reads the text by its markers."""
        if self.known is not None or self.truth is None:
            return self.known
        if self.pattern is None and "<answer>" not in self.text and NUMBER_MARKED.search(self.text):
            number, found = _reference(Number(), self.truth), read(self.text)
            if number and isinstance(found, FinalAnswer) and found.marker != "last number":
                return found.value == parse_number(number)
            if number and found == UNCLEAR:
                return False
        return self.is_true(None if self.parts is None else self.parts.answer)

    def is_true(self, answer: str | None) -> bool:
        """Whether an answer is the true one: as a number, as the letter of a choice, or as a text."""
        if answer is None or self.truth is None:
            return False
        if number := _reference(Number(), self.truth):
            found = extract(f"#### {' '.join(answer.split())}")
            return same_answer(answer, number) or (found is not None and found.value == parse_number(number))
        letter = _reference(Choice(), self.truth)
        return same_answer(answer, self.truth) or (letter != "" and letter == _reference(Choice(), answer))


def _reference(grader: Number | Choice, answer: str) -> str:
    """The answer as problems of a grader carry it; "" if it is none for this grader."""
    try:
        return grader.reference(answer)
    except ValueError:
        return ""


@dataclass(slots=True)
class LoadedTraces:
    """`kind`: of the source. `said`: what was guessed or left out. `reader`: the model that reads them if a user names
    none. `verdicts`: of judges that name a step, on other solutions or beside the traces' own judge. `refused`:
    measures that a server refused to the reader."""

    name: str
    kind: str
    traces: list[Trace]
    said: list[str]
    reader: str | None = None
    verdicts: Sequence[Trace] = ()
    refused: list[str] = field(default_factory=list)

    def chosen(self, most: int, first: Collection[str] = ()) -> LoadedTraces:
        """At most about `most` traces: all of some problems, which are the same in every source. Those of the ids in
        `first` come first."""
        if most >= len(self.traces):
            return self
        kept, count = set[str](), 0
        ids = {trace.problem_id for trace in self.traces}
        for problem in sorted(ids, key=lambda each: (each not in first, each)):  # ids are hashes, so this is a draw
            if count < most:
                kept.add(problem)
                count += sum(trace.problem_id == problem for trace in self.traces)
        traces = [trace for trace in self.traces if trace.problem_id in kept]
        left = counted(len(self.traces) - len(traces), "trace")
        note = f"{self.name}: {left} left out (--most {most}), all those of some problems."
        return replace(self, traces=traces, said=[*self.said, note])


def chosen_together(loaded: Sequence[LoadedTraces], most: int) -> list[LoadedTraces]:
    """About `most` traces of each source, of the problems that all sources have if these are enough. Two sources get
    different names. Raises UsageError if they have no problem in common."""
    common = set.intersection(*({trace.problem_id for trace in each.traces} for each in loaded))
    if not common:
        raise UsageError("The two sources have no problem in common.", "Compare traces of the same problems.")
    if len({each.name for each in loaded}) < len(loaded):
        loaded = [loaded[0], replace(loaded[1], name=f"{loaded[1].name}-b")]
    return [each.chosen(most, common) for each in loaded]


# --- from rows --------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, list[str]] = TABLE["columns"]


def read_fields(given: Sequence[str]) -> dict[str, str]:
    """`--field problem=question` as a mapping; `--field correct=` leaves a field out. Raises UsageError."""
    found = {}
    for text in given:
        name, sign, column = text.partition("=")
        if not sign or name not in COLUMNS:
            raise UsageError(f"--field {text}: not FIELD=COLUMN.", f"FIELD is one of {', '.join(COLUMNS)}.")
        found[name] = column
    return found


def _traces_of(
    rows: Iterable[tuple[str, object]], file: Path, fields: Mapping[str, str], pattern: re.Pattern[str] | None
) -> tuple[list[Trace], list[str]]:
    """The traces of rows, and what was guessed. A column may be in some rows only."""
    rows, traces = list(rows), list[Trace]()
    names = dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row)
    columns: dict[str, str] = {}
    for place, row in rows:
        where = f"{file.name}, {place}"
        if not isinstance(row, dict):
            raise ConfigurationError(f"{where}: it is not a JSON object.", "Each line is one object: a trace.")
        columns = columns or _columns_of(names, fields, where)
        missing = next((columns[name] for name in ("problem", "text") if columns[name] not in row), None)
        if missing is not None:
            raise ConfigurationError(f"{where}: it has no {missing!r}.", "Correct the row.")
        found = {name: KINDS[name](row.get(column), column, where) for name, column in columns.items()}
        known, verdict = found.pop("correct", None), found.pop("verdict", None)
        accepted = None if verdict is None else verdict >= 0.5
        known = None if known is None else bool(known)
        traces.append(Trace(place, **found, known=known, score=verdict, accepted=accepted, pattern=pattern))
    if not traces:
        raise ConfigurationError(f"{file} has no traces.", "Name a file with one trace per row.")
    guessed = ", ".join(f"{name} = {column}" for name, column in columns.items() if name not in fields)
    said = [f"{file.name}: {guessed}. To choose: --field FIELD=COLUMN."] if guessed else []
    empty = sum(not trace.text.strip() for trace in traces)
    return traces, said + ([f"{file.name}: {counted(empty, 'text')} of {len(traces):,} empty."] if empty else [])


def _columns_of(row: Collection[str], fields: Mapping[str, str], where: str) -> dict[str, str]:
    found = {name: column for name, column in fields.items() if column}
    if lost := next((column for column in found.values() if column not in row), ""):
        raise ConfigurationError(f"{where}: there is no column {lost!r}.", f"It has {listed(list(row))}.")
    for name, names in COLUMNS.items():
        free = [column for column in names if column in row and column not in found.values()]
        if name not in fields and free:
            found[name] = free[0]
    if lost := next((name for name in ("problem", "text") if name not in found), ""):
        remedy = f"Name it: --field {lost}=COLUMN. There are {listed(list(row))}."
        raise ConfigurationError(f"{where}: no column has the {lost} of a trace.", remedy)
    return found


def _wrong(value: object, column: str, where: str, wanted: str) -> ConfigurationError:
    remedy = "Correct it, name another column (--field FIELD=COLUMN), or leave the field out (--field FIELD=)."
    found = str(value) if isinstance(value, Decimal) else repr(value)
    return ConfigurationError(f"{where}: {column!r} is {shortened(found)}, not {wanted}.", remedy)


def _text(value: object, column: str, where: str) -> str:
    """A text, or the texts of the assistant in a list of messages."""
    if value is None or isinstance(value, str):
        return value or ""
    found = _messages(value, column, where)
    return "\n\n".join(content for role, content in found if role == "assistant" and content)


def _messages(value: object, column: str, where: str) -> tuple[Message, ...]:
    """The messages of a chat. A text is what the user says; one called a prompt is what a model continues."""
    if isinstance(value, str) and value.strip():
        return (("" if column == "prompt" else "user", value),)
    if not isinstance(value, list) or not value:
        raise _wrong(value, column, where, "a text or a list of messages")
    found = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(message, column, where, "a message with a role")
        content, thought = message.get("content"), message.get("reasoning_content")
        if not isinstance(content, str | list | None):
            raise _wrong(content, column, where, "the content of a message")
        parts = [{"reasoning": thought}, *([{"text": content}] if isinstance(content, str) else content or [])]
        found.append((message["role"], "".join(map(_part, parts))))
    return tuple(found)


def _part(part: Any) -> str:
    """The text of a part of a message. Thoughts that a provider keeps apart become <think>...</think>."""
    if isinstance(part, dict) and isinstance(thought := part.get("reasoning"), str) and thought:
        return f"<think>{thought}{THOUGHT}\n"
    return part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else ""


def _word(value: object, column: str, where: str) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal | None):
        raise _wrong(value, column, where, "a text or a number")
    return None if value is None else str(value)


def _number(wanted: str, holds: Callable[[float], bool]) -> Callable[[object, str, str], float | None]:
    def read(value: object, column: str, where: str) -> float | None:
        if not isinstance(value, int | float | Decimal | None):
            raise _wrong(value, column, where, wanted)
        if value is None or math.isnan(value):
            return None
        if not holds(float(value)):
            raise _wrong(value, column, where, wanted)
        return float(value) if float(value) != int(value) else int(value)

    return read


# How the value of each field of COLUMNS is read.
KINDS: dict[str, Callable[[object, str, str], Any]] = {
    "problem": _messages,
    "text": _text,
    **dict.fromkeys(("truth", "answer", "role"), _word),
    "step": _number("a whole number", float.is_integer),
    **dict.fromkeys(
        ("flaw", "named"), _number("the number of a step, from 1", lambda n: n.is_integer() and 1 <= n < 1e9)
    ),
    "correct": _number("0 or 1, so it does not say what is correct", lambda value: value in (0.0, 1.0)),
    "verdict": _number("a probability or a verdict between 0 and 1", lambda value: 0.0 <= value <= 1.0),
}


# --- kinds of sources -------------------------------------------------------------------------------------------------


SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".eval")


def load_traces(source: str, fields: Mapping[str, str], runs: Path, pattern: re.Pattern[str] | None) -> LoadedTraces:
    """The traces of a file, of a folder with files of one kind, or of a run: NAME, NAME/round-2, NAME/base,
    each also with /helpful or /sneaky."""
    place = Path(source)
    with user_paths():
        file, folder = place.is_file(), place.is_dir() and not (place / "experiment.toml").is_file()
    if not file and not folder:
        if fields or place.suffix.lower() in SUFFIXES:
            raise UsageError(f"There is no file {source}.", "Give the path of a file, a folder or the name of a run.")
        return _run_traces(source, runs, pattern)
    files = [place] if file else _files_in(place)
    traces, said = list[Trace](), list[str]()
    for each in files:
        found, notes = _read(each, fields, pattern)
        prefix = f"{each.relative_to(place)}, " if len(files) > 1 else ""
        traces += [replace(trace, place=prefix + trace.place) for trace in found] if prefix else found
        said += [note for note in notes if note.partition(": ")[2] not in {one.partition(": ")[2] for one in said}]
    return LoadedTraces(place.stem if file else place.resolve().name, files[0].suffix, traces, said)


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder that TRL, verifiers, prime-rl or inspect-ai wrote."""
    for pattern in TABLE["folders"]:
        if found := sorted(folder.glob(pattern)):
            return found
    raise UsageError(f"{folder} has no traces that pvg knows.", "Name a file: .jsonl, .parquet or .eval")


def _read(file: Path, fields: Mapping[str, str], pattern: re.Pattern[str] | None) -> tuple[list[Trace], list[str]]:
    match file.suffix.lower():
        case ".jsonl" | ".json" | ".ndjson":
            return _traces_of(_with_episodes(json_rows(file), file), file, fields, pattern)
        case ".parquet":
            wanted = {*fields.values(), *(column for names in COLUMNS.values() for column in names)}
            return _traces_of(parquet_rows(file, wanted), file, fields, pattern)
        case ".eval":
            return _traces_of(_eval_rows(file), file, fields, pattern)
    raise UsageError(f"{file}: pvg reads traces from .jsonl, .parquet and .eval files.", "Convert it to JSON lines.")


def _with_episodes(rows: Iterable[tuple[str, object]], file: Path) -> Iterator[tuple[str, object]]:
    """The rows; an episode of verifiers or prime-rl (traces.jsonl) becomes a row per trace of an agent."""
    for place, row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("traces"), list):
            yield place, row
            continue
        for number, trace in enumerate(row["traces"], start=1):
            try:
                nodes, data = trace["nodes"], (trace.get("task") or row["task"])["data"]
                first = next((at for at, node in enumerate(nodes) if node.get("sampled")), len(nodes))
                rewards = {name: reward and reward["score"] for name, reward in (trace.get("rewards") or {}).items()}
                yield (
                    f"{place}, trace {number}",
                    {
                        **rewards,
                        "problem": [node["message"] for node in nodes[:first]],
                        "text": [node["message"] for node in nodes[first:] if node.get("sampled")] or None,
                        "truth": data.get("answer"),
                        "step": ((row.get("run") or {}).get("work") or {}).get("step"),
                        "role": (trace.get("agent") or {}).get("name"),
                    },
                )
            except (AttributeError, LookupError, TypeError):
                raise ConfigurationError(
                    f"{file.name}, {place}: trace {number} is none of verifiers.", "Write the file again."
                ) from None


LARGEST_SAMPLE = 64 << 20  # bytes of one sample of a log, unpacked
ATTACHMENT = "attachment://"
ZSTANDARD = 93  # zip's number
# What zipfile, the decompressors and pyarrow raise for data that is damaged, encrypted or in an unknown form.
UNREADABLE = (
    *(zipfile.BadZipFile, pyarrow.ArrowException, lzma.LZMAError, zlib.error, struct.error),
    *(EOFError, OSError, OverflowError, RuntimeError, ValueError),
)


def _eval_rows(file: Path) -> Iterator[tuple[str, object]]:
    """The samples of a log of inspect-ai: a zip with one JSON file per sample."""
    damaged = ConfigurationError(f"{file}: not a whole log of inspect-ai (.eval).", "Copy it again.")
    with user_paths(), open_input(file) as opened:
        try:
            log = zipfile.ZipFile(opened)
            for info in log.infolist():
                if not re.fullmatch(r"samples/[^/]+\.json", info.filename):
                    continue
                if max(info.file_size, info.compress_size) > LARGEST_SAMPLE:
                    raise ConfigurationError(f"{file}: {info.filename} is larger than 64 MiB.", "Leave it out.")
                data = _zstandard(opened, info) if info.compress_type == ZSTANDARD else log.read(info)
                yield info.filename, _eval_row(orjson.loads(data), f"{file.name}, {info.filename}")
        except UNREADABLE:
            raise damaged from None


def _zstandard(file: BufferedReader, info: zipfile.ZipInfo) -> bytes:
    """A part of a zip in a compression that Python reads from 3.14 on."""
    file.seek(info.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(30))
    file.seek(name + extra, os.SEEK_CUR)
    with pyarrow.CompressedInputStream(pyarrow.py_buffer(file.read(info.compress_size)), "zstd") as stream:
        found: bytes = stream.read(info.file_size)
    if zlib.crc32(found) != info.CRC:
        raise zipfile.BadZipFile
    return found


def _eval_row(sample: Any, where: str) -> dict[str, object]:
    """A sample as a row with the columns of COLUMNS."""
    try:
        kept = sample.get("attachments") or {}

        def resolved(value: Any) -> Any:
            """Long texts are kept apart, and named by their hash."""
            if isinstance(value, list):
                return [resolved(each) for each in value]
            if isinstance(value, dict):
                return {key: resolved(each) for key, each in value.items()}
            name = value.removeprefix(ATTACHMENT) if isinstance(value, str) else value
            return value if name == value else kept[name]

        choices = (sample.get("output") or {}).get("choices") or []
        target = sample["target"]
        score: dict[str, Any] = next(iter((sample.get("scores") or {}).values()), {})
        value = score.get("value")
        value = {"C": 1, "I": 0}.get(value, value) if isinstance(value, str) else value
        return {
            "problem": resolved(sample["input"]),
            "text": resolved([choice["message"] for choice in choices[:1]]) or None,
            "truth": target if isinstance(target, str) else target[0] if target else None,
            "final_answer": score.get("answer"),
            "correct": value if isinstance(value, bool) or value in (0, 1) else None,
        }
    except (AttributeError, LookupError, TypeError):
        raise ConfigurationError(f"{where}: not a sample of inspect-ai.", "Write the log again.") from None


RUN_SOURCE = re.compile(
    r"(?P<run>.+?)(?P<rest>(?:/(?:round-(?P<round>\d{1,6})|(?P<base>base)))?(?:/(?P<role>helpful|sneaky))?)"
)


def _run_traces(source: str, runs: Path, pattern: re.Pattern[str] | None) -> LoadedTraces:
    """The test samples that a run has stored after each round, with the verifier's verdicts; beside them the critiques
    of these samples, and the verdicts of a verifier that writes on solutions of held-out problems."""
    found = RUN_SOURCE.fullmatch(source)
    if found is None:
        raise UsageError("The name of a source is empty.", "Name a file or a run.")
    run, round_ = RunDirectory.open(found["run"], runs), found["round"]
    state = run.load_state().state or {}
    infos = [ShardInfo.from_plain(plain) for plain in state.get("shards", ())]
    shards, traces, verdicts = RolloutShards(run.path), list[Trace](), list[Trace]()
    style = run.experiment().prompts.kind
    for info in infos if round_ is None else [info for info in infos if info.round == int(round_)]:
        if info.label.startswith("checkpoint-"):
            threshold = state["rounds"][info.round].get("threshold") if info.round < len(state["rounds"]) else None
            writer = BASE_SOURCE if found["base"] else source_of_round(info.round)
            rows = [row for row in shards.read(info) if row.source == writer and found["role"] in (None, row.role)]
            traces += [trace_of(row, threshold, pattern) for row in rows]
            verdicts += filter(None, (_critique_of(row, style) for row in rows))
        elif not found["base"] and found["role"] is None and info.label.startswith("train_verifier-"):
            held_out = shards.read_where(info, [f"{info.round:03d}/train_verifier/held-out/"])
            verdicts += [_verdict_of(row) for row in held_out if row.grade.well_formed]
    if not traces:
        raise UsageError(f"The run {run.name!r} has no stored test samples of {source}.", "Finish a round.")
    name, reader = run.name + found["rest"].replace("/", "-"), run.experiment().models.prover.source
    return LoadedTraces(name, "run", traces, [], reader, verdicts)


def _critique_of(rollout: Rollout, style: Style) -> Trace | None:
    """The critic's verdict on a rollout; None without a readable one."""
    from pvg.verifier.data import read_critique  # loads torch

    heard = next((turn.text for turn in rollout.turns if turn.seat == "critic"), None)
    named = None if heard is None else read_critique(heard, style)
    return None if named is None else replace(trace_of(rollout), accepted=named == 0, named=named)


def _verdict_of(rollout: Rollout) -> Trace:
    """A verdict of a verifier that writes, as a trace of the solution that it judged (pvg.game.verdict_phase). Its
    reference: 0 for a correct solution, or the first wrong step if it is known."""
    named, flaw = int(rollout.grade.answer or 0), rollout.reference
    problem, known = (("user", rollout.problem_id),), flaw == "0"
    step = int(flaw) if flaw.isdecimal() and not known else None
    return Trace(rollout.id, problem, "", known=known, accepted=named == 0, flaw=step, named=named)


def trace_of(rollout: Rollout, threshold: float | None = None, pattern: re.Pattern[str] | None = None) -> Trace:
    """A rollout as a trace. Without a threshold it has no verdict."""
    note = STEP_NOTE.search(rollout.grade.note)
    judged = rollout.score is not None and threshold is not None
    return Trace(
        place=rollout.id,
        problem=(("user", rollout.question),),
        text=rollout.solution,
        truth=rollout.reference or None,
        answer=rollout.grade.answer,
        known=rollout.grade.correct,
        step=rollout.round,
        role=rollout.role.value,
        score=rollout.score,
        accepted=bool(rollout.score >= threshold) if judged else None,  # type: ignore[operator]
        flaw=int(note[1]) if note else None,
        pattern=pattern,
    )

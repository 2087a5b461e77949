"""The data task: questions and answers from a file, without Python.

    [task]
    kind = "data"
    path = "problems.jsonl"     # {"question": "What is 3 + 4?", "answer": 7}
    grader = "number"

Invariant: an id depends only on the split and the question, and the share that is held out for testing only on the
question. So neither changes if rows are reordered or added.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pvg import hub
from pvg.config.base import is_hub_id
from pvg.config.task import DataTask, Gsm8kTask
from pvg.errors import ConfigurationError, MissingRequirementError, counted, shortened, user_paths
from pvg.inputs import check_regular, data_of, expanded, json_lines, json_row, text_of
from pvg.records import Grade, Problem, Split, Wording
from pvg.tasks.answers import NO_ANSWER, NO_MARKER, RETRACTED, TAG, UNREAD, extract, parse_number, plain, read
from pvg.tasks.expressions import value_of
from pvg.tasks.task import CLOSED, NUMBER, OPENED, read_wording, tag_wording

if TYPE_CHECKING:
    from pyarrow import ChunkedArray


# Reads the rows of a task's data files: JSON lines, CSV or parquet.

KINDS = (".jsonl", ".csv", ".parquet")
# The end of a file's name; the group counts the files.
SHARD = re.compile(r"-\d+(?:-of-(\d+))?(?:-[0-9a-f]+)?\.parquet")


def files_of(directory: Path) -> tuple[dict[Split, list[Path]], str]:
    """The files of each split, in order, and a sentence for the user if pvg reads one of several folders, or "".

    They are in one of hub.DATA_FOLDERS, the first with both splits if there is one. Raises ConfigurationError if
    several folders have one split each: they may belong to different configurations.
    """
    splits: tuple[Split, ...] = ("train", "test")
    every = {
        directory / folder: {split: _files(directory / folder, split) for split in splits}
        for folder in hub.DATA_FOLDERS
    }
    found = {folder: files for folder, files in every.items() if any(files.values())}
    complete = [folder for folder, files in found.items() if all(files.values())]
    if len(found) > 1 and not complete:
        raise ConfigurationError(
            f"{directory} has train or test files in different folders, which may not belong together: "
            f"{', '.join(str(file) for files in found.values() for each in files.values() for file in each[:1])}.",
            "Put the files that belong together into one folder.",
        )
    chosen = next(iter(complete or found), directory)
    others = " and ".join(str(folder) for folder in found if folder != chosen)
    return every[chosen], others and f"pvg reads {chosen}, and not {others}."


def _files(folder: Path, split: Split) -> list[Path]:
    for name in (f"{split}.jsonl", f"{split}.csv", f"{split}.parquet"):
        if (folder / name).exists():
            check_regular(folder / name)
            return [folder / name]
    files = sorted(file for file in folder.glob(f"{split}-*.parquet") if SHARD.fullmatch(file.name, len(split)))
    for file in files:
        check_regular(file)
    counts = [int(found[1]) for file in files if (found := SHARD.search(file.name)) and found[1]]
    if len(files) != (wanted := max(counts, default=len(files))):
        raise MissingRequirementError(f"{folder} has {len(files)} of {wanted} files like {files[0].name}.")
    return files


def rows_of(file: Path, wanted: Collection[str]) -> Iterator[tuple[str, object]]:
    """(place in the file, row) of each row. Of a parquet file, reads the `wanted` columns alone; the others are None.
    Raises ConfigurationError for invalid rows and other files."""
    match file.suffix.lower():
        case ".jsonl":
            return json_rows(file)
        case ".csv":
            return csv_rows(file, wanted)
        case ".parquet":
            return parquet_rows(file, wanted)
    raise ConfigurationError(f"{file}: not a kind of file that pvg reads.", f"It reads {', '.join(KINDS)}.")


def json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """(place in the file, row) of each line that is not empty, with exact numbers (pvg.inputs.json_row)."""
    correct = "Correct the line; each line is one JSON object. If you downloaded the file, download it again."
    for number, line in json_lines(file):
        try:
            yield f"line {number}", json_row(line, f"{file}, line {number}", ConfigurationError, correct)
        except RecursionError:
            raise ConfigurationError(f"{file}, line {number}: it is nested too deeply.", "Correct the line.") from None


def csv_rows(file: Path, wanted: Collection[str]) -> Iterator[tuple[str, object]]:
    """(place in the file, row) of each row that is not empty. The first of them names the columns; several that are not
    `wanted` may have one name."""
    text = text_of(data_of(file), file)
    # The limit is the process's. Raised, and never lowered: no field of this file is longer than the file.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] = []
    first = line = 1
    try:
        for row in reader:
            if not any(map(str.strip, row)):  # spreadsheets write rows of empty cells
                pass
            elif not columns:
                _check_columns(row, wanted, f"{file}, line {line}")
                columns, first = row, line
            elif len(row) == len(columns):
                yield f"line {line}", dict(zip(columns, row, strict=True))
            else:
                fields = counted(len(row), "field")
                raise ConfigurationError(
                    f"{file}, line {line}: {fields}, and line {first} names {len(columns)} columns.",
                    "Put quotation marks around a field that contains a comma or a line break, and write a comma for "
                    "each empty field.",
                )
            line = reader.line_num + 1
    except csv.Error as error:
        raise ConfigurationError(f"{file}, line {line}: not valid CSV ({error}).", "Correct the line.") from None


def _check_columns(columns: Sequence[str], wanted: Collection[str], place: str) -> None:
    read = [name for name in columns if name in wanted]
    if len(set(read)) < len(read):
        twice = max(read, key=read.count)
        raise ConfigurationError(f"{place}: two columns have the same name, {twice!r}.", "Rename one of them.")
    header = ",".join(columns)
    if not read and (mark := next((mark for mark in ";\t|" if mark in header), "")):
        raise ConfigurationError(
            f"{place}: there is no column {' or '.join(map(repr, wanted))}, but {shortened(repr(header))}.",
            f"Separate the columns by commas instead of {mark!r}.",
        )


def parquet_rows(file: Path, wanted: Collection[str]) -> Iterator[tuple[str, object]]:
    """(place in the file, row) of each row, with None in columns that are not `wanted`: they may be large, or of a type
    that Python lacks, such as times in nanoseconds."""
    import pyarrow
    from pyarrow import parquet

    with user_paths():
        file.open("rb").close()  # pyarrow's errors do not say whether the file or its content is wrong
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            table = opened.read([name for name in names if name in wanted])
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigurationError(f"{file}: not valid parquet ({error}).", "Download the file again.") from None
    _check_columns(names, wanted, str(file))
    columns = {name: _values(table.column(name), f"{file}: the column {name!r}") for name in table.column_names}
    for number in range(table.num_rows):
        yield f"row {number + 1}", {name: columns[name][number] if name in columns else None for name in names}


def _values(column: ChunkedArray, place: str) -> list[object]:
    """The column in Python's types. A float becomes the shortest Decimal that means it in its own precision, such as
    0.2 in 16 bits. From the size on at which its type skips integers it stays a float: it may have lost digits."""
    import pyarrow

    kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
    try:
        if not pyarrow.types.is_floating(kind):
            return list(column.to_pylist())
        narrow = kind.to_pandas_dtype()
        exact = 2.0 ** (np.finfo(narrow).nmant + 1)
        found = [None if value is None or math.isnan(value) else value for value in column.to_pylist()]
        return [
            value
            if value is None or abs(value) >= exact
            else Decimal(np.format_float_positional(narrow(value), trim="0"))
            for value in found
        ]
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, or a time that Python's types cannot hold
        raise ConfigurationError(f"{place} cannot be read ({error}).", "Write the column as text in UTF-8.") from None


def no_column(row: Mapping[str, object], names: Mapping[str, str], place: str) -> ConfigurationError:
    """The error for a row without columns. `names`: of each column the setting that names it; "" for a fixed name."""
    named = " ".join(f"-s {key}=NAME" for key in names.values() if key)
    there, remedy = shortened(", ".join(map(str, row))), f"Correct the row{named and f', or name the column: {named}'}."
    missing = " or ".join(map(repr, names))
    return ConfigurationError(f"{place}: there is no column {missing}, but: {there}.", remedy)


# The graders of `task.kind = "data"`: each reads the answer in a completion, and compares it with the row's answer.

LONGEST_ANSWER = 4000  # characters of an answer in a tag


class AnswerGrader(ABC):
    """`wording`: how prompts ask for the answer (pvg.tasks.task)."""

    wording: Wording | str

    @abstractmethod
    def reference(self, answer: str) -> str:
        """The row's answer as problems carry it. Raises ValueError, with the reason, for one that cannot be graded."""

    @abstractmethod
    def grade(self, reference: str, completion: str) -> Grade: ...

    def same(self, first: str, second: str) -> bool:
        """Whether two references are the same answer."""
        return first == second


def grader_of(section: DataTask) -> AnswerGrader:
    if section.pattern is not None and section.form is not None:  # only with grader = "regex"
        return Regex(section.pattern, section.form)
    graders = {"exact": Exact(), "number": Number(), "choice": Choice(), "expression": Expression()}
    return graders[section.grader]


# --- the answer in a tag ----------------------------------------------------------------------------------------------


def tagged(completion: str) -> tuple[str, str] | None:
    """(answer, note): the content of the last tag, which may be unclosed; without one, the last line that is not
    blank. None without an answer, and for one that is too long."""
    start = completion.rfind(OPENED)
    if start >= 0:
        answer, note = completion[start + len(OPENED) :].partition(CLOSED)[0].strip(), ""
    else:
        answer, note = completion.strip().rpartition("\n")[2].strip(), NO_MARKER.format("the last line")
    return (answer, note) if 0 < len(answer) <= LONGEST_ANSWER else None


def normal(text: str) -> str:
    """The text in Unicode's composed form, with one space for each run of white space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


class Exact(AnswerGrader):
    wording = tag_wording("answer", "11", "9")

    def reference(self, answer: str) -> str:
        if OPENED in answer or CLOSED in answer:
            raise ValueError(f"the answer contains {OPENED} or {CLOSED}, which marks answers in solutions")
        if len(answer) > LONGEST_ANSWER:
            raise ValueError(f"the answer has {len(answer)} characters, and at most {LONGEST_ANSWER} are possible")
        return normal(answer)

    def grade(self, reference: str, completion: str) -> Grade:
        answer, note = tagged(completion) or (None, NO_ANSWER)
        return Grade(answer is not None and normal(answer) == reference, answer is not None, answer, note)


class Expression(AnswerGrader):
    wording = tag_wording("number or arithmetic expression", "3 + 2 * 4", "3 + 6")

    def reference(self, answer: str) -> str:
        if value_of(answer) is None:
            raise ValueError(f"the answer {shortened(repr(answer))} is not an arithmetic expression with a value")
        return answer.strip()

    def same(self, first: str, second: str) -> bool:
        return value_of(first) == value_of(second)

    def grade(self, reference: str, completion: str) -> Grade:
        if (found := tagged(completion)) is None:
            return Grade(False, False, note=NO_ANSWER)
        answer, note = found
        value = value_of(answer)
        if value is None:
            return Grade(False, False, answer, "the answer is not an arithmetic expression")
        return Grade(value == value_of(reference), True, answer, note)


# --- numbers and letters ----------------------------------------------------------------------------------------------


class Number(AnswerGrader):
    """As in gsm8k: a row's answer is a number, or a worked solution that ends in `#### NUMBER`."""

    wording = NUMBER

    def reference(self, answer: str) -> str:
        if parse_number(answer) is not None:
            return answer.strip()
        found = extract(answer)
        if found is None or found.marker != "####":
            raise ValueError(f"the answer {shortened(repr(answer))} is not a number, and does not end in '#### NUMBER'")
        return found.text

    def same(self, first: str, second: str) -> bool:
        return parse_number(first) == parse_number(second)

    def grade(self, reference: str, completion: str) -> Grade:
        found = read(completion)
        if isinstance(found, str):
            return Grade(False, False, note=found)
        note = NO_MARKER.format("the last number") if found.marker == "last number" else ""
        return Grade(found.value == parse_number(reference), True, found.text, note)


# Not that of an abbreviation, such as e.g. or D.C.
LETTER = (
    r"(?:(?:\\(?:boxed|text|textbf|mathbf|mathrm))?\{|\\\(){0,3}"
    r"(?P<open>[(\[]?)(?P<letter>[A-Ja-j])(?!\.[A-Za-z](?![A-Za-z]))"
)
LETTERS_ALONE = re.compile(rf"[\s*_`$\"']*{LETTER}[)\].:!}}*_`$\"'\\\s]*")
# After "answer", a letter, on the same line or below it. One line may have several answers.
MARKED = re.compile(
    r"\banswer[*_`]{0,3}(?: (?:to|of|for)\b[^.\n:=]{0,60}?)?\s?(?:is\b\s?:?|[:=])[ \t\r*_`$\"']{0,8}+"
    r"(?:\n[\s*_`$\"']{0,8}(?=(?P<below>[^\n]{0,200}))|(?=(?P<rest>[^\n]{0,200})))",
    re.IGNORECASE,
)
# The text of the choice may follow a bracket, a dot, a colon or a dash, or be in brackets.
CHOSEN = re.compile(rf"(?i:(?:the )?(?:(?:option|choice) )?){LETTER}(?P<after>[)\].:!}}*_`$\"'\\ ]{{0,8}})(?P<text>.*)")
SEPARATED = re.compile(
    r"[(,;\u2014-](?!\s*(?i:no|nope)\W*(?:$|[A-J]\b))|(?:because|since|as|not|and not|rather than|instead of)\b"
)
# A second letter that is offered: directly after the first one, and later in the text. A text such as "Both A and B"
# names other choices and offers none. In "B, I think" there is one letter, and in "A) I" a number.
REJECTED = (
    r"(?! (?:(?:is|was|are) (?:too|not|n?either|wrong|incorrect|false|impossible|out)|isn't|cannot|fails|does)\b)"
)
OTHER = r"[(\[]?(?!I(?:'| (?!(?:is|are|was|and|or|too)\b)[a-z]))[A-J](?![A-Za-z]|\.[A-Za-z])"
OTHERS = re.compile(
    rf"[)\].:*_ ]*(?:\b(?:or|and)\b\s*{OTHER}|[,/&(\u2014-]\s*{OTHER}{REJECTED})|"
    r"(?:(?!&)[\W_])+[A-HJa-hj](?:(?!&)[\W_]+[A-Ja-j])*[\W_]*$"
)
MAYBE = r"(?:(?:maybe|perhaps|possibly|else|even) )?"
LATER = re.compile(
    rf"\b[Oo]r\b\s*{MAYBE}{OTHER}|[,;]\s*{MAYBE}{OTHER}{REJECTED}|\|\s*{OTHER}(?!\))|[.!?]\s+[(\[]?[A-J]\W*$"
)
ONE = r"[(\[]?[A-J](?![A-Za-z])[)\]]?"
NAMES = re.compile(rf"(?i:both|neither|either) {ONE} (?:and|n?or) {ONE}|(?i:all|none)\b(?: of)?(?: {ONE}(?:,| and)?)*")
NEXT = re.compile(r"\s*[(\[]?[A-J][)\].:]")
PROSE = re.compile(r"[a-z]{2}[^A-J]*(?:[.!\n]|$)")  # "the answer is clear": a sentence without a letter


class Choice(AnswerGrader):
    """Letters A to J, in either case, with or without brackets. A line that offers two letters has no answer."""

    wording = read_wording("choice", "Answer: {answer}")

    def reference(self, answer: str) -> str:
        found = LETTERS_ALONE.fullmatch(plain(answer))
        if found is None:
            raise ValueError(f"the answer {shortened(repr(answer))} is not a letter from A to J")
        return found["letter"].upper()

    def grade(self, reference: str, completion: str) -> Grade:
        completion = plain(completion)
        for mark in reversed(list(MARKED.finditer(completion))):
            rest = mark["rest"] or mark["below"] or ""
            letter = _chosen(re.sub(TAG, "", rest))
            if mark["below"] and NEXT.match(completion, mark.end("below")):
                letter = None  # a list of the choices
            if RETRACTED.match(completion, mark.end("below" if mark["below"] else "rest")):
                return Grade(False, False, note="the answer is taken back")
            if letter is not None:
                return Grade(letter == reference, True, letter)
            if not PROSE.match(rest) or UNREAD.search(rest):
                return Grade(False, False, note="the answer is not one letter")
        last = completion.strip().rpartition("\n")[2]
        found = LETTERS_ALONE.fullmatch(last) if len(last) <= 40 else None
        if found is None:
            return Grade(False, False, note=NO_ANSWER)
        letter = found["letter"].upper()
        return Grade(letter == reference, True, letter, NO_MARKER.format("the last line"))


def _chosen(rest: str) -> str | None:
    """The letter at the start of what follows "Answer:"; None for an article ("A dog"), and for several letters."""
    found = CHOSEN.fullmatch(rest.strip())
    if found is None or OTHERS.match(found["after"] + found["text"]):
        return None
    text, letter = found["text"], found["letter"].upper()
    mark = next((mark for mark in found["after"] if mark in ")].:!"), "")
    if RETRACTED.match(text) or (text and not mark and not SEPARATED.match(text)):
        return None
    # Another choice with a text: the next of a list, as in "A) 9 B) 11", or one after "and". In "P(B)" it is none.
    # After a dot, a letter other than the next one may end a sentence, as in "Hepatitis B. It spreads", unless the
    # text is a number.
    later = f"(?!{letter})[A-J]{re.escape(mark)}"
    following = (
        rf"(?<![A-Za-z.])(?<![A-Za-z0-9]\()(?:{chr(ord(letter) + 1)}{re.escape(mark)}\s*\S|{later}\s*"
        rf"{'[0-9]' if mark in ('.', '!') else '[^ ]'})"
    )
    joined = rf"(?:\b(?:and|or)\b|[,;&/])\s*[(\[]?[A-J]{re.escape(mark)}\s*\S"
    if mark and (re.search(following, NAMES.sub("", text, count=1)) or re.search(joined, text)):
        return None
    return None if LATER.search(NAMES.sub("", text, count=1)) else letter


# --- a pattern of the user --------------------------------------------------------------------------------------------

# Python's patterns may take time that grows fast with the length of a line. So only the last lines that are not blank
# are searched, and the last characters of each.
REGEX_LINES, REGEX_LINE = 10, 200


class Regex(AnswerGrader):
    """The last line with a match counts. The answer is the pattern's group, or the match if it has none."""

    def __init__(self, pattern: str, form: str) -> None:
        self.pattern = re.compile(pattern)
        self.wording = read_wording("form", asked=form)

    def reference(self, answer: str) -> str:
        return normal(answer)

    def grade(self, reference: str, completion: str) -> Grade:
        lines = [found for line in completion.splitlines() if (found := line.strip())]
        for line in reversed(lines[-REGEX_LINES:]):
            if matches := list(self.pattern.finditer(line, max(0, len(line) - REGEX_LINE))):
                answer = matches[-1][1 if self.pattern.groups else 0] or ""
                return Grade(normal(answer) == reference, True, answer)
        return Grade(False, False, note=f"none of the last {REGEX_LINES} lines fits task.pattern")


REMEDY = "Give --data or task.path a .jsonl, .csv or .parquet file, a folder with train and test, or hf:OWNER/DATASET."
HELD_OUT = 10  # one of so many training problems becomes a test problem if there is no test file
ID_DIGITS = 16  # hex digits of an id
MOST_DIGITS = 300  # of a number's text without an exponent
LONGEST_QUESTION = 100_000  # characters, more than any context


class DataRow(NamedTuple):
    """`answer`: as problems carry it. `written`: as the file has it."""

    place: str
    answer: str
    written: str


class Data:
    """The task of one section. Reads the files once, when problems are first needed."""

    KEYS = "task.question", "task.answer"  # name the columns

    def __init__(self, section: DataTask) -> None:
        """Raises MissingRequirementError if `task.path` is not set or a file is missing, and errors of
        pvg.hub.fetch."""
        if section.path is None:
            raise MissingRequirementError("The data task needs a file, but task.path is not set.", REMEDY)
        source = str(section.path)
        self._section = section
        self._grader = grader_of(section)
        self._place = hub.fetch(source, "dataset") if is_hub_id(source) else expanded(section.path, "task.path")
        files, self._choice = files_of(self._place) if self._place.is_dir() else ({}, "")
        self._train, self._test = files.get("train") or [self._whole_file()], files.get("test", [])
        self._made: dict[Split, list[Problem]] = {}

    @property
    def note(self) -> str:
        """A sentence for the user about the split and the folders, or "". Raises the errors of `problems`."""
        if self._test:
            return self._choice
        held_out, kept = len(list(self.problems("test"))), len(list(self.problems("train")))
        return (
            f"{self._place} has no test file, so pvg tests with about a tenth of its problems: {held_out:,} of "
            f"{held_out + kept:,}."
        )

    def problems(self, split: Split) -> Iterator[Problem]:
        """The first `limit` problems of the split, in row order, without repeated questions.

        Raises ConfigurationError with file and line for an invalid row, and for a question in train and in test.
        """
        if not self._made:
            self._made = self._read()
        return iter(self._made[split][: self._section.limit])

    def grade(self, problem: Problem, completion: str) -> Grade:
        return self._grader.grade(problem.answer, completion)

    def _whole_file(self) -> Path:
        if self._place.is_dir():
            raise MissingRequirementError(f"{self._place} has no train.jsonl, train.csv or train.parquet.", REMEDY)
        check_regular(self._place)
        if not self._place.is_file():
            raise MissingRequirementError(f"There is no file {self._place}.", REMEDY)
        return self._place

    def _read(self) -> dict[Split, list[Problem]]:
        train = self._rows(self._train)
        if self._test:
            test = self._rows(self._test)
            for question, row in test.items():
                if question in train:
                    raise ConfigurationError(
                        f"{row.place}: this test question is also a training question ({train[question].place}).",
                        "Remove one of the two rows.",
                    )
        else:
            # Not the bits that choose a problem's half (pvg.tasks.task), which are of its id's digest.
            test = {q: row for q, row in train.items() if int(digest_of(q)[-8:], 16) % HELD_OUT == 0}
            train = {question: row for question, row in train.items() if question not in test}
            if not train or not test:
                total = counted(len(train) + len(test), "problem")
                raise ConfigurationError(
                    f"{self._place} has {total}, too few to hold out a tenth of them.",
                    "Add rows, or set task.path to a folder with train and test.",
                )
        return {"train": self._problems("train", train), "test": self._problems("test", test)}

    def _problems(self, split: Split, rows: dict[str, DataRow]) -> list[Problem]:
        wording = {"wording": self._grader.wording}
        return [
            Problem(f"data-{split}-{digest_of(question)[:ID_DIGITS]}", question, row.answer, wording)
            for question, row in rows.items()
        ]

    def _rows(self, files: Sequence[Path]) -> dict[str, DataRow]:
        """Question -> row."""
        found: dict[str, DataRow] = {}
        for file in files:
            for where, row in rows_of(file, (self._section.question, self._section.answer)):
                place = f"{file}, {where}"
                question, written = self._fields(row, place)
                answer = self._reference(written, place)
                earlier = found.setdefault(question, DataRow(place, answer, written))
                if not self._grader.same(earlier.answer, answer):
                    raise ConfigurationError(
                        f"{place}: repeats the question of {earlier.place} with another answer.",
                        "Remove one of the rows.",
                    )
        if not found:
            raise ConfigurationError(f"{files[0]} has no rows.", "Add problems to it.")
        return found

    def _fields(self, row: object, place: str) -> tuple[str, str]:
        if not isinstance(row, dict):
            raise ConfigurationError(f"{place}: not a JSON object.", 'Write {"question": ..., "answer": ...}.')
        names = dict(zip((self._section.question, self._section.answer), self.KEYS, strict=True))
        if missing := {name: key for name, key in names.items() if name not in row}:
            raise no_column(row, missing, place)
        question = _text(row, self._section.question, "task.question", place)
        if len(question) > LONGEST_QUESTION:
            raise ConfigurationError(
                f"{place}: the question has {len(question):,} characters.",
                f"At most {LONGEST_QUESTION:,} are possible.",
            )
        return question, _text(row, self._section.answer, "task.answer", place)

    def _reference(self, written: str, place: str) -> str:
        try:
            return self._grader.reference(written)
        except ValueError as error:
            raise ConfigurationError(
                f"{place}: {error}.", f"Correct the row, or set another task.grader than {self._section.grader!r}."
            ) from None


def _text(row: dict[str, object], column: str, key: str, place: str) -> str:
    """The text of a column. Answers may be numbers."""
    value = row[column]
    complaint = ""
    if isinstance(value, bool) or value is None:
        complaint = "is empty" if value is None else f"is {str(value).lower()}, not a text"
    elif isinstance(value, int | float | Decimal) and key == "task.answer":
        if isinstance(value, float):
            complaint = f"is {value}, which may have lost digits; write it as a text"
        value = f"{value:f}" if isinstance(value, Decimal) and abs(value.adjusted()) < MOST_DIGITS else str(value)
    if not complaint and not isinstance(value, str):
        complaint = f"is of type {type(value).__name__}, not a text"
    elif isinstance(value, str) and not value.strip():
        complaint = "is empty"
    elif isinstance(value, str) and "\0" in value:
        complaint = "contains a NUL character"
    if complaint:
        raise ConfigurationError(f"{place}: the column {column!r} {complaint}.", "Correct the row, or remove it.")
    return str(value)


def digest_of(question: str) -> str:
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()


# --- GSM8K: numbers as answers, each at the end of a worked solution --------------------------------------------------
#
#     {"question": "Natalia sold ...", "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips ...\n#### 72"}
#
# Its ids have a shorter digest (`gsm8k-train-1a2b3c4d`).

SHORT_ID = 8  # hex digits of an id, unless short digests of a file's questions collide
GSM8K_REMEDY = (
    "Set it with -s task.path=hf:openai/gsm8k, or task.path=DIRECTORY. The directory needs train and test in the "
    "published form, as .jsonl or .parquet."
)


class Gsm8k(Data):
    """The GSM8K task of one section. Its problems have the published `solution` in their metadata."""

    KEYS = "", ""

    def __init__(self, section: Gsm8kTask) -> None:
        """Raises MissingRequirementError if `task.path` is not set or a file is missing, and errors of
        pvg.hub.fetch."""
        if section.path is None:
            raise MissingRequirementError("gsm8k needs its data, but task.path is not set.", GSM8K_REMEDY)
        super().__init__(DataTask(path=section.path, limit=section.limit, grader="number"))
        if not self._test:
            raise MissingRequirementError(
                f"There is no file {self._place / 'test'}.jsonl or test.parquet.", GSM8K_REMEDY
            )
        self._max_steps = section.max_steps

    def _problems(self, split: Split, rows: dict[str, DataRow]) -> list[Problem]:
        """Those with at most `max_steps` calculations."""
        short = Counter(digest_of(question)[:SHORT_ID] for question in rows)
        found = []
        for question, row in rows.items():
            if self._max_steps is not None and calculations(row.written) > self._max_steps:
                continue
            digest = digest_of(question)
            id_ = f"gsm8k-{split}-{digest[: SHORT_ID if short[digest[:SHORT_ID]] == 1 else ID_DIGITS]}"
            found.append(Problem(id_, question, row.answer, {"solution": row.written, "wording": NUMBER}))
        return found


def calculations(solution: str) -> int:
    """The number of calculations in a published solution: its `<<...>>` annotations or its lines, whichever are more,
    because not every calculation is annotated."""
    lines = [line for line in solution.splitlines() if line.strip() and not line.startswith("####")]
    return max(len(lines), solution.count("<<"), 1)

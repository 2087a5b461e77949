"""Reads the rows of a task's data files: JSON lines, CSV or parquet.

for place, row in rows_of(Path("train.csv"), ("question", "answer")):  # ("line 2", {"question": ..., "answer": ...})
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from pvg import hub
from pvg.errors import ConfigurationError, MissingRequirementError, shortened
from pvg.inputs import check_regular, not_json

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

KINDS = (".jsonl", ".csv", ".parquet")
SHARD = re.compile(r"-(\d+)-of-(\d+)\.parquet")  # the end of a file's name; the second number is the count of files


def files_of(directory: Path, split: str) -> list[Path]:
    """The files of a split, in order: in the directory, or in the first of hub.DATA_FOLDERS that has any. Empty without
    one."""
    for folder in hub.DATA_FOLDERS:
        for pattern in (f"{split}.jsonl", f"{split}.csv", f"{split}.parquet", f"{split}-*.parquet"):
            if found := sorted((directory / folder).glob(pattern)):
                for file in found:
                    check_regular(file)
                _refuse_gaps(found)
                return found
    return []


def rows_of(file: Path, wanted: Collection[str]) -> Iterator[tuple[str, object]]:
    """(place in the file, row) of each row. Of a parquet file, reads the `wanted` columns alone; the others are None.
    Raises ConfigurationError for invalid rows and other files."""
    match file.suffix.lower():
        case ".jsonl":
            return json_rows(file)
        case ".csv":
            return csv_rows(file)
        case ".parquet":
            return parquet_rows(file, wanted)
    raise ConfigurationError(f"{file}: not a kind of file that pvg reads.", f"It reads {', '.join(KINDS)}.")


def json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """(place in the file, row) of each line that is not empty."""
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", orjson.loads(line)
        except orjson.JSONDecodeError as error:
            problem, remedy = not_json(line, error)
            correct = "Correct the line; each line is one JSON object. If you downloaded the file, download it again."
            raise ConfigurationError(f"{file}, line {number}: {problem}.", remedy or correct) from None


def csv_rows(file: Path) -> Iterator[tuple[str, object]]:
    """(place in the file, row) of each row that is not empty. The first line names the columns."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{file}, line {line}: not UTF-8.", "Save the file with the encoding UTF-8.") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        columns = next(reader, [])
        if len(set(columns)) < len(columns):
            raise ConfigurationError(f"{file}, line 1: two columns have the same name.", "Rename one of them.")
        if len(columns) == 1 and (mark := next((mark for mark in ";\t" if mark in columns[0]), "")):
            raise ConfigurationError(
                f"{file}, line 1: there is one column, {shortened(repr(columns[0]))}.",
                f"Separate the columns by commas instead of {mark!r}.",
            )
        line = reader.line_num + 1
        for row in reader:
            if row and len(row) != len(columns):
                raise ConfigurationError(
                    f"{file}, line {line}: {len(row)} fields, and line 1 names {len(columns)} columns.",
                    "Put quotation marks around a field that contains a comma or a line break.",
                )
            if row:
                yield f"line {line}", dict(zip(columns, row, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ConfigurationError(f"{file}, line {line}: not valid CSV ({error}).", "Correct the line.") from None


def parquet_rows(file: Path, wanted: Collection[str]) -> Iterator[tuple[str, object]]:
    """(place in the file, row) of each row, with None in columns that are not `wanted`: they may be large, or of a type
    that Python lacks, such as times in nanoseconds."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            table = opened.read([name for name in names if name in wanted])
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigurationError(f"{file}: not valid parquet ({error}).", "Download the file again.") from None
    read = [name for name in names if name in wanted]
    if len(set(read)) < len(read):
        raise ConfigurationError(
            f"{file}: two columns are called {max(read, key=read.count)!r}.", "Rename one of them."
        )
    columns = {name: _values(table.column(name), f"{file}: the column {name!r}") for name in read}
    for number in range(table.num_rows):
        yield f"row {number + 1}", {name: columns[name][number] if name in columns else None for name in names}


def _values(column: ChunkedArray, place: str) -> list[object]:
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, or a time that Python's types cannot hold
        raise ConfigurationError(f"{place} cannot be read ({error}).", "Write the column as text in UTF-8.") from None


def no_column(row: Mapping[str, object], column: str, place: str, key: str = "") -> ConfigurationError:
    """The error for a row without a column. `key`: the setting that names the column."""
    there = shortened(", ".join(map(str, row)))
    return ConfigurationError(
        f"{place}: there is no column {column!r}.", f"Correct the row{key and f', or set {key}'}. The row has: {there}."
    )


def _refuse_gaps(files: Sequence[Path]) -> None:
    """Raises MissingRequirementError if a split has several parquet files and one is missing."""
    wanted = max((int(found[2]) for file in files if (found := SHARD.search(file.name))), default=len(files))
    if len(files) != wanted:
        raise MissingRequirementError(f"{files[0].parent} has {len(files)} of {wanted} files like {files[0].name}.")

"""Questions and answers from JSON Lines, Parquet and Arrow files. Nothing is downloaded or cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_recipes.environments.contract import Example
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DatasetConfig

MAX_ROW_BYTES = 4 * 2**20  # a longer row is a broken file, not a question

Place = str  # file and row, for messages
Pair = tuple[Any, Any]  # question and answer, not checked yet


def read(config: DatasetConfig, where: str) -> Iterator[Example]:
    """Rows of a .jsonl, .parquet or .arrow file, or of a folder that datasets' save_to_disk wrote.

    Questions are text; answers are text or whole numbers. Rows are counted from 1 in messages.

    Raises:
        UserError: names file, row and mend for a missing or damaged file, a missing column, a value of another type,
            an empty question, text that is not UTF-8, and a row over 4 MiB.
    """
    if config.path is None:
        raise UserError("a file dataset needs it", where=f"{where}.path", mend="set it")
    path = Path(config.path).expanduser()
    if not path.exists():
        raise UserError("no such file", where=str(path), mend=f"set {where}.path")
    reader = _reader(path)
    for index, (place, (question, answer)) in enumerate(reader(path, config.question_column, config.answer_column)):
        yield Example(
            index,
            _text(question, place, config.question_column),
            _text(str(answer) if type(answer) is int else answer, place, config.answer_column),
        )


def _reader(path: Path) -> Callable[[Path, str, str], Iterator[tuple[Place, Pair]]]:
    if path.is_dir():
        return _read_folder
    try:
        return {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".arrow": _read_arrow}[path.suffix.lower()]
    except KeyError:
        mend = "use a .jsonl, .parquet or .arrow file, or a folder written by save_to_disk"
        raise UserError(f"cannot read {path.suffix or 'a file without suffix'}", where=str(path), mend=mend) from None


def _text(value: Any, place: Place, column: str) -> str:
    if not isinstance(value, str):
        kind = "empty" if value is None else f"a {type(value).__name__}"
        raise UserError(f"column {column!r} is {kind}, not text", where=place, mend="correct or remove the row")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise UserError(f"column {column!r} is not valid Unicode: {error.reason}", where=place) from error
    if size > MAX_ROW_BYTES:
        raise _too_large(place)
    if not value.strip():
        raise UserError(f"column {column!r} is empty", where=place, mend="correct or remove the row")
    return value


def _too_large(place: Place) -> UserError:
    return UserError(f"the row is larger than {MAX_ROW_BYTES // 2**20} MiB", where=place, mend="shorten or remove it")


def _missing_column(place: Place, column: str, present: list[str]) -> UserError:
    mend = "set question_column and answer_column"
    return UserError(f"no column {column!r}; there are: {', '.join(present)}", where=place, mend=mend)


def _read_jsonl(path: Path, question: str, answer: str) -> Iterator[tuple[Place, Pair]]:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            place = f"{path}, row {number}"
            if len(line) > MAX_ROW_BYTES:
                raise _too_large(place)
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise UserError("the row is not UTF-8", where=place, mend="save the file as UTF-8") from error
            except (ValueError, RecursionError) as error:
                raise UserError(f"the row is not JSON: {error}", where=place, mend="correct it") from error
            if not isinstance(row, dict):
                raise UserError("the row is not a JSON object", where=place, mend="write one object a line")
            for column in (question, answer):
                if column not in row:
                    raise _missing_column(place, column, list(row))
            yield place, (row[question], row[answer])


def _read_parquet(path: Path, question: str, answer: str) -> Iterator[tuple[Place, Pair]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require(path, file.schema_arrow.names, question, answer)
            table = file.read(columns=[question, answer])
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    yield from _pairs(path, table, question, answer)


def _read_arrow(path: Path, question: str, answer: str) -> Iterator[tuple[Place, Pair]]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            # `datasets` writes the streaming format; others write the file format, which opens with this mark.
            is_file = path.stat().st_size > 6 and source.read(6) == b"ARROW1"
            source.seek(0)
            table = (pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)).read_all()
            _require(path, table.column_names, question, answer)
            yield from _pairs(path, table, question, answer)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _read_folder(path: Path, question: str, answer: str) -> Iterator[tuple[Place, Pair]]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise _damaged(path, error) from error
    except IndexError:  # how load_from_disk meets a dataset without rows
        return
    if isinstance(found, datasets.DatasetDict):
        raise UserError("the folder holds several splits", where=str(path), mend=f"name one: {', '.join(found)}")
    _require(path, found.column_names, question, answer)
    yield from _pairs(path, found.with_format("arrow")[:], question, answer)


def _require(path: Path, present: list[str], question: str, answer: str) -> None:
    for column in (question, answer):
        if column not in present:
            raise _missing_column(str(path), column, present)


def _pairs(path: Path, table: Any, question: str, answer: str) -> Iterator[tuple[Place, Pair]]:
    for number, pair in enumerate(zip(table[question], table[answer], strict=True), start=1):
        place = f"{path}, row {number}"
        try:
            yield place, (pair[0].as_py(), pair[1].as_py())
        except UnicodeDecodeError as error:
            raise UserError("the row is not UTF-8", where=place, mend="save the file as UTF-8") from error


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"cannot be read: {str(error).strip()}", where=str(path), mend="write or copy the file again")

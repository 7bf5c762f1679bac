import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from grpo_recipes.data.dataset import load_dataset
from grpo_recipes.errors import UserError
from grpo_recipes.recipe.schema import DatasetConfig

COLUMNS = {"id": [7, 8, 9], "problem": ["1 + 1", "{x} « 2 »", "three"], "solution": ["2", "é", "3"]}


def load(path: Path, question: str = "problem", answer: str = "solution") -> list[tuple[str, str]]:
    config = DatasetConfig(dataset_name="file", path=str(path), question_column=question, answer_column=answer)
    rows = load_dataset(config, "train")
    assert [row.index for row in rows] == list(range(len(rows)))
    return [(row.question, row.answer) for row in rows]


def jsonl(path: Path, columns: dict[str, list[Any]]) -> None:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def arrow_stream(path: Path, columns: dict[str, list[Any]]) -> None:
    table = pyarrow.table(columns)
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def arrow_file(path: Path, columns: dict[str, list[Any]]) -> None:
    table = pyarrow.table(columns)
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def folder(path: Path, columns: dict[str, list[Any]]) -> None:
    datasets.Dataset.from_dict(columns).save_to_disk(str(path))


FORMATS: list[tuple[str, Callable[[Path, dict[str, list[Any]]], None]]] = [
    ("rows.jsonl", jsonl),
    ("rows.parquet", parquet),
    ("stream.arrow", arrow_stream),
    ("file.arrow", arrow_file),
    ("folder", folder),
]
every_format = pytest.mark.parametrize(("name", "write"), FORMATS, ids=[name for name, _ in FORMATS])


@every_format
def test_reads(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    write(tmp_path / name, COLUMNS)
    assert load(tmp_path / name) == [("1 + 1", "2"), ("{x} « 2 »", "é"), ("three", "3")]


@every_format
def test_whole_numbers_are_answers(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    write(tmp_path / name, {"problem": ["a", "b"], "solution": [204, -3]})
    assert load(tmp_path / name) == [("a", "204"), ("b", "-3")]


@every_format
def test_missing_column_names_those_there(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    write(tmp_path / name, COLUMNS)
    with pytest.raises(
        UserError, match=r"no column 'answer'; there are: id, problem, solution\n  -> set question_column"
    ) as e:
        load(tmp_path / name, answer="answer")
    assert str(tmp_path / name) in str(e.value)


@every_format
@pytest.mark.parametrize(
    ("problem", "solution", "message"),
    [
        (["a", "b"], ["1", None], "row 2: column 'solution' is empty, not text"),
        (["a", "b"], [1.5, 2.5], "row 1: column 'solution' is a float, not text"),
        (["a", "b"], [True, False], "row 1: column 'solution' is a bool, not text"),
        ([["a"], ["b"]], ["1", "2"], "row 1: column 'problem' is a list, not text"),
        ([1, 2], ["1", "2"], "row 1: column 'problem' is a int, not text"),
        (["a", "  "], ["1", "2"], "row 2: column 'problem' is empty"),
        (["a", "x" * (4 * 2**20 + 1)], ["1", "2"], "row 2: the row is larger than 4 MiB"),
    ],
    ids=["null", "float", "bool", "list", "number", "blank", "large"],
)
def test_bad_values_name_file_and_row(
    tmp_path: Path, name: str, write: Callable[..., None], problem: list[Any], solution: list[Any], message: str
) -> None:
    write(tmp_path / name, {"problem": problem, "solution": solution})
    with pytest.raises(UserError) as caught:
        load(tmp_path / name)
    assert f"{tmp_path / name}, {message}" in str(caught.value)


@every_format
def test_empty(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    write(tmp_path / name, {"problem": [], "solution": []})
    with pytest.raises(UserError, match="the dataset is empty") as caught:
        load(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"problem": "a", "solution": "1"}\n{"problem": "\xff", "solution": "1"}\n', "row 2: the row is not UTF-8"),
        (b'{"problem": "a", "solution": "1"}\n\n{"problem": \n', "row 3: the row is not JSON: Expecting value"),
        (b'["a", "1"]\n', "row 1: the row is not a JSON object"),
        (b'{"problem": "a"}\n', "row 1: no column 'solution'; there are: problem"),
        (b'{"problem": "\\ud800", "solution": "1"}\n', "row 1: column 'problem' is not valid Unicode: surrogates"),
        (b"[" * 100_000 + b"\n", "row 1: the row is not JSON: "),
    ],
    ids=["latin1", "cut", "array", "missing", "surrogate", "deep"],
)
def test_bad_json_lines(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(path)
    assert f"{path}, {message}" in str(caught.value)


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_last_line_may_lack_its_end_and_blank_lines_do_not_count(tmp_path: Path, ending: bytes) -> None:
    row = b'{"problem": "a", "solution": "1"}'
    (tmp_path / "rows.jsonl").write_bytes(row + ending + ending + row)
    assert load(tmp_path / "rows.jsonl") == [("a", "1"), ("a", "1")]


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow", "file.arrow"])
def test_text_that_is_not_utf8(tmp_path: Path, name: str) -> None:
    raw = pyarrow.array([b"a", b"\xff\xfe"]).cast(pyarrow.binary())
    offsets = raw.buffers()
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, offsets)  # declared as text, never checked
    dict(FORMATS)[name](tmp_path / name, {"problem": text, "solution": ["1", "2"]})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="row 2: the row is not UTF-8"):
        load(tmp_path / name)


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize("keep", [0, 40])
def test_damaged_file(tmp_path: Path, name: str, keep: int) -> None:
    path = tmp_path / name
    dict(FORMATS)[name](path, COLUMNS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="cannot be read: ") as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl: no such file\n  -> set data.train.path"):
        load(tmp_path / "rows.jsonl")


def test_path_not_set() -> None:
    with pytest.raises(UserError, match=r"data.train.path: a file dataset needs it"):
        load_dataset(DatasetConfig(dataset_name="file"), "train")


def test_unknown_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(UserError, match=r"cannot read .csv\n  -> use a .jsonl, .parquet or .arrow file"):
        load(tmp_path / "rows.csv")


def test_folder_that_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: ") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_folder_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict(COLUMNS)
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "all"))
    with pytest.raises(UserError, match=r"several splits\n  -> name one: train, test"):
        load(tmp_path / "all")
    assert load(tmp_path / "all" / "test") == load(tmp_path / "all" / "train")

"""Inputs and outputs of a batch that Ray Data reads and writes: Parquet, CSV and JSON, folders, remote ones too.

A row of the input has the columns of a line: custom_id, url, body, and method if it is there; body is JSON as text, or
a struct, whose nulls are left out. Ray Data needs the extra `rayllm[batch]`, and a process that is connected to Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from rayllm.batch.lines import BatchResult
from rayllm.batch.result_file import ResultFile
from rayllm.batch.runner import Counts
from rayllm.errors import ConfigError, OutputError

if TYPE_CHECKING:
    import ray.data

READERS = {".parquet": "read_parquet", ".csv": "read_csv", ".json": "read_json", ".jsonl": "read_text"}
ROWS = 256  # taken from Ray Data at once
PART_ROWS = 10_000
PART_S = 30.0  # so often a part is written, if there is something to write
COLUMNS = ("id", "custom_id", "status_code", "response", "error")


def is_lines(path: str) -> bool:
    """Whether it is a local file of lines, which needs no Ray Data."""
    return (
        "://" not in path
        and not Path(path).is_dir()
        and PurePosixPath(path).suffix not in (".parquet", ".csv", ".json")
    )


def open_results(path: str) -> ResultFile | ParquetParts:
    """The output of a batch, with what earlier runs have left in it. Raises ConfigError."""
    if is_lines(path):
        return ResultFile(Path(path))
    if PurePosixPath(path).suffix != ".parquet":
        raise ConfigError(f"the output {path} must be a local file of JSON lines, or a folder named *.parquet")
    return ParquetParts(path)


def _need_ray_data() -> None:
    try:
        import pyarrow  # noqa: F401
        import ray.data  # noqa: F401
    except ImportError as error:
        reason = f"Parquet, CSV, JSON and folders need Ray Data: pip install 'rayllm[batch]' ({error})"
        raise ConfigError(reason) from None


class TableInput:
    """An input that Ray Data reads, row by row in the order of its files. It can be read more than once."""

    def __init__(self, path: str):
        """Raises ConfigError if nobody knows how to read it."""
        _need_ray_data()
        self._path, suffix = path, PurePosixPath(path).suffix
        if "://" not in path:
            if not Path(path).exists():
                raise ConfigError(f"the input {path} does not exist")
            if Path(path).is_dir():
                suffix = next((file.suffix for file in sorted(Path(path).rglob("*")) if file.suffix in READERS), "")
        if suffix not in READERS:
            raise ConfigError(f"the input {path} must be {', '.join(READERS)}, or a folder of such files")
        self._reader = READERS[suffix]

    async def lines(self) -> AsyncIterator[bytes]:
        """Its rows as lines."""
        rows: Iterator[dict[str, Any]] = await asyncio.to_thread(lambda: iter(self._dataset().iter_rows()))
        while taken := await asyncio.to_thread(lambda: list(itertools.islice(rows, ROWS))):
            for row in taken:
                line = text_line(row["text"]) if self._reader == "read_text" else row_line(row)
                if line:
                    yield line

    async def count(self) -> int:
        """How many rows it has."""
        return sum([1 async for _line in self.lines()])

    def _dataset(self) -> ray.data.Dataset:
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it tells of each step of each data set
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True  # or ids of equal lines would change
        context.enable_progress_bars = False
        options = {}
        if self._reader == "read_csv":  # which would take "007" for a number
            import pyarrow
            from pyarrow import csv

            types = dict.fromkeys(("custom_id", "method", "url", "body"), pyarrow.string())
            options["convert_options"] = csv.ConvertOptions(
                column_types=types, null_values=[""], strings_can_be_null=True
            )
        return getattr(ray.data, self._reader)(self._path, **options)


def text_line(text: str) -> bytes:
    """A line of a text file, whose first one may begin with a byte order mark."""
    return text.removeprefix("\ufeff").strip().encode()


def row_line(row: dict[str, Any]) -> bytes:
    """A row as a line of a batch file."""
    line = {name: value for name, value in row.items() if value is not None}
    if isinstance(body := line.get("body"), str):
        line["body"] = orjson.Fragment(body)
    elif body is not None:
        line["body"] = _given(body)
    if isinstance(custom_id := line.get("custom_id"), int):  # a column of numbers
        line["custom_id"] = str(custom_id)
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY, default=str)


def _given(value: Any) -> Any:
    """A struct's value without what is null: rows have all fields that any row has."""
    if isinstance(value, dict):
        return {name: _given(each) for name, each in value.items() if each is not None}
    return [_given(each) for each in value] if isinstance(value, list) else value


class ParquetParts:
    """Results as numbered Parquet files of a folder, each written once and as a whole, at least every PART_S seconds.

    Columns: id, custom_id, status_code, and as JSON response (its body) and error. answered, counts: as of
    `ResultFile`. Raises ConfigError for a folder that cannot be read, or holds something else.
    """

    def __init__(self, folder: str, clock: Callable[[], float] = time.monotonic):
        _need_ray_data()
        from pyarrow import fs

        self.answered: set[str] = set()
        self.counts = Counts()
        self._clock, self._written, self._rows = clock, clock(), dict[str, list[Any]]()
        self._files, self._folder = fs.FileSystem.from_uri(folder if "://" in folder else str(Path(folder).absolute()))
        try:
            self._files.create_dir(self._folder)
            parts = self._files.get_file_info(fs.FileSelector(self._folder))
            names = sorted(part.path for part in parts if part.path.endswith(".parquet"))
            for name in names:
                self._read(name)
            self._next = 1 + max((int(PurePosixPath(name).stem.removeprefix("part-")) for name in names), default=-1)
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"the output folder {folder} cannot be used: {error}") from None

    def add(self, result: BatchResult) -> None:
        """Have a result written, at the latest PART_S seconds later."""
        self.answered.add(result.id)
        response, error = result.response, result.error
        row = (
            result.id,
            result.custom_id,
            None if response is None else response.status_code,
            None if response is None else bytes(response.body).decode(),
            None if error is None else msgspec.json.encode(error).decode(),
        )
        for name, value in zip(COLUMNS, row, strict=True):
            self._rows.setdefault(name, []).append(value)
        if len(self._rows["id"]) >= PART_ROWS:
            self._write()

    def flush(self) -> None:
        """Write a part if the last one was long ago."""
        if self._clock() - self._written >= PART_S:
            self._write()

    def close(self) -> None:
        """Write what is left."""
        self._write()

    def _write(self) -> None:
        import pyarrow
        from pyarrow import parquet

        self._written = self._clock()
        if not self._rows:
            return
        types = dict.fromkeys(COLUMNS, pyarrow.string()) | {"status_code": pyarrow.int32()}
        table = pyarrow.table(self._rows, schema=pyarrow.schema(types))
        path = f"{self._folder}/part-{self._next:05}.parquet"
        try:
            parquet.write_table(table, f"{path}.draft", filesystem=self._files)
            self._files.move(f"{path}.draft", path)
        except OSError as error:
            raise OutputError(f"the output {path} cannot be written: {error}") from None
        self._rows, self._next = {}, self._next + 1

    def _read(self, path: str) -> None:
        from pyarrow import parquet

        table = parquet.read_table(path, columns=["id", "status_code"], filesystem=self._files)
        for result_id, status in zip(table["id"].to_pylist(), table["status_code"].to_pylist(), strict=True):
            self.answered.add(result_id)
            self.counts.completed += status == 200
            self.counts.failed += status != 200

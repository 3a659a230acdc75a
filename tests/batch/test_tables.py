"""Rows as lines, what is read by whom, and, where Ray Data is installed, Parquet in and out."""

import asyncio
import json

import pytest

from rayllm.batch.lines import BatchRequest, LineReader, answered, failed
from rayllm.batch.tables import ParquetParts, TableInput, is_lines, open_results, row_line
from rayllm.errors import ConfigError

URL = "/v1/completions"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"custom_id": "a", "url": URL, "body": '{"n": 1}'}, {"custom_id": "a", "url": URL, "body": {"n": 1}}),
        ({"custom_id": 7, "method": None, "url": URL, "body": "{}"}, {"custom_id": "7", "url": URL, "body": {}}),
        (
            {"custom_id": "a", "url": URL, "body": {"x": None, "y": [{"z": None, "w": 0}]}},
            {"custom_id": "a", "url": URL, "body": {"y": [{"w": 0}]}},
        ),
    ],
)
def test_a_row_is_a_line(row, line):
    assert json.loads(row_line(row)) == line
    assert isinstance(LineReader([URL]).read(row_line(row)), BatchRequest)


def test_a_row_whose_body_is_no_json_has_an_error():
    assert LineReader([URL]).read(row_line({"custom_id": "a", "url": URL, "body": "oh"})).error.code == "invalid_json"


def test_local_files_of_lines_need_no_ray_data(tmp_path):
    assert is_lines("in.jsonl") and is_lines("results") and is_lines("-")
    for path in ("in.parquet", "in.csv", "in.json", str(tmp_path), "s3://bucket/in.jsonl"):
        assert not is_lines(path)
    with pytest.raises(ConfigError, match=r"a folder named \*\.parquet"):
        open_results("s3://bucket/out.jsonl")


def test_tables_are_read_in_order(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "in").mkdir()
    for part in range(3):
        bodies = [{"prompt": f"{part}-{n}", "stop": None} for n in range(2)]
        table = pyarrow.table({"custom_id": [f"{part}-{n}" for n in range(2)], "url": [URL] * 2, "body": bodies})
        parquet.write_table(table, tmp_path / "in" / f"{part}.parquet")

    async def read():
        source = TableInput(str(tmp_path / "in"))
        return [json.loads(line) async for line in source.lines()], await source.count()

    lines, count = asyncio.run(read())
    assert [line["custom_id"] for line in lines] == [f"{part}-{n}" for part in range(3) for n in range(2)]
    assert lines[0]["body"] == {"prompt": "0-0"} and count == 6


def test_a_parquet_output_goes_on(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    now = [0.0]

    def request(name):
        return BatchRequest(f"batch_req_{name}", name, URL, b"{}")

    parts = ParquetParts(str(tmp_path / "out.parquet"), lambda: now[0])
    parts.add(answered(request("a"), 200, b'{"x": 1}'))
    parts.flush()  # too early for a part
    now[0] = 31.0
    parts.add(failed(request("b"), "why", "because"))
    parts.flush()
    parts.add(answered(request("lost"), 200, b"{}"))  # and the run is killed
    again = ParquetParts(str(tmp_path / "out.parquet"))
    assert again.answered == {"batch_req_a", "batch_req_b"}
    assert (again.counts.completed, again.counts.failed) == (1, 1)
    again.add(answered(request("c"), 400, b"{}"))
    again.close()
    assert sorted(path.name for path in (tmp_path / "out.parquet").iterdir()) == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["custom_id"], row["status_code"]) for row in rows] == [("a", 200), ("b", None), ("c", 400)]
    assert rows[0]["response"] == '{"x": 1}' and json.loads(rows[1]["error"]) == {"code": "why", "message": "because"}

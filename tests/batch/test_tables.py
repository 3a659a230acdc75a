"""Rows as lines, what is read by whom, and, where Ray Data is installed, Parquet in and out."""

import asyncio
import json

import pytest

from rayllm.batch import tables
from rayllm.batch.lines import BatchRequest, LineReader, answered, failed
from rayllm.batch.tables import ParquetParts, TableInput, is_lines, open_results, row_line, text_line
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


def test_a_byte_order_mark_is_no_part_of_a_line():
    assert text_line('\ufeff{"custom_id": "a"} ') == b'{"custom_id": "a"}'


def test_ids_in_csv_are_text(tmp_path, monkeypatch):
    csv = pytest.importorskip("pyarrow.csv")
    file = tmp_path / "in.csv"
    file.write_text(f'custom_id,url,method,body\n007,{URL},,{{}}\n7,{URL},POST,{{}}\n1e5,{URL},,"{{""n"": 1}}"\n')
    given = {}
    monkeypatch.setattr(tables, "_need_ray_data", lambda: None)
    monkeypatch.setattr("ray.data.read_csv", lambda _path, **options: given.update(options) or Rows([]))
    TableInput(str(file))._dataset()
    rows = csv.read_csv(file, **given).to_pylist()
    requests = [LineReader([URL]).read(row_line(row)) for row in rows]
    assert [request.custom_id for request in requests] == ["007", "7", "1e5"]
    assert json.loads(requests[2].body) == {"n": 1}


def test_local_files_of_lines_need_no_ray_data(tmp_path):
    assert is_lines("in.jsonl") and is_lines("results") and is_lines("-")
    for path in ("in.parquet", "in.csv", "in.json", str(tmp_path), "s3://bucket/in.jsonl"):
        assert not is_lines(path)
    with pytest.raises(ConfigError, match=r"a folder named \*\.parquet"):
        open_results("s3://bucket/out.jsonl")


class Rows:
    """A data set of Ray Data, as far as it is used."""

    def __init__(self, rows):
        self.iter_rows = lambda: iter(rows)


@pytest.mark.parametrize(
    ("suffix", "rows", "ids"),
    [
        (".parquet", [{"custom_id": str(n), "url": URL, "body": {"n": n, "x": None}} for n in range(600)], range(600)),
        (".jsonl", [{"text": '{"custom_id": "0"}'}, {"text": " "}, {"text": '{"custom_id": "1"}'}], range(2)),
    ],
)
def test_rows_are_read_in_order(tmp_path, monkeypatch, suffix, rows, ids):
    monkeypatch.setattr(tables, "_need_ray_data", lambda: None)
    monkeypatch.setattr(TableInput, "_dataset", lambda _self: Rows(rows))
    (tmp_path / f"0{suffix}").touch()

    async def read():
        source = TableInput(str(tmp_path))
        return [json.loads(line)["custom_id"] async for line in source.lines()], await source.count()

    assert asyncio.run(read()) == ([str(n) for n in ids], len(ids))


def test_an_input_that_nobody_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_need_ray_data", lambda: None)
    for path, says in ((tmp_path / "no.parquet", "does not exist"), (tmp_path, "must be .parquet, .csv")):
        with pytest.raises(ConfigError, match=says):
            TableInput(str(path))


def test_a_parquet_output_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_need_ray_data", lambda: None)
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

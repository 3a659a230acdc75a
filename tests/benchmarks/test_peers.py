"""peers.yaml and its readers: which figures stand beside which."""

import peers
import pytest
from peers import Figure, Record


def record(**changes):
    fields = {
        "engine": "vllm",
        "version": "1",
        "software": {"torch": "2"},
        "hardware": "X",
        "date": "2026-01-02",
        "how": "alone",
        "model": "m",
        "options": {"load_format": "dummy"},
        "figures": {"a": "5 out tok/s"},
    }
    return Record(**(fields | changes))


def test_records_are_added_to_a_file_with_comments(tmp_path):
    path = tmp_path / "peers.yaml"
    path.write_text("# what this is\n")
    assert peers.read_records(path) == []
    first, second = record(), record(date="2026-01-03", figures={"a": str(Figure(0.25, "ms"))})
    peers.add_records(path, [first])
    peers.add_records(path, [second])
    assert peers.read_records(path) == [first, second]
    assert path.read_text().startswith("# what this is\n")


def test_the_newest_figure_of_the_same_setting_counts():
    records = [
        record(date="2026-01-03", figures={"a": "7 out tok/s"}),
        record(figures={"a": "5 out tok/s", "b": "2 ms"}),
        record(date="2026-01-04", hardware="Y"),
        record(date="2026-01-04", model="n"),
        record(date="2026-01-04", engine="sglang"),
        record(date="2026-01-04", options={"quantization": "fp8"}),
        record(date="2026-01-04", options={"tensor_parallel_size": 2}),
    ]
    found = peers.find_figures(records, "vllm", "m", "X", {"tensor_parallel_size": 1, "max_model_len": 16384})
    assert {name: str(figure) for name, (figure, _) in found.items()} == {"a": "7 out tok/s", "b": "2 ms"}
    assert [each.date for _, each in found.values()] == ["2026-01-03", "2026-01-02"]
    assert peers.find_figures(records, "vllm", "m", "X", {"dtype": "float16"}) == {}


def test_ratios_are_above_1_for_more_tokens_and_for_less_time():
    assert Figure(150, "out tok/s").ratio(Figure(100, "out tok/s")) == 1.5
    assert Figure(5, "ms").ratio(Figure(10, "ms")) == 2.0
    with pytest.raises(ValueError, match="not of one kind"):
        Figure(5, "ms").ratio(Figure(10, "s"))


def test_the_published_peers():
    records = peers.read_records()
    assert all(Figure.parse(text).value > 0 for each in records for text in each.figures.values())
    assert all(each.version and each.date and each.how and each.software["torch"] for each in records)
    found = peers.find_figures(records, "vllm", "qwen3-0.6b", "NVIDIA H200", {})
    assert found["nano256"][0] == Figure(22_726, "out tok/s")
    assert found["prefill_1x512"][0] == Figure(7, "ms")

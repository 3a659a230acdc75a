"""table.py measures by offline.py in a process of its own, and writes lines of a Markdown table."""

from pathlib import Path

import table

from rayllm.config.options import BUNDLED_MODEL


def test_a_row_from_a_real_run(monkeypatch):
    monkeypatch.setattr(table, "MODELS", Path(BUNDLED_MODEL).parent)
    monkeypatch.setattr(table, "WORKLOADS", ["prefill_1x512"])
    extra = ["--device", "cpu", "--max-model-len", "1024", "--warmup", "0", "--num-gpu-blocks-override", "64"]
    report = table.measure("tiny-pydoc", 1, 1, extra)
    (line,) = table.rows("tiny-pydoc", 1, report)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:2] == ["tiny-pydoc, tp=1", "prefill_1x512"]
    assert cells[2].endswith(" ms")
    assert cells[4:] == ["0", "", ""]


def test_ratios_are_above_1_where_we_are_ahead(monkeypatch):
    monkeypatch.setattr(table, "VLLM", {("m", 1): [100.0, 10.0]})
    monkeypatch.setattr(table, "WORKLOADS", ["a", "b"])
    common = {"seconds": [1.0, 2.0], "cached_tokens": 0}
    results = [
        {"workload": "a", "figure": 150.0, "unit": "out tok/s", **common},
        {"workload": "b", "figure": 5.0, "unit": "ms", **common},
    ]
    throughput, latency = table.rows("m", 1, {"results": results})
    assert throughput == "| m, tp=1 | a | 150.0 | 1.000 to 2.000 s | 0 | 100.0 | 1.50 |"
    assert latency == "| m, tp=1 | b | 5.0 ms | 1.000 to 2.000 s | 0 | 10.0 | 2.00 |"

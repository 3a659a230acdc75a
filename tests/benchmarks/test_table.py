"""table.py measures by offline.py in a process of its own, and writes lines of a Markdown table."""

from pathlib import Path

import table
from peers import Figure, Record

from rayllm.config.options import BUNDLED_MODEL


def test_a_row_from_a_real_run(monkeypatch, capsys):
    monkeypatch.setattr(table, "MODELS", Path(BUNDLED_MODEL).parent)
    monkeypatch.setattr(table, "WORKLOADS", ["prefill_1x512"])
    extra = ["--device", "cpu", "--max-model-len", "1024", "--warmup", "0", "--num-gpu-blocks-override", "64"]
    monkeypatch.setattr("sys.argv", ["table.py", "--model", "tiny-pydoc", "--repeat", "1", *extra])
    table.main()
    _, _, line, _, source = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:2] == ["tiny-pydoc, tp=1", "prefill_1x512"]
    assert cells[2].endswith(" ms")
    assert cells[4:] == ["0", "", ""]
    assert source.startswith("- no figures of vllm on ")


def test_ratios_are_above_1_where_we_are_ahead():
    record = Record("vllm", "0.24", {}, "X", "2026-01-02", "alone", "m", {}, {})
    peer = {"a": (Figure(100, "out tok/s"), record), "b": (Figure(10, "ms"), record)}
    common = {"seconds": [1.0, 2.0], "cached_tokens": 0}
    results = [
        {"workload": "a", "figure": 150.0, "unit": "out tok/s", **common},
        {"workload": "b", "figure": 5.0, "unit": "ms", **common},
        {"workload": "c", "figure": 5.0, "unit": "ms", **common},
    ]
    throughput, latency, alone = table.rows("m", 1, {"results": results}, peer)
    assert throughput == "| m, tp=1 | a | 150.0 out tok/s | 1.000 to 2.000 s | 0 | 100 | 1.50 |"
    assert latency == "| m, tp=1 | b | 5.0 ms | 1.000 to 2.000 s | 0 | 10 | 2.00 |"
    assert alone == "| m, tp=1 | c | 5.0 ms | 1.000 to 2.000 s | 0 |  |  |"
    assert table.sources(peer) == ["vllm 0.24, m, 2026-01-02: alone"]


def test_options_of_the_engine_choose_the_figures():
    flags = ["--quantization", "fp8", "--enforce-eager", "--max-num-seqs", "1024"]
    assert table.engine_options(flags) == {"quantization": "fp8", "enforce_eager": True, "max_num_seqs": 1024}

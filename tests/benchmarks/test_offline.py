"""offline.py: the workloads are the published ones, runs share no prompts, reports show what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import offline
import pytest
from typer.testing import CliRunner

from rayllm.config.options import EngineConfig
from rayllm.errors import ConfigError

ROOT = Path(__file__).parents[2]
runner = CliRunner()


def test_workloads_of_one_engine_share_no_prompts():
    names = ["nano256", *offline.FIXED_SHAPES]
    firsts = [
        tuple(prompt[:16])
        for name in names
        for run in (-1, 0, 1)
        for prompt in offline.named_workload(name).make(run).prompts
    ]
    assert len(set(firsts)) == len(firsts)


def test_a_benchmark_reports_tokens_from_the_prefix_cache():
    workload = offline.custom_workload(2, "40", "2")
    repeated = workload._replace(name="repeated", make=lambda _run: workload.make(0))
    config = EngineConfig(device="cpu", max_model_len=256, skip_tokenizer_init=True)
    results = offline.run_benchmark(config, [offline.custom_workload(3, "40", "2"), repeated], repeat=1)["results"]
    assert [result["cached_tokens"] for result in results] == [0, 2 * 32]


def test_nano256_is_the_published_workload():
    batch = offline.named_workload("nano256").make(0)
    assert (len(batch.prompts), sum(map(len, batch.prompts)), sum(batch.max_tokens)) == (256, 142_827, 133_966)
    other = offline.named_workload("nano256").make(1)
    assert list(map(len, other.prompts)) == list(map(len, batch.prompts))
    assert other.prompts != batch.prompts
    assert other.max_tokens == batch.max_tokens


@pytest.mark.parametrize(
    ("name", "count", "input_len", "output_len", "unit"),
    [
        ("bs1_128_256", 1, 128, 256, "out tok/s"),
        ("bs32_1k_256", 32, 1024, 256, "out tok/s"),
        ("bs256_1k_128", 256, 1024, 128, "out tok/s"),
        ("prefill_16x8k", 16, 8192, 1, "in tok/s"),
        ("prefill_1x512", 1, 512, 1, "ms"),
    ],
)
def test_fixed_workloads(name, count, input_len, output_len, unit):
    workload = offline.named_workload(name)
    batch = workload.make(0)
    assert {len(p) for p in batch.prompts} == {input_len}
    assert batch.max_tokens == [output_len] * count
    assert workload.unit == unit
    assert max(map(max, batch.prompts)) < 10_000
    assert workload.make(1).prompts != batch.prompts  # nothing of it is in the prefix cache


def test_custom_workloads_and_small_vocabularies():
    batch = offline.custom_workload(5, "3:9", "2").make(0)
    assert all(3 <= len(p) <= 9 for p in batch.prompts)
    assert batch.max_tokens == [2] * 5
    folded = offline.fit_vocabulary(batch, 50)
    assert max(map(max, folded.prompts)) < 50
    with pytest.raises(ConfigError):
        offline.custom_workload(0, "3", "2")


class FakeLLM:
    """Takes two seconds for each run, by a clock of its own."""

    options: dict = {}

    def __init__(self, **options):
        FakeLLM.options = options

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_reports(monkeypatch, capsys):
    monkeypatch.setattr(offline, "run_once", lambda _llm, _batch: (2.0, 0))
    monkeypatch.setattr("rayllm.llm.LLM", FakeLLM)
    options = [
        "--model",
        str(ROOT / "configs/models/qwen3-0.6b"),
        "--workload",
        "bs1_128_256",
        "--load-format",
        "dummy",
    ]
    result = runner.invoke(offline.app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    assert FakeLLM.options["skip_tokenizer_init"]
    assert FakeLLM.options["max_num_batched_tokens"] == 16384
    report = json.loads(result.stdout)
    assert report["results"][0]["figure"] == 128.0
    assert report["results"][0]["seconds"] == [2.0] * 3
    assert "bs1_128_256" in runner.invoke(offline.app, options).stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--workload", "x"], "unknown workload 'x'"),
        (["--workload", "nano256", "--num-prompts", "3"], "--workload or --num-prompts, not both"),
        (["--num-prompts", "1", "--input-len", "9:3"], "input_len"),
        (["--repeat", "0"], "repeat must be at least 1"),
    ],
)
def test_bad_options(options, text):
    error = runner.invoke(offline.app, options).exception
    assert isinstance(error, ConfigError)
    assert text in str(error)


def test_as_a_script_with_one_line_for_an_error():
    command = [sys.executable, "benchmarks/offline.py", "--workload", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown workload 'x'")

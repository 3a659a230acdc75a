"""serve.py: what its flags mean to guidellm, which tests/clients runs; here it is a fake that keeps its orders."""

import sys

import pytest
import serve
from typer.testing import CliRunner

from rayllm.errors import ConfigError

runner = CliRunner()


@pytest.fixture
def orders(monkeypatch):
    """Collects what guidellm would run."""
    found = []
    monkeypatch.setattr(serve, "run_guidellm", lambda spec: found.append(spec) or [])
    monkeypatch.delenv("RAYLLM_API_KEY", raising=False)
    return found


def test_a_load_by_concurrency(orders, tmp_path):
    out = [f"{tmp_path}/{name}" for name in ("a.json", "b.html")]
    options = ["--url", "http://x:1", "--model", "m", "--tokenizer", "t", "--concurrency", "7", "--input-len", "10:30"]
    limits = ["--num-prompts", "70", "--seconds", "9", "--slo-ttft-ms", "200", "--warmup", "0.1", "--seed", "5"]
    result = runner.invoke(
        serve.app, [*options, *limits, "--out", out[0], "--out", out[1]], env={"RAYLLM_API_KEY": "k"}
    )
    assert result.exit_code == 0, result.output
    (spec,) = orders
    assert spec["backend"] == {
        "kind": "openai_http",
        "target": "http://x:1",
        "model": "m",
        "api_key": "k",
        "request_format": "/v1/completions",
        "timeout": 600.0,
        "extras": {"body": {"temperature": 0.6}},
    }
    assert spec["profile"] == {"kind": "concurrent", "streams": 7, "warmup": 0.1}
    assert spec["constraints"] == [{"kind": "max_requests", "count": 70}, {"kind": "max_duration", "seconds": 9.0}]
    assert spec["tokenizer"] == {"kind": "huggingface_auto", "model": "t"}
    lengths = {"prompt_tokens": 20, "prompt_tokens_min": 10, "prompt_tokens_max": 30}
    lengths |= {"output_tokens": 128, "output_tokens_min": 128, "output_tokens_max": 128}
    assert spec["data"] == [{"kind": "synthetic_text", **lengths}]
    assert spec["seed"] == {"kind": "static", "value": 5}
    assert spec["outputs"] == [{"kind": "json", "path": out[0]}, {"kind": "html", "path": out[1]}]
    assert spec["metrics"]["slo"] == {"ttft_ms": 200, "tpot_ms": None}


def test_a_load_by_rate_of_100_requests_with_new_prompts(orders):
    for _ in range(2):
        assert runner.invoke(serve.app, ["--rate", "2.5", "--endpoint", "chat"]).exit_code == 0
    one, other = orders
    assert one["profile"] == {"kind": "poisson", "rate": 2.5, "warmup": 0.0}
    assert one["constraints"] == [{"kind": "max_requests", "count": 100}]
    assert one["backend"]["request_format"] == "/v1/chat/completions"
    assert one["metrics"]["slo"] is None
    assert one["seed"] != other["seed"]


def test_a_dataset(orders):
    runner.invoke(serve.app, ["--concurrency", "1", "--dataset", "d.jsonl", "--output-len", "9"])
    (spec,) = orders
    assert spec["data"] == [{"kind": "json_file", "path": "d.jsonl"}]
    assert spec["data_column_mapper"]["column_mappings"]["output_tokens_count_column"] == "max_tokens"
    assert spec["backend"]["max_tokens"] == 9
    assert spec["backend"]["extras"]["body"]["ignore_eos"] is False


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "exactly one of --rate and --concurrency"),
        (["--rate", "1", "--concurrency", "1"], "exactly one of --rate and --concurrency"),
        (["--rate", "1", "--input-len", "9:3"], "input_len"),
        (["--rate", "1", "--out", "/no/such/folder/a.json"], "in a folder that exists"),
        (["--rate", "1", "--out", "a.pdf"], "out must end in .json"),
    ],
)
def test_options_that_do_not_go_together(orders, options, text):
    error = runner.invoke(serve.app, options).exception
    assert isinstance(error, ConfigError)
    assert text in str(error)
    assert not orders


def test_requests_that_fail_make_exit_code_1(monkeypatch):
    monkeypatch.setattr(serve, "run_guidellm", lambda _: ["status 429", "status 429", "broken"])
    result = runner.invoke(serve.app, ["--rate", "1"])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == ["failed: 2 x status 429", "failed: 1 x broken"]


def test_without_guidellm_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "guidellm", None)
    error = runner.invoke(serve.app, ["--rate", "1"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == "rayllm bench serve needs guidellm: pip install 'rayllm[bench]'"

"""guidellm against a live server, by its command and by ours: each request is answered, with the tokens asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm", reason="guidellm is not installed")

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "rayllm" / "assets" / "tiny-pydoc"
REQUESTS, OUTPUT_TOKENS = 24, 8


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_benchmark(url, tmp_path, route):
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={url},model=tiny-pydoc,request_format={route}",
        "profile": "kind=concurrent,streams=4",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run(
        [Path(sys.executable).with_name("guidellm"), "run", *arguments, "--disable-console"],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        check=True,
        timeout=200,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == REQUESTS
    assert not requests["errored"] and not requests["incomplete"]
    # guidellm takes these figures from the usage that the stream ends with.
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {OUTPUT_TOKENS}
    assert all(request["input_metrics"]["text_tokens"] >= 32 for request in requests["successful"])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_our_command_that_runs_it(url, tmp_path, endpoint):
    """benchmarks/serve.py, which `rayllm bench serve` runs."""
    report = tmp_path / "report.json"
    load = ["--concurrency", "4", "--num-prompts", str(REQUESTS), "--input-len", "16:32"]
    options = ["--tokenizer", str(TOKENIZER), "--endpoint", endpoint, "--output-len", str(OUTPUT_TOKENS)]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "serve.py", "--url", url, *load, *options, "--out", report],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "Request Latency Statistics" in done.stdout
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == REQUESTS
    assert {request["output_metrics"]["text_tokens"] for request in benchmark["requests"]["successful"]} == {8}


def test_our_command_fails_if_a_request_does(url, tmp_path):
    load = ["--rate", "20", "--num-prompts", "3", "--model", "absent", "--tokenizer", str(TOKENIZER)]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "serve.py", "--url", url, *load],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "failed: 3 x" in done.stderr
    assert "404" in done.stderr

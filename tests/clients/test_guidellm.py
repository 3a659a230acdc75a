"""guidellm's benchmark against a live server: every request is answered, with as many tokens as were asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm", reason="guidellm is not installed")

TOKENIZER = Path(__file__).parents[2] / "rayllm" / "assets" / "tiny-pydoc"
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

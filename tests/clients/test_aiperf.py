"""aiperf against a live server: each request is answered, with the tokens asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiperf", reason="aiperf is not installed")

TOKENIZER = Path(__file__).parents[2] / "rayllm" / "assets" / "tiny-pydoc"
REQUESTS, OUTPUT_TOKENS = 16, 8


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
@pytest.mark.parametrize("stream", [True, False])
def test_profile(url, tmp_path, endpoint, stream):
    options = {
        "model": "tiny-pydoc",
        "url": url,
        "endpoint-type": endpoint,
        "tokenizer": TOKENIZER,
        "concurrency": 4,
        "request-count": REQUESTS,
        "synthetic-input-tokens-mean": 32,
        "output-tokens-mean": OUTPUT_TOKENS,
        "output-tokens-stddev": 0,
        "extra-inputs": "ignore_eos:true",
        "artifact-dir": tmp_path,
        "ui": "none",
    }
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [Path(sys.executable).with_name("aiperf"), "profile", *arguments, *(["--streaming"] if stream else [])],
        # Told to stay offline, it takes no folder for a tokenizer.
        env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | {"HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(file.read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_request_count") or report["error_request_count"]["avg"] == 0
    assert not report.get("error_summary")
    assert report["output_sequence_length"]["max"] <= OUTPUT_TOKENS + 2  # it counts them in the text again

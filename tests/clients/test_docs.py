"""The snippets of docs/clients.md, each in the environment that its fence names after the language.

RAYLLM_TEST_ENVIRONMENT says which one this is; without it, it is that of the newer openai-python. Node's are run by
node/docs.test.mjs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "clients.md").read_text()
SNIPPETS = re.findall(r"^```(\w+) ([\w-]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ENVIRONMENT = os.environ.get("RAYLLM_TEST_ENVIRONMENT", "openai3")
OURS = [(language, text) for language, name, text in SNIPPETS if name == ENVIRONMENT]
TASK_DOC = {"question": "A list is", "choices": ["a sequence", "a banana"], "answer": 0}


def test_every_snippet_names_an_environment():
    known = {path.stem for path in (HERE / "requirements").glob("*.txt")} | {"node"}
    named = {name for _, name, _ in SNIPPETS}
    assert named <= known
    assert len(SNIPPETS) == len(re.findall("^```.", PAGE, re.MULTILINE)), "a fence without an environment"
    assert {"openai3", "openai-agents", "anthropic", "langchain", "litellm", "node"} <= named


@pytest.fixture
def folder(tmp_path):
    """Where snippets run: tasks/ is the reader's own task for lm-eval, and the model's folder is there."""
    (tmp_path / "tiny-pydoc").symlink_to(HERE.parents[1] / "rayllm" / "assets" / "tiny-pydoc")
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "docs.jsonl"
    data.write_text(json.dumps(TASK_DOC) + "\n")
    task = (
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n" + (HERE / "lm_eval_tasks/pydoc_choice.yaml").read_text()
    )
    (tmp_path / "tasks" / "my_task.yaml").write_text(task.replace("pydoc_choice", "my_task"))
    return tmp_path


@pytest.mark.parametrize(("language", "text"), OURS, ids=range(len(OURS)))
def test_snippet(url, folder, language, text):
    """It ends well and says something."""
    if ENVIRONMENT == "openai3":
        pytest.importorskip("openai", reason="openai is not installed")
    text = text.replace("http://127.0.0.1:8000", url)
    run = {"python": [sys.executable, "-c"], "sh": ["bash", "-euo", "pipefail", "-c"]}[language]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # aiperf's bane
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*run, text],
        cwd=folder,
        env=environment | {"PATH": path, "HOME": str(folder), "LLM_USER_PATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

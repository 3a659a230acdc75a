"""The example of docs/models.md: an architecture of a user's package, found by engines and by the ranks on Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import support.model_factory as factory
import torch
import transformers
from support.kinds.common import LLAMA, PAD

from rayllm.config.architectures.architecture import GROUP
from rayllm.config.model_folder import load_model_spec
from rayllm.errors import ModelError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests/support/own_model"
FILES = ("pyproject.toml", "starcoder2_rayllm/architecture.py", "starcoder2_rayllm/model.py")
SCRIPT = """
import json, sys

import ray
from rayllm import LLM, SamplingParams

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
for tp in (1, 2):
    options = {"tensor_parallel_size": tp, "max_model_len": 64, "num_gpu_blocks_override": 32}
    with LLM(folder, device="cpu", skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


def install(site: Path, project: dict) -> None:
    """What pip makes of a pyproject.toml: the packages, and what describes them."""
    shutil.copytree(PACKAGE / "starcoder2_rayllm", site / "starcoder2_rayllm")
    name, version = project["name"], project["version"]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "".join(f"{key} = {value}\n" for key, value in project["entry-points"][GROUP].items())
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")


@pytest.fixture
def project() -> dict:
    return tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]


@pytest.fixture
def folder(tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "head_dim"}
    model = transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**config, sliding_window=12))
    factory.randomise(model, 0)
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_package_brings_a_model(tmp_path, project, folder):
    """Greedy tokens as in transformers, of one rank in the process and of two on Ray."""
    site = tmp_path / "site"
    install(site, project)
    prompts = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 30)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    command = [sys.executable, "-c", SCRIPT, folder, json.dumps(prompts)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampling = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": PAD}
    expected = [hf.generate(torch.tensor([prompt]), **sampling)[0, len(prompt) :].tolist() for prompt in prompts]
    assert [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[[")] == [expected] * 2


def test_mistakes_are_named(tmp_path, project, folder, monkeypatch):
    with pytest.raises(ModelError, match="Starcoder2ForCausalLM is not supported"):
        load_model_spec(folder)
    point = "starcoder2_rayllm.architecture"
    for number, (value, error) in enumerate(
        {
            "starcoder2_rayllm.nowhere:X": "cannot be imported: ModuleNotFoundError",
            f"{point}:X": "cannot be imported: AttributeError",
            f"{point}:parse": "must be an Architecture with a model",
        }.items()
    ):
        site = tmp_path / str(number)
        install(site, project | {"entry-points": {GROUP: {"Starcoder2ForCausalLM": value}}})
        with monkeypatch.context() as patch:
            patch.syspath_prepend(site)
            with pytest.raises(
                ModelError, match=f"^architecture Starcoder2ForCausalLM: entry point {value} of .*{error}"
            ):
                load_model_spec(folder)
    for number in ("0", "1"):
        monkeypatch.syspath_prepend(tmp_path / number)
        next((tmp_path / number).glob("*.dist-info")).rename(tmp_path / number / f"other{number}-1.0.dist-info")
        metadata = tmp_path / number / f"other{number}-1.0.dist-info/METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: other{number}\nVersion: 1.0\n")
    with pytest.raises(ModelError, match=r"has several entry points in rayllm\.architectures"):
        load_model_spec(folder)


def test_the_documentation_has_it_all():
    text, lines = (ROOT / "docs/models.md").read_text(), 0
    for file in FILES:
        code = (PACKAGE / file).read_text()
        assert code in text, file
        lines += code.count("\n")
    assert lines <= 80

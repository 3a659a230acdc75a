"""Every deployment in configs/ is valid, and so are the model shapes beside them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from rayllm.config.model_folder import load_model_spec
from rayllm.config.model_spec import check_parallel
from rayllm.config.options import load_config_file, make_models
from rayllm.errors import ConfigError
from rayllm.layers.layer import BuildContext
from rayllm.models.registry import model_class
from rayllm.parallel.tp_group import TPGroup

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = sorted((ROOT / "configs").glob("*.yaml"))
MODELS = sorted((ROOT / "configs" / "models").iterdir())
SHAPES = {  # billions of parameters, as published
    "qwen3-0.6b": 0.60,
    "qwen3-8b": 8.19,
    "qwen3-8b-fp8": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-30b-a3b-fp8": 30.5,
    "qwen3.5-35b-a3b": 34.7,
    "llama-3.1-8b": 8.03,
    "llama-3.1-8b-gptq": 8.03,
    "llama-3.2-1b": 1.24,
    "qwen2.5-1.5b": 1.54,
    "mixtral-8x7b": 46.7,
    "gpt-oss-20b": 20.9,
    "glm-4.7-flash": 29.9,
}


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda p: p.stem)
def test_deployments_load(path):
    models, _ = make_models(load_config_file(str(path)))
    for model in models:
        config = model.engine
        if not Path(config.model).is_absolute():
            check_parallel(load_model_spec(str(ROOT / config.model)), config.tensor_parallel_size)


def test_there_are_deployments():
    assert {"tiny-pydoc", "llama-3.1-8b-tp4", "two-models"} <= {p.stem for p in DEPLOYMENTS}


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.name)
def test_model_shapes(path):
    spec = load_model_spec(str(path))
    for tp in (1, 2, 4):
        if path.name != "qwen2.5-1.5b" or tp < 4:
            check_parallel(spec, tp)
    context = BuildContext(TPGroup.single(), torch.device("meta"), torch.bfloat16, max_model_len=4096)
    parameters = set(model_class(spec.architecture)(context, spec).parameters())
    assert sum(each.numel() for each in parameters) / 1e9 == pytest.approx(SHAPES[path.name], rel=0.01)
    assert sorted(p.name for p in path.iterdir()) == ["config.json"]
    assert json.loads((path / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("text", "message"), [("modle: x", "did you mean 'model'"), ("- model", "mapping"), ("model: [", "not valid YAML")]
)
def test_bad_files_are_refused(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config_file(str(path))


@pytest.mark.parametrize("name", ["scripts/launch", "scripts/test", "scripts/check", ".ci/run", "scripts/setup.sh"])
def test_scripts_parse_and_can_be_run(name):
    path = ROOT / name
    subprocess.run(["bash", "-n", path], check=True)
    assert name.endswith(".sh") or os.access(path, os.X_OK)

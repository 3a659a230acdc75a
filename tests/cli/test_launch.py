"""`rayllm launch`: flags, the file of --config, several models. tests/e2e starts servers with it."""

import re

import pytest
from typer.testing import CliRunner

from rayllm.cli import main as cli
from rayllm.config.options import EngineConfig
from rayllm.errors import ConfigError

runner = CliRunner()


@pytest.fixture
def launched(monkeypatch):
    """Collects what `rayllm launch` would start."""
    calls = []

    def start_server(models, server, **kwargs):
        calls.append((models[0].engine, models[0].server, kwargs, models, server))

    monkeypatch.setattr("rayllm.serve.cluster.launch.start_server", start_server)
    return calls


def launch(launched, *args):
    result = runner.invoke(cli.app, ["launch", *args])
    assert result.exit_code == 0, result.output
    return launched[-1][0], launched[-1][1]


def test_flags(launched):
    engine, server = launch(
        launched,
        "some/model",
        "--tp",
        "2",
        "--port",
        "81",
        "--host",
        "::1",
        "--served-model-name",
        "m",
        "--max-model-len",
        "99",
        "--gpu-memory-utilization",
        "0.5",
        "--enforce-eager",
        "--no-enable-prefix-caching",
    )
    assert (engine.model, engine.tensor_parallel_size, engine.max_model_len) == ("some/model", 2, 99)
    assert (engine.gpu_memory_utilization, engine.enforce_eager, engine.enable_prefix_caching) == (0.5, True, False)
    assert (server.port, server.host, server.served_model_name) == (81, "::1", "m")


def test_flags_override_the_file_which_overrides_defaults(launched, tmp_path):
    path = tmp_path / "deployment.yaml"
    path.write_text("model: from/file\nport: 1234\nmax_num_seqs: 7\nenforce_eager: true\n")
    engine, server = launch(launched, "--config", str(path), "--port", "99", "--no-enforce-eager")
    assert (engine.model, engine.max_num_seqs, engine.enforce_eager, engine.block_size) == ("from/file", 7, False, 16)
    assert server.port == 99
    assert launch(launched, "flag/model", "--config", str(path))[0].model == "flag/model"
    assert launch(launched)[0].model == EngineConfig().model


def test_several_models_of_a_file(launched, tmp_path):
    path = tmp_path / "deployment.yaml"
    path.write_text(
        "port: 99\nmax_num_seqs: 7\nmodels:\n"
        "- {served_model_name: a, model: x/one, num_replicas: 2}\n"
        "- {model: x/two, max_num_seqs: 9, max_queued_requests: 3}\n"
    )
    launch(launched, "--config", str(path), "--block-size", "8", "--max-queued-requests", "5")
    *_, models, server = launched[-1]
    assert [model.name for model in models] == ["a", "x/two"]
    assert [model.engine.model for model in models] == ["x/one", "x/two"]
    assert [model.engine.max_num_seqs for model in models] == [7, 9]
    assert [model.engine.block_size for model in models] == [8, 8]
    assert [model.server.num_replicas for model in models] == [2, 1]
    assert [model.server.max_queued_requests for model in models] == [5, 5], "flags are above the file"
    assert (server.port, server.served_model_name) == (99, None)
    reread = launched[-1][2]["reread"]
    path.write_text("served_model_name: b\n")
    assert [model.name for model in reread()[0]] == ["b"]
    launch(launched)
    assert launched[-1][2]["reread"] is None


@pytest.mark.parametrize(
    ("text", "args", "error"),
    [
        ("models: []", (), "models must be a list of 1 to"),
        ("models: [x]", (), r"models\[0\] must be a mapping"),
        ("models: [{port: 1}]", (), r"models\[0\]: port belongs to the whole deployment"),
        ("models: [{}, {modle: x}]", (), r"models\[1\]: unknown option 'modle' \(did you mean 'model'"),
        ("model: x\nmodels: [{}]", (), "model belongs to each of models"),
        ("models: [{model: /a/x}, {model: /b/x}]", (), "two models have the name 'x'"),
        ("models: [{model: a}, {model: b, block_size: 0}]", (), r"models\[1\]: block_size"),
        ("models: [{model: a}, {model: b}]", ("--served-model-name", "c"), "served_model_name cannot be given"),
        ("models: [{model: a}, {model: b}]", ("c",), "model cannot be given for several models"),
        ("num_replicas: 3\nmax_replicas: 2", (), r"max_replicas: must be at least num_replicas \(3\), not 2"),
        ("num_replicas: 0", (), "num_replicas"),
        ("target_queued_tokens: 0", (), "target_queued_tokens"),
        ("upscale_delay: 3", (), "upscale_delay: needs max_replicas"),
    ],
)
def test_files_that_cannot_work(launched, tmp_path, text, args, error):
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    result = runner.invoke(cli.app, ["launch", "--config", str(path), *args])
    assert isinstance(result.exception, ConfigError)
    assert re.search(error, str(result.exception)), result.exception

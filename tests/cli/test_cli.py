"""The command line: every option is a flag, precedence, exit codes, bench workloads, chat over a fake server."""

import json
import re
import subprocess
import sys
import time

import httpx
import pytest
from typer.testing import CliRunner

from rayllm import bench
from rayllm.cli import chat as cli_chat
from rayllm.cli import collect_env as cli_env
from rayllm.cli import main as cli
from rayllm.cli.options import field_help
from rayllm.config.options import EngineConfig, ServerConfig
from rayllm.errors import ConfigError, EngineDeadError, ModelError, StartupError

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


def exit_code(monkeypatch, capsys, *args):
    """(exit code, standard error) of the real entry point."""
    monkeypatch.setattr(sys, "argv", ["rayllm", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code, capsys.readouterr().err


def test_every_option_is_a_flag():
    text = runner.invoke(cli.app, ["launch", "--help"], terminal_width=200).output
    for name in [*EngineConfig.model_fields, *ServerConfig.model_fields]:
        assert "--" + name.replace("_", "-") in text
    assert "--tp" in text
    assert field_help(EngineConfig)["block_size"] == "tokens a KV block"
    assert "folder" in field_help(EngineConfig)["model"]


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
    assert [model.name for model in models] == ["a", "two"]
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
        ("models: [{model: a/x}, {model: b/x}]", (), "two models have the name 'x'"),
        ("models: [{model: a}, {model: b, block_size: 0}]", (), r"models\[1\]: block_size"),
        ("models: [{model: a}, {model: b}]", ("--served-model-name", "c"), "served_model_name cannot be given"),
        ("models: [{model: a}, {model: b}]", ("c",), "model cannot be given for several models"),
        ("num_replicas: 3\nmax_replicas: 2", (), r"max_replicas: must be at least num_replicas \(3\), not 2"),
        ("num_replicas: 0", (), "num_replicas"),
        ("target_queued_tokens: 0", (), "target_queued_tokens"),
    ],
)
def test_files_of_several_models_that_cannot_work(launched, tmp_path, text, args, error):
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    result = runner.invoke(cli.app, ["launch", "--config", str(path), *args])
    assert isinstance(result.exception, ConfigError)
    assert re.search(error, str(result.exception)), result.exception


def test_commands_that_run_one_model_refuse_several(tmp_path):
    path = tmp_path / "deployment.yaml"
    path.write_text("models: [{model: a}, {model: b}]")
    result = runner.invoke(cli.app, ["generate", "hi", "--config", str(path)])
    assert "lists several models" in str(result.exception)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["launch", "--tp", "3"], "tensor_parallel_size: input should be 1, 2, 4 or 8, not 3"),
        (["launch", "--block-size", "0"], "block_size"),
        (["launch", "--device", "tpu"], "device"),
        (["launch", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["launch", "a", "--model", "b"], "given twice"),
        (["launch", "/no/such/model"], "model folder /no/such/model does not exist"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--best-of", "2", "--temperature", "0"], "best_of must be 1 with temperature 0"),
        (["generate", "hi", "--use-beam-search"], "use_beam_search needs at least 2 beams; best_of, or else n"),
        (["generate", "hi", "--use-beam-search", "--n", "2", "--early-stopping", "no"], "early_stopping must be true"),
        (["generate", "hi", "--length-penalty", "2"], "length_penalty is only allowed with use_beam_search"),
        (["generate", "hi", "--model", "/no/such/model"], "/no/such/model"),
        (["bench", "offline", "--workload", "x"], "unknown workload 'x'"),
        (["bench", "kernels", "nothing"], "no kernel case begins with 'nothing'"),
        (["bench", "offline", "--num-prompts", "1", "--input-len", "9:3"], "input_len"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(monkeypatch, capsys, args, text):
    code, error = exit_code(monkeypatch, capsys, *args)
    assert code == 2
    line = error.splitlines()[-1]
    assert line.startswith("error: ")
    assert text in line
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "code"), [(ModelError("m"), 2), (StartupError("a\nb"), 1), (EngineDeadError("e"), 1)]
)
def test_exit_codes(monkeypatch, capsys, error, code):
    def start_server(*_args, **_kwargs):
        raise error

    monkeypatch.setattr("rayllm.serve.cluster.launch.start_server", start_server)
    seen, text = exit_code(monkeypatch, capsys, "launch")
    assert seen == code
    assert text.splitlines()[-1] == "error: " + " ".join(str(error).split())


def test_unknown_flags_are_refused(monkeypatch, capsys):
    assert exit_code(monkeypatch, capsys, "launch", "--bogus", "1")[0] == 2


def test_help_is_quick():
    code = "import sys, rayllm.cli.main; assert not {'torch', 'ray', 'transformers', 'fastapi'} & set(sys.modules)"
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.monotonic() - started < 10  # a second on an idle machine


def test_collect_env_shows_no_secrets(monkeypatch, capsys):
    monkeypatch.setenv("RLLM_API_KEY", "hunter2")
    monkeypatch.setenv("RAY_ADDRESS", "ray://user:hunter3@head:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cli_env.print_environment()
    text = capsys.readouterr().out
    assert "hunter" not in text
    assert "torch" in text
    assert "0,1" in text


# Benchmarks


def test_workloads_of_one_engine_share_no_prompts():
    names = ["bs1_128_256", "bs32_1k_256", "bs256_1k_128", "prefill_1x512", "prefill_16x8k", "nano256"]
    firsts = [
        tuple(prompt[:16])
        for name in names
        for run in (-1, 0, 1)
        for prompt in bench.named_workload(name).make(run).prompts
    ]
    assert len(set(firsts)) == len(firsts)


def test_a_benchmark_reports_tokens_from_the_prefix_cache():
    workload = bench.custom_workload(2, "40", "2")
    repeated = workload._replace(name="repeated", make=lambda _run: workload.make(0))
    config = EngineConfig(device="cpu", max_model_len=256, skip_tokenizer_init=True)
    results = bench.run_benchmark(config, [bench.custom_workload(3, "40", "2"), repeated], repeat=1)["results"]
    assert [result["cached_tokens"] for result in results] == [0, 2 * 32]


def test_nano256_is_the_published_workload():
    batch = bench.named_workload("nano256").make(0)
    assert (len(batch.prompts), sum(map(len, batch.prompts)), sum(batch.max_tokens)) == (256, 142_827, 133_966)
    other = bench.named_workload("nano256").make(1)
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
    workload = bench.named_workload(name)
    batch = workload.make(0)
    assert {len(p) for p in batch.prompts} == {input_len}
    assert batch.max_tokens == [output_len] * count
    assert workload.unit == unit
    assert max(map(max, batch.prompts)) < 10_000
    assert workload.make(1).prompts != batch.prompts  # nothing of it is in the prefix cache


def test_custom_workloads_and_small_vocabularies():
    batch = bench.custom_workload(5, "3:9", "2").make(0)
    assert all(3 <= len(p) <= 9 for p in batch.prompts)
    assert batch.max_tokens == [2] * 5
    folded = bench._fit_vocabulary(batch, 50)
    assert max(map(max, folded.prompts)) < 50
    with pytest.raises(ConfigError):
        bench.custom_workload(0, "3", "2")


def test_bench_report(monkeypatch, capsys):
    monkeypatch.setattr(bench, "_run_once", lambda _llm, _batch: (2.0, 0))

    class FakeLLM:
        def __init__(self, **options):
            assert options["skip_tokenizer_init"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("rayllm.llm.LLM", FakeLLM)
    model = "configs/models/qwen3-0.6b"
    result = runner.invoke(
        cli.app, ["bench", "offline", "--model", model, "--workload", "bs1_128_256", "--json", "--load-format", "dummy"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["results"][0]["figure"] == 128.0
    assert report["results"][0]["seconds"] == [2.0] * 3
    bench.print_results(report, as_json=False)
    assert "bs1_128_256" in capsys.readouterr().out


# Chat


def fake_server(request):
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "m"}]})
    body = json.loads(request.content)
    last = body["messages"][-1]["content"]
    if last == "bad":
        return httpx.Response(400, json={"error": {"message": "no such thing"}})
    if last == "down":
        return httpx.Response(503, json={"error": {"message": "being restarted"}})
    chunks = [{"choices": [{"delta": {"content": t}}]} for t in ("you said ", last, f" ({len(body['messages'])})")]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(200, text="".join(lines) + "data: [DONE]\n\n")


@pytest.fixture
def chat(monkeypatch):
    client = httpx.Client
    monkeypatch.setattr(cli_chat.httpx, "Client", lambda **_: client(transport=httpx.MockTransport(fake_server)))

    def run(text, *args):
        return runner.invoke(cli.app, ["chat", *args], input=text)

    return run


def test_chat_keeps_the_conversation(chat):
    result = chat("hello\nagain\n/reset\nafresh\n\nnever\n", "--system", "be brief")
    assert result.stdout.splitlines() == ["you said hello (2)", "you said again (4)", "you said afresh (2)"]


def test_chat_goes_on_after_a_refused_message(chat):
    result = chat("bad\nhello\n")
    assert "you said hello (1)" in result.stdout
    assert "error: no such thing" in result.stderr


def test_chat_ends_if_the_server_does(chat):
    assert isinstance(chat("down\n").exception, EngineDeadError)


def test_chat_without_a_server(monkeypatch, capsys):
    code, error = exit_code(monkeypatch, capsys, "chat", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "no answer from http://127.0.0.1:9/v1" in error

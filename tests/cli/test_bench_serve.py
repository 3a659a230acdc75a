"""`rayllm bench serve` against a small SSE server on the loopback device: load, measurements, statistics, failures."""

import json
import statistics
import threading
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from support.sse_server import FakeServer, Handler
from typer.testing import CliRunner

from rayllm.bench_serve import bench_server
from rayllm.bench_serve_client import Measured, Sample, run_load
from rayllm.bench_serve_load import ServeBenchOptions, arrival_times, bench_options, make_load
from rayllm.bench_serve_report import draw_plot
from rayllm.bench_serve_stats import latencies, mean_itl, summarise
from rayllm.cli import main as cli
from rayllm.errors import ConfigError, EngineDeadError, InvalidRequestError

runner = CliRunner()


@pytest.fixture
def server():
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def options(server=None, **given):
    fields = {"input_len": "5", "output_len": "6", "num_prompts": 9, "warmup": 0, "seed": 1}
    if server is not None:
        fields["url"] = server.url
    return ServeBenchOptions(**(fields | given))


def report_of(server, **given):
    chosen = options(server, **given)
    return summarise(chosen, *run_load(chosen))


# The load


def test_arrival_times_are_a_poisson_process_of_the_rate():
    times = arrival_times(50, 20_000, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0
    assert times == arrival_times(50, 20_000, seed=3)
    assert times != arrival_times(50, 20_000, seed=4)
    # Of an exponential distribution, mean and standard deviation are 1 / rate; 1 / e of the gaps are longer.
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() == pytest.approx(0.02, rel=0.05)
    assert (gaps > 0.02).mean() == pytest.approx(np.exp(-1), rel=0.05)


def test_random_ids_depend_on_the_seed_and_stay_in_the_vocabulary():
    one, again, other = (
        make_load(options(concurrency=1, seed=s, warmup=9, vocab_size=50, input_len="3:8"), "m") for s in (1, 1, 2)
    )
    prompts = [body["prompt"] for body in one.bodies]
    assert one == again
    assert all(3 <= len(prompt) <= 8 and max(prompt) < 50 for prompt in prompts)
    assert prompts != [body["prompt"] for body in other.bodies]
    assert prompts != [body["prompt"] for body in one.warmup]
    assert one.bodies[0].keys() == {
        "model",
        "temperature",
        "stream",
        "stream_options",
        "ignore_eos",
        "prompt",
        "max_tokens",
    }


def test_chats_are_text():
    bodies = make_load(options(concurrency=1, endpoint="chat", input_len="7"), "m").bodies
    (message,) = bodies[0]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 7
    assert isinstance(make_load(options(concurrency=1, prompts="text"), "m").bodies[0]["prompt"], str)


def write_dataset(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def test_dataset(tmp_path):
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write_dataset(tmp_path, {"prompt": "hello", "max_tokens": 3}, {"messages": turns})
    bodies = make_load(options(concurrency=1, endpoint="chat", dataset=path, num_prompts=None), "m").bodies
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": "hello"}], turns]
    assert [body["max_tokens"] for body in bodies] == [3, 6]
    assert "ignore_eos" not in bodies[0]
    warmup = make_load(options(concurrency=1, endpoint="chat", dataset=path, num_prompts=None, warmup=3), "m").warmup
    assert len(warmup) == 3
    assert not any(body["messages"] in (bodies[0]["messages"], turns) for body in warmup)  # would be cached then
    path = write_dataset(tmp_path, {"prompt": [1, 2]}, "not read")
    assert make_load(options(concurrency=1, dataset=path, num_prompts=1), "m").bodies[0]["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "prompt 1: "),
        ([1], "either prompt or messages"),
        ({"prompt": "a", "messages": []}, "either prompt or messages"),
        ({"prompt": "a", "size": 1}, "unknown field 'size'"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be a number from 1, not 0"),
        ({"messages": []}, "messages are for --endpoint chat"),
    ],
)
def test_bad_datasets(tmp_path, line, text):
    with pytest.raises(ConfigError, match=text):
        make_load(options(concurrency=1, dataset=write_dataset(tmp_path, line), num_prompts=None), "m")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "exactly one of --rate and --concurrency"),
        ({"rate": 1, "concurrency": 1}, "exactly one of --rate and --concurrency"),
        ({"concurrency": 1, "prompts": "ids", "endpoint": "chat"}, "chat takes text"),
        ({"concurrency": 1, "prompts": "ids", "dataset": "x"}, "not both"),
        ({"concurrency": 1, "dataset": "/no/such/file"}, "cannot be read: No such file"),
        ({"concurrency": 1, "input_len": "9:3"}, "input_len"),
    ],
)
def test_options_that_do_not_go_together(given, text):
    with pytest.raises(ConfigError, match=text):
        make_load(options(**given), "m")


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "bench.yaml"
    path.write_text("rate: 3\nnum_prompts: 7\n")
    chosen = bench_options({"config": str(path), "num_prompts": 8, "seed": None, "model": None})
    assert (chosen.rate, chosen.num_prompts) == (3, 8)
    assert chosen.seed is not None
    path.write_text("rates: 3\n")
    with pytest.raises(ConfigError, match="unknown option 'rates'"):
        bench_options({"config": str(path)})


# The client


def test_fixed_concurrency(server):
    server.gate = threading.Barrier(3)  # nothing is answered unless three requests are in flight
    report = report_of(server, concurrency=3)
    assert (report["requests"], report["failed"], report["failures"]) == (9, 0, [])
    assert (report["prompt_tokens"], report["output_tokens"]) == (45, 54)
    assert server.most_in_flight == 3
    assert len(server.connections) == 3  # each of them used again
    assert {path for path, _ in server.bodies} == {"/v1/completions"}
    assert {body["model"] for _, body in server.bodies} == {"fake<model>"}


def test_a_rate_is_kept_whatever_the_server_does(server):
    server.gate = threading.Barrier(9)  # nothing is answered until all have been sent
    report = report_of(server, rate=200, endpoint="chat")
    assert report["failed"] == 0
    assert server.most_in_flight == 9
    assert {path for path, _ in server.bodies} == {"/v1/chat/completions"}


def test_tokens_are_counted_by_usage_not_by_chunk(server):
    server.tokens, server.per_chunk = 10, 5
    chosen = options(server, concurrency=1, num_prompts=1)
    _, measured = run_load(chosen)
    (sample,) = measured.samples
    assert sample.output_tokens == 10
    assert list(sample.gap_tokens) == [5]
    assert sample.gaps[0] == pytest.approx((sample.last - sample.first) / 5)
    assert sum(measured.ticks.values()) == 10
    assert sample.sent <= sample.first <= sample.last <= sample.ended


def test_warm_up_is_not_measured(server):
    report = report_of(server, concurrency=2, warmup=4)
    assert report["requests"] == 9
    assert len(server.bodies) == 13


@pytest.mark.parametrize(
    ("fault", "kind", "example"),
    [
        ("busy", "HTTP 429 overloaded", "too many"),
        ("page", "HTTP 502", "the server answered with status 502"),
        ("error", "error in stream request_failed", "no such kernel"),
        ("drop", "connection broken", "peer closed connection"),
        ("cut", "ended early", "before its [DONE]"),
        ("blind", "no usage", "does not count tokens"),
        ("empty", "no tokens", "no tokens"),
        ("strange", "not understood", "[1, 2]"),
    ],
)
def test_failures_are_counted_by_kind(server, fault, kind, example):
    server.fault = fault
    report = report_of(server, concurrency=2)
    assert report["failed"] == 3
    (failure,) = report["failures"]
    assert (failure["kind"], failure["count"]) == (kind, 3)
    assert example in failure["example"]
    assert report["output_tokens"] == 36  # of those that were answered


def test_timeout(server):
    server.gate = threading.Event()
    report = report_of(server, concurrency=2, num_prompts=2, timeout=0.2)
    server.gate.set()
    assert report["failures"] == [{"kind": "timeout", "count": 2, "example": "no complete answer within 0.2 s"}]


def test_no_server():
    chosen = options(concurrency=1, url="http://127.0.0.1:9")
    with pytest.raises(EngineDeadError, match=r"no answer from http://127\.0\.0\.1:9/v1"):
        run_load(chosen)
    chosen = chosen.model_copy(update={"model": "m"})
    report = summarise(chosen, *run_load(chosen))
    assert report["failures"][0]["kind"] == "no connection"
    assert report["latency_ms"]["ttft"] is None


def test_a_failed_warm_up_says_why(server):
    server.fault = "busy"
    with pytest.raises(EngineDeadError, match=r"warm-up request failed: HTTP 429 overloaded: too many"):
        run_load(options(server, concurrency=1, warmup=3))


# Statistics


def sample(due=0.0, sent=0.0, first=1.0, gaps=(), failure=None):
    """gaps: (seconds between two chunks, tokens of the second)."""
    made = Sample(due, sent, first, first, prompt_tokens=10, output_tokens=1, failure=failure)
    for seconds, tokens in gaps:
        made.gaps.append(seconds / tokens)
        made.gap_tokens.append(tokens)
        made.last += seconds
        made.output_tokens += tokens
    made.ended = made.last
    return made


def test_latencies():
    chosen = options(rate=1)
    figures = latencies(chosen, [sample(due=0.5, sent=0.75, gaps=[(1, 2), (3, 1)]), sample(first=0.25)])
    values = {name: np.repeat(*value).tolist() for name, value in figures.items()}
    assert values == {
        "ttft": [250, 250],
        "ttft_from_due": [500, 250],
        "itl": [500, 500, 3000],
        "itl_of_request": [pytest.approx(4000 / 3)],
        "e2e": [4250, 250],
        "e2e_from_due": [4500, 250],
        "sent_late": [250, 0],
    }
    assert "sent_late" not in latencies(options(concurrency=1), [])


def test_percentiles_and_throughput():
    samples = [sample(first=n / 100) for n in range(1, 102)]
    report = summarise(options(rate=1), "m", Measured(samples))
    ttft = report["latency_ms"]["ttft"]
    assert ttft == {key: pytest.approx(v) for key, v in zip(ttft, (510, 510, 910, 1000, 1010), strict=True)}
    assert list(ttft) == ["mean", "p50", "p90", "p99", "max"]
    assert report["requests_per_s"] == pytest.approx(101 / 1.01)
    assert report["total_tokens_per_s"] == pytest.approx(11 * 101 / 1.01)
    assert report["latency_ms"]["itl"] is None
    assert report["mean_in_flight"] == pytest.approx(sum(n / 100 for n in range(1, 102)) / 1.01)


def test_goodput_counts_from_when_a_request_was_due():
    samples = [
        sample(first=0.1, gaps=[(0.01, 1)]),
        sample(due=0.0, sent=0.5, first=0.55, gaps=[(0.01, 1)]),  # quick, but sent late
        sample(first=0.1, gaps=[(0.5, 1)]),  # slow tokens
        sample(first=0.1, failure=("timeout", "")),
    ]
    chosen = options(rate=1, slo_ttft_ms=200, slo_itl_ms=50)
    goodput = summarise(chosen, "m", Measured(samples))["goodput"]
    assert goodput == {"requests_per_s": pytest.approx(1 / 0.6), "share": pytest.approx(1 / 3)}
    assert summarise(options(rate=1), "m", Measured(samples))["goodput"] is None


def test_mean_itl_of_one_token_is_none():
    assert mean_itl(sample()) is None
    assert mean_itl(sample(gaps=[(1, 4)])) == pytest.approx(0.25)


def test_timeline_keeps_all_tokens():
    measured = Measured([sample(first=500.0)])
    for tick in range(5000):
        measured.ticks[tick] = 3
    timeline = summarise(options(rate=1), "m", measured)["timeline"]
    assert len(timeline["output_tokens_per_s"]) <= 120
    assert statistics.fmean(timeline["output_tokens_per_s"][:-1]) == pytest.approx(30)
    assert sum(timeline["output_tokens_per_s"]) * timeline["step_s"] == pytest.approx(15_000)


# Reports


def test_files_and_exit_code(server, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYLLM_API_KEY", "sesame")
    out, plot = tmp_path / "report.json", tmp_path / "plot.svg"
    flags = [
        "--url",
        server.url,
        "--concurrency",
        "2",
        "--num-prompts",
        "6",
        "--input-len",
        "4",
        "--slo-ttft-ms",
        "1e6",
    ]
    command = ["bench", "serve", *flags, "--out", str(out), "--plot", str(plot)]
    result = runner.invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert "6 answered, 0 failed" in result.stdout
    assert "100.0% of answers" in result.stdout
    assert set(server.keys) == {"Bearer sesame"}
    report = json.loads(out.read_text())
    assert len(report["samples"]) == report["requests"] == 6
    assert report["samples"][0]["output_tokens"] == 6
    assert "sesame" not in out.read_text() + result.output
    root = ElementTree.fromstring(plot.read_text())
    assert "fake<model>" in "".join(root.itertext())
    server.fault = "busy"
    result = runner.invoke(cli.app, [*command, "--warmup", "0"])
    assert result.exit_code == 1
    assert "2 x HTTP 429 overloaded: too many" in result.stdout


def test_a_plot_without_answers_is_still_one():
    failed = summarise(options(rate=1), "m", Measured([sample(failure=("timeout", ""))]))
    root = ElementTree.fromstring(draw_plot(failed, {"ttft": [], "itl": [], "e2e": []}))
    assert "output tokens per second" in list(root.itertext())


def test_bad_options_are_found_before_the_server_is_asked(tmp_path):
    with pytest.raises(ConfigError, match="folder does not exist"):
        bench_server({"concurrency": 1}, None, str(tmp_path / "no" / "out.json"), None)
    with pytest.raises(ConfigError, match="concurrency"):
        bench_server({"concurrency": 0}, None, None, None)
    with pytest.raises(ConfigError, match="endpoint"):
        bench_server({"concurrency": 1, "endpoint": "chats"}, None, None, None)


def test_a_refused_key_is_said(server, monkeypatch):
    monkeypatch.setattr(
        Handler, "do_GET", lambda self: self.whole(401, {"error": {"message": "the API key is not valid"}})
    )
    with pytest.raises(InvalidRequestError, match="the API key is not valid"):
        run_load(options(server, concurrency=1), "wrong")

"""The client of the benchmarks against a small server: what it sends, when, and what it makes of each answer."""

import re
import threading

import numpy as np
import pytest
from http_load import RequestFailedError, arrival_times, completion_bodies, first_model, run_load, warm_up
from support.sse_server import FakeServer


class Answers:
    """Streams `tokens` tokens in chunks of `per_chunk`. fault: what goes wrong with every third request."""

    def __init__(self):
        self.tokens, self.per_chunk, self.fault = 6, 2, None
        self.gate = None  # a barrier that each request waits at before it is answered
        self.count = 0

    def __call__(self, handler, body):
        with handler.server.lock:
            self.count += 1
            fault = self.fault if self.count % 3 == 0 else None
        if self.gate is not None:
            self.gate.wait(timeout=60)
        if fault == "busy":
            handler.whole(429, {"error": {"message": "too many", "code": "overloaded"}})
        else:
            self.stream(handler, body, fault)

    def stream(self, handler, body, fault):
        handler.begin()
        for count in range(self.per_chunk, self.tokens + 1, self.per_chunk):
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 0 if fault == "empty" else count}
            event = {"choices": [{"text": "x"}], "usage": None if fault == "blind" else usage}
            if count > self.per_chunk and fault == "error":
                event = {"error": {"message": "no such kernel", "code": "request_failed"}}
            if count > self.per_chunk and fault == "drop":
                handler.close_connection = True
                return
            handler.event(event)
        handler.end("" if fault == "cut" else "data: [DONE]\n\n")


@pytest.fixture
def answers():
    return Answers()


@pytest.fixture
def server(answers):
    with FakeServer(answers).running() as server:
        yield server


def bodies(count=9, run=1):
    return completion_bodies("m", count, 5, 6, run=run)


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


def test_prompts_depend_on_the_run_and_stay_in_the_vocabulary():
    one, again, other = (completion_bodies("m", 9, 7, 3, run=run, vocab_size=50) for run in (1, 1, 2))
    assert one == again
    assert all(len(body["prompt"]) == 7 and max(body["prompt"]) < 50 for body in one)
    assert [body["prompt"] for body in one] != [body["prompt"] for body in other]
    assert {body["max_tokens"] for body in one} == {3}
    assert one[0].items() >= {"model": "m", "ignore_eos": True, "temperature": 0.6, "stream": True}.items()


def test_a_number_of_requests_stays_in_flight(server, answers):
    answers.gate = threading.Barrier(3)  # nothing is answered unless three requests are in flight
    samples = run_load(server.url, bodies(), concurrency=3)
    assert [sample.failure for sample in samples] == [None] * 9
    assert {(sample.prompt_tokens, sample.output_tokens) for sample in samples} == {(5, 6)}
    assert server.most_in_flight == 3
    assert len(server.connections) == 3  # each of them used again
    assert set(server.paths) == {"/v1/completions"}
    assert {tuple(body["prompt"]) for body in server.bodies} == {tuple(body["prompt"]) for body in bodies()}


def test_requests_are_sent_when_they_are_due_whatever_the_server_does(server, answers):
    answers.gate = threading.Barrier(9)  # nothing is answered until all have been sent
    due = arrival_times(200, 9, seed=1)
    samples = run_load(server.url, bodies(), due=due)
    assert all(sample.failure is None for sample in samples)
    assert all(at <= sample.sent for at, sample in zip(due, samples, strict=True))
    assert server.most_in_flight == 9


def test_tokens_are_counted_by_usage_not_by_chunk(server, answers):
    answers.tokens, answers.per_chunk = 10, 5
    (sample,) = run_load(server.url, bodies(1), concurrency=1)
    assert sample.output_tokens == 10
    assert len(sample.gaps) == 1
    assert sample.gaps[0] == pytest.approx((sample.last - sample.first) / 5)
    assert sample.sent <= sample.first <= sample.last <= sample.ended


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("busy", "status 429: .*too many"),
        ("error", "error in the stream: no such kernel"),
        ("drop", "peer closed connection"),
        ("cut", r"the stream ended before its \[DONE\]"),
        ("blind", "does not count the tokens"),
        ("empty", "has no tokens"),
    ],
)
def test_what_goes_wrong_is_the_failure_of_its_sample_alone(server, answers, fault, text):
    answers.fault = fault
    samples = run_load(server.url, bodies(), concurrency=2)
    failed = [sample for sample in samples if sample.failure is not None]
    assert len(failed) == 3
    assert all(re.search(text, sample.failure) for sample in failed), failed[0].failure
    assert sum(sample.output_tokens for sample in samples if sample.failure is None) == 36


def test_a_request_that_takes_too_long_fails(server, answers, monkeypatch):
    monkeypatch.setattr("http_load.TIMEOUT_S", 0.2)
    answers.gate = threading.Event()
    samples = run_load(server.url, bodies(2), concurrency=2)
    answers.gate.set()
    assert {sample.failure for sample in samples} == {"no complete answer within 0.2 s"}


def test_no_server():
    (sample,) = run_load("http://127.0.0.1:9", bodies(1), concurrency=1)
    assert sample.failure.startswith("ConnectError")


def test_a_warm_up_that_fails_says_why(server, answers):
    warm_up(server.url, bodies(2))
    answers.fault = "busy"
    with pytest.raises(RequestFailedError, match="before the measurement failed: status 429"):
        warm_up(server.url, bodies(3))


def test_the_first_model(server):
    assert first_model(server.url) == "fake<model>"

"""Where a request's time goes, as the scheduler and the core tell it, and how it comes into the figures."""

import asyncio

import msgspec
from support.app import Api, FakeEngine, counted, figures
from support.driver import fake_request
from support.fakes import FakeWorker
from support.scheduler import make_scheduler

from rayllm.api.types import CompletionOutput, RequestOutput, RequestTimes, TokenDelta
from rayllm.config.options import ServerConfig
from rayllm.serve.http.metrics import FrontMetrics, ModelFigures, RequestTimer, render
from rayllm.serve.http.request_log import RequestRecord
from rayllm.text.outputs import OutputProcessor, accumulate


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def clocked_scheduler(max_num_seqs=1, max_num_batched_tokens=4):
    """A scheduler, its clock, and a function that runs a step at a time: half a second, and the deltas with times."""
    clock = Clock()
    scheduler = make_scheduler(
        num_blocks=32,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        clock=clock,
    )
    worker = FakeWorker(32, 4, max_num_seqs)

    def step(at):
        clock.now = at
        plan = scheduler.schedule()
        clock.now = at + 0.5
        return [d for d in scheduler.update(worker.execute(plan)) if d.times is not None]

    return scheduler, clock, step


def test_queue_and_prefill_time_of_each_request():
    scheduler, clock, step = clocked_scheduler()
    clock.now = 10.0
    scheduler.add(fake_request("a", max_tokens=1, prompt=[1, 2, 3, 4, 5, 6]))
    clock.now = 11.0
    scheduler.add(fake_request("b", max_tokens=2, prompt=[7], ignore_eos=True))
    assert step(12.0) == []  # the first four tokens of a
    (first,) = step(20.0)
    assert (first.request_id, first.times) == ("a", RequestTimes(2.0, 8.5))
    (second,) = step(30.0)
    assert (second.request_id, second.times) == ("b", RequestTimes(19.0, 0.5))
    assert step(40.0) == []
    assert not scheduler.has_work()


def test_times_come_once_however_many_completions():
    scheduler, _, step = clocked_scheduler(max_num_seqs=4, max_num_batched_tokens=16)
    scheduler.add(fake_request("a", max_tokens=3, prompt=[1, 2], n=3))
    told = []
    while scheduler.has_work():
        told += step(1.0)
    assert [(d.request_id, d.index) for d in told] == [("a", 0)]


def test_starts_are_reported_to_who_wants_to_know():
    scheduler, _, step = clocked_scheduler()
    for name, wanted in (("a", True), ("b", False), ("c", True)):
        request = fake_request(name, max_tokens=1, prompt=[1])
        scheduler.add(msgspec.structs.replace(request, report_start=wanted))
    reported = []
    for _ in range(3):
        step(1.0)
        reported.append([delta.request_id for delta in scheduler.new_deltas])
    assert reported == [["a"], [], ["c"]]


def test_a_start_is_an_output_without_tokens():
    processor = OutputProcessor(None)
    processor.add(fake_request("a"))
    (start,), _ = processor.process([TokenDelta("a", 0, [])])
    assert (start.outputs[0].token_ids, start.finished, start.times) == ([], False, None)
    (first,), _ = processor.process([TokenDelta("a", 0, [5], times=RequestTimes(1.0, 2.0))])
    assert first.times == RequestTimes(1.0, 2.0)
    assert accumulate(start, first).times == RequestTimes(1.0, 2.0)


def test_tokens_of_steps():
    scheduler, _, step = clocked_scheduler(max_num_batched_tokens=16)
    scheduler.add(fake_request("a", max_tokens=4, prompt=[1] * 20, ignore_eos=True))
    while scheduler.has_work():
        step(1.0)
    stats = scheduler.stats()
    assert stats.computed_tokens == 23
    assert stats.step_tokens[:4] == [3, 1, 1, 0]  # three decodes, 4 and 16 tokens of the prompt
    assert sum(stats.step_tokens) == stats.num_steps == 5
    text = render([ModelFigures("m", {"0": stats}, FrontMetrics(), peers=[], num_replicas=1)]).decode()
    labels = 'engine="0",model_name="m"'
    assert f"rayllm:iteration_tokens_total_sum{{{labels}}} 23.0" in text
    assert 'rayllm:iteration_tokens_total_bucket{engine="0",le="8.0",model_name="m"} 4.0' in text


def test_engine_times_become_figures():
    metrics = FrontMetrics()
    timer = RequestTimer(metrics, RequestRecord("", "POST", "/v1/completions"), 1)
    part = CompletionOutput(0, "a", [97], finish_reason="stop")
    timer.saw(RequestOutput("r", None, [1], [part], True, times=RequestTimes(0.25, 3.0)))
    timer.close()
    assert figures(metrics, "request_queue_time_seconds_sum") == {None: 0.25}
    assert figures(metrics, "request_prefill_time_seconds_sum") == {None: 3.0}
    assert counted(metrics, "request_success") == {"stop": 1}


def test_a_report_of_a_start_is_no_part_of_an_answer():
    class Reporting(FakeEngine):
        async def generate(self, request, prompt_text=None):
            assert request.report_start
            yield RequestOutput("r", prompt_text, request.prompt_token_ids, [CompletionOutput(0, "", [])], False)
            await asyncio.sleep(0)
            async for output in super().generate(request, prompt_text):
                yield output

    plain, reporting = Api(), Api(ServerConfig(queue_timeout=5))
    reporting.state.fake = Reporting()
    for fields in ({}, {"stream": True}, {"echo": True, "stream": True, "n": 2}):
        expected, answer = (api.completion(**fields) for api in (plain, reporting))
        assert answer.text.count("choices") == expected.text.count("choices")

"""TokenDeltas in, RequestOutputs out: text, stop strings, log-probabilities, the end of requests."""

from __future__ import annotations

import itertools
import struct

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from rayllm.api.sampling_params import SamplingParams
from rayllm.api.types import (
    Abort,
    GenerationRequest,
    IdempotencyKey,
    Logprob,
    RequestOutput,
    RequestTimes,
    TokenDelta,
    TokenLogprobs,
)
from rayllm.errors import InvalidRequestError
from rayllm.text import outputs as text_outputs
from rayllm.text.outputs import DeltaLog, OutputProcessor, RequestState, accumulate
from rayllm.text.tokenizer import Tokenizer

EOS = "<eos>"


def make_tokenizer() -> Tokenizer:
    """One token a byte, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return Tokenizer(backend, {"eos_token": EOS})


TOKENIZER = make_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def make_request(request_id="r", **params) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=ids("prompt"), params=SamplingParams(**{"max_tokens": None} | params)
    )


def processor_for(*requests, tokenizer=TOKENIZER) -> OutputProcessor:
    processor = OutputProcessor(tokenizer)
    for request in requests:
        processor.add(request, "prompt")
    return processor


def delta(text="", index=0, request_id="r", **fields) -> TokenDelta:
    return TokenDelta(request_id, index, ids(text), **fields)


def run(processor, *deltas):
    """One step a delta: (whole outputs by request, all that was to be aborted, the texts as streamed)."""
    totals: dict[str, RequestOutput] = {}
    aborts, texts = [], []
    for item in deltas:
        outputs, new_aborts = processor.process([item])
        aborts += new_aborts
        for output in outputs:
            texts += [completion.text for completion in output.outputs]
            totals[output.request_id] = accumulate(totals.get(output.request_id), output)
    return totals, aborts, texts


def test_a_plain_stream():
    processor = processor_for(make_request())
    outputs, aborts = processor.process([delta("He", num_cached_tokens=4)])
    (output,) = outputs
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "prompt", ids("prompt"))
    assert (output.finished, output.num_cached_tokens, output.prompt_logprobs, aborts) == (False, 4, None, [])
    (completion,) = output.outputs
    assert (completion.index, completion.text, completion.token_ids) == (0, "He", ids("He"))
    assert (completion.logprobs, completion.cumulative_logprob, completion.finish_reason) == (None, None, None)
    outputs, aborts = processor.process([delta("y", finish_reason="length")])
    assert outputs[0].finished
    assert outputs[0].outputs[0].text == "y", "only what is new"
    assert outputs[0].outputs[0].finish_reason == "length"
    assert aborts == [], "the engine knows already"
    assert len(processor) == 0
    assert processor.process([delta("late")]) == ([], [])


def test_half_characters_wait_and_are_flushed():
    snow = ids("\N{SNOWMAN}")
    processor = processor_for(make_request())
    totals, _, texts = run(
        processor,
        TokenDelta("r", 0, snow[:1]),
        TokenDelta("r", 0, snow[1:]),
        TokenDelta("r", 0, snow[:2], finish_reason="length"),
    )
    assert texts == ["", "\N{SNOWMAN}", "\N{REPLACEMENT CHARACTER}"]
    assert totals["r"].outputs[0].token_ids == snow + snow[:2]


@pytest.mark.parametrize("stops", [[], ["never"]])
@pytest.mark.parametrize(
    ("params", "end", "stop_reason", "text"),
    [
        ({}, EOS, None, "ab"),
        ({"skip_special_tokens": False}, EOS, None, "ab"),
        ({"include_stop_str_in_output": True}, EOS, None, "ab"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, EOS, None, "ab" + EOS),
        ({"stop_token_ids": [65]}, "c", 65, "ab"),
        ({"stop_token_ids": [65], "include_stop_str_in_output": True}, "c", 65, "abc"),
    ],
)
def test_the_end_token_is_a_token_but_no_text(params, end, stop_reason, text, stops):
    processor = processor_for(make_request(stop=stops, **params))
    totals, aborts, _ = run(processor, delta("a"), delta("b" + end, finish_reason="stop", stop_reason=stop_reason))
    (completion,) = totals["r"].outputs
    assert completion.text == text
    assert completion.token_ids == ids("ab" + end)
    assert (completion.finish_reason, completion.stop_reason, aborts) == ("stop", stop_reason, [])


def test_special_tokens_in_the_middle():
    for skip, text in ((True, "ab"), (False, f"a{EOS}b")):
        processor = processor_for(make_request(ignore_eos=True, skip_special_tokens=skip))
        totals, _, _ = run(processor, delta(f"a{EOS}b", finish_reason="length"))
        assert totals["r"].outputs[0].text == text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_a_request_and_aborts_it(include):
    processor = processor_for(make_request(stop=["STOP", "x"], include_stop_str_in_output=include))
    totals, aborts, texts = run(processor, *(delta(part) for part in ("a S", "TART ", "bST", "OP tail", "late")))
    assert texts == ["a ", "START ", "b", "STOP" if include else ""]
    (completion,) = totals["r"].outputs
    assert completion.text == "a START b" + "STOP" * include
    assert completion.token_ids == ids("a START bSTOP"), "tokens end with the one that completes the stop"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "STOP")
    assert totals["r"].finished
    assert aborts == [Abort("r", 0)]


def test_a_stop_string_in_the_engines_last_delta_needs_no_abort():
    processor = processor_for(make_request(stop=["b"]))
    totals, aborts, _ = run(processor, delta("abc", finish_reason="length"))
    assert (totals["r"].outputs[0].text, totals["r"].outputs[0].stop_reason, aborts) == ("a", "b", [])


def test_what_was_held_back_comes_out_at_the_end():
    processor = processor_for(make_request(stop=["STOP"]))
    totals, _, texts = run(processor, delta("a ST"), delta("O", finish_reason="length"))
    assert texts == ["a ", "STO"]
    assert totals["r"].outputs[0].finish_reason == "length"


def test_a_stop_string_of_replacement_characters():
    processor = processor_for(make_request(stop=["\N{REPLACEMENT CHARACTER}"]))
    totals, aborts, _ = run(processor, TokenDelta("r", 0, ids("a\N{SNOWMAN}")[:3], finish_reason="length"))
    assert (totals["r"].outputs[0].text, totals["r"].outputs[0].finish_reason, aborts) == ("a", "stop", [])


def test_min_tokens_come_before_any_stop_string():
    processor = processor_for(make_request(stop=["b", "cd"], min_tokens=3))
    totals, _, texts = run(processor, *(delta(char) for char in "abcdxcde"))
    assert totals["r"].outputs[0].text == "abcdx", "a stop string lies wholly behind the first three tokens"
    assert texts[:3] == ["a", "b", "c"]


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="abcß", max_size=20),
    st.lists(st.text(alphabet="abcß", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 60), max_size=6),
    st.integers(0, 5),
)
def test_cut_into_any_deltas_the_text_is_the_same(text, stops, cuts, min_tokens):
    tokens = ids(text)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    params = {"stop": stops, "min_tokens": min_tokens}
    whole, _, _ = run(processor_for(make_request(**params)), TokenDelta("r", 0, tokens, finish_reason="length"))
    parts = [TokenDelta("r", 0, tokens[a:b]) for a, b in itertools.pairwise(bounds)]
    cut, _, _ = run(processor_for(make_request(**params)), *parts, TokenDelta("r", 0, [], finish_reason="length"))
    ours, theirs = cut["r"].outputs[0], whole["r"].outputs[0]
    assert (ours.text, ours.token_ids, ours.finish_reason, ours.stop_reason) == (
        theirs.text,
        theirs.token_ids,
        theirs.finish_reason,
        theirs.stop_reason,
    )


def test_completions_stop_one_by_one():
    processor = processor_for(make_request(n=3, stop=["!"]))
    outputs, aborts = processor.process([delta("a", 1), delta("b!", 0), delta("c", 2)])
    assert [(o.index, o.text, o.finish_reason) for o in outputs[0].outputs] == [
        (0, "b", "stop"),
        (1, "a", None),
        (2, "c", None),
    ]
    assert (outputs[0].finished, aborts) == (False, [Abort("r", 0)])
    assert processor.process([delta("more", 0)]) == ([], []), "over for the user: dropped"
    totals, aborts, _ = run(processor, delta("d", 1, finish_reason="length"), delta("!", 2))
    assert totals["r"].finished
    assert aborts == [Abort("r", 2)], "the last"


def test_no_abort_when_the_engine_ends_the_last_completion():
    processor = processor_for(make_request(n=2, stop=["!"]))
    ends = delta("x", 0, finish_reason="length"), delta("y", 1, finish_reason="stop")
    _, aborts, _ = run(processor, delta("!", 0), *ends)
    assert aborts == [Abort("r", 0)]


def test_several_deltas_of_a_completion_in_one_call_are_one_output():
    processor = processor_for(make_request(), make_request("q"))
    outputs, _ = processor.process([delta("a"), delta("x", request_id="q"), delta("b", finish_reason="length")])
    assert [(o.request_id, o.outputs[0].text, o.finished) for o in outputs] == [("r", "ab", True), ("q", "x", False)]


def entry(text: str, logprob: float, rank: int, **top: float) -> TokenLogprobs:
    return TokenLogprobs(ids(text)[0], logprob, rank, [ids(t)[0] for t in top], list(top.values()))


def test_logprobs():
    processor = processor_for(make_request(logprobs=2))
    first, second = entry("c", -3.0, 7, a=-0.5, b=-1.0), entry("a", -0.25, 1, a=-0.25, b=-2.0)
    outputs, _ = processor.process([delta("c", logprobs=[first])])
    (completion,) = outputs[0].outputs
    a, b, c = ids("abc")
    assert completion.logprobs == [{c: Logprob(-3.0, 7, "c"), a: Logprob(-0.5, 1, "a"), b: Logprob(-1.0, 2, "b")}]
    assert completion.cumulative_logprob == -3.0
    outputs, _ = processor.process([delta("a", logprobs=[second])])
    (completion,) = outputs[0].outputs
    assert completion.logprobs == [{a: Logprob(-0.25, 1, "a"), b: Logprob(-2.0, 2, "b")}]
    assert completion.cumulative_logprob == -3.25, "the total so far"


def test_logprobs_0_is_the_token_itself_and_tokens_after_a_stop_have_none():
    processor = processor_for(make_request(logprobs=0, stop=["b"]))
    entries = [entry("a", -1.0, 1), entry("b", -2.0, 3), entry("c", -4.0, 9)]
    outputs, _ = processor.process([delta("abc", logprobs=entries)])
    (completion,) = outputs[0].outputs
    assert [list(d.values()) for d in completion.logprobs] == [[Logprob(-1.0, 1, "a")], [Logprob(-2.0, 3, "b")]]
    assert completion.cumulative_logprob == -3.0


def test_the_best_samples_come_when_all_have_ended_and_end_where_a_stop_string_does():
    processor = processor_for(make_request(n=2, best_of=3, stop=["!"]))
    first, _ = processor.process([delta("a", logprobs=[entry("a", -1.0, 1)], times=RequestTimes(0.0, 1.0))])
    assert [(o.outputs, o.times, o.finished) for o in first] == [([], RequestTimes(0.0, 1.0), False)]
    assert processor.process([delta("b", 1, logprobs=[entry("b", -3.0, 1)])]) == ([], [])
    assert processor.process([delta("!", 1, logprobs=[entry("!", -1.0, 1)])]) == ([], [Abort("r", 1)])
    late = [delta("c", 1, logprobs=[entry("c", -9.0, 1)]), delta("a", 2, logprobs=[entry("a", -8.0, 1)])]
    assert processor.process(late) == ([], [])
    outputs, aborts = processor.process(
        [
            delta("x", 0, logprobs=[entry("x", -9.0, 2)], finish_reason="length"),
            delta("yz", 2, logprobs=[entry("y", 0.0, 1), entry("z", -0.5, 1)], finish_reason="stop"),
        ]
    )
    (last,) = outputs
    assert aborts == [], "what went on behind the stop string was ended"
    assert [(o.index, o.text, o.cumulative_logprob, o.finish_reason) for o in last.outputs] == [
        (0, "b", -4.0, "stop"),
        (1, "ay", -8.5, "stop"),
    ]
    assert (last.finished, last.num_discarded_tokens) == (True, 2)
    assert all(o.logprobs is None for o in last.outputs)


def test_a_failed_request_has_as_many_errors_as_completions_were_asked_for():
    processor = processor_for(make_request(n=2, best_of=4))
    failed = [delta("", i, finish_reason="error", stop_reason="lost") for i in range(4)]
    outputs, _ = processor.process(failed)
    assert [(o.index, o.finish_reason, o.stop_reason) for o in outputs[0].outputs] == [
        (0, "error", "lost"),
        (1, "error", "lost"),
    ]


def test_beams_come_whole_with_the_sum_of_their_log_probabilities():
    processor = processor_for(make_request(n=2, use_beam_search=True, best_of=3))
    outputs, _ = processor.process([delta("", 0, times=RequestTimes(0.0, 1.0), num_cached_tokens=4)])
    assert (outputs[0].times, outputs[0].num_cached_tokens) == (RequestTimes(0.0, 1.0), 4)
    outputs, aborts = processor.process(
        [delta(t, i, finish_reason="length", cumulative_logprob=-1.5 - i) for i, t in enumerate(("abc", "de"))]
    )
    assert [(o.text, o.cumulative_logprob) for o in outputs[0].outputs] == [("abc", -1.5), ("de", -2.5)]
    assert (outputs[0].finished, aborts, len(processor)) == (True, [], 0)


def test_prompt_logprobs():
    processor = processor_for(make_request(prompt_logprobs=1))
    outputs, _ = processor.process([delta("x", prompt_logprobs=[None, entry("r", -9.0, 20, z=-0.5)])])
    r, z = ids("rz")
    expected = [None, {r: Logprob(-9.0, 20, "r"), z: Logprob(-0.5, 1, "z")}]
    assert outputs[0].prompt_logprobs == expected
    later, _ = processor.process([delta("y")])
    assert later[0].prompt_logprobs is None
    assert accumulate(outputs[0], later[0]).prompt_logprobs == expected
    assert outputs[0].outputs[0].logprobs is None


def test_without_a_tokenizer():
    processor = OutputProcessor(None)
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init") as caught:
        processor.add(make_request(stop=["x"]))
    assert caught.value.param == "stop"
    processor.add(make_request(logprobs=1))
    entries = [entry("a", -1.0, 1, a=-1.0)] * 2
    totals, aborts, _ = run(processor, delta("ab", logprobs=entries, finish_reason="stop", stop_reason=66))
    (completion,) = totals["r"].outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", ids("ab"), "stop")
    assert completion.logprobs[0] == {ids("a")[0]: Logprob(-1.0, 1, None)}
    assert aborts == []
    assert totals["r"].finished


def test_error_deltas_end_their_completion():
    processor = processor_for(make_request(n=2))
    errors = [delta(index=i, finish_reason="error", stop_reason="worker lost") for i in range(2)]
    totals, aborts, _ = run(processor, *errors)
    assert [(o.finish_reason, o.stop_reason) for o in totals["r"].outputs] == [("error", "worker lost")] * 2
    assert totals["r"].finished
    assert aborts == []


def test_refused_requests():
    processor = processor_for(make_request())
    with pytest.raises(InvalidRequestError, match="'r' is in use"):
        processor.add(make_request())
    assert len(processor) == 1
    assert processor.remove("r")
    assert not processor.remove("r")
    processor.add(make_request())
    assert len(processor) == 1


def test_a_request_whose_output_cannot_be_made_fails_alone():
    processor = processor_for(make_request(n=2, logprobs=1), make_request("canary"))
    poison = TokenLogprobs(0, 0.0, 1, [1, 2], [0.0])  # lists of unequal lengths
    outputs, aborts = processor.process([delta("a", logprobs=[poison]), delta("b", request_id="canary")])
    assert aborts == [Abort("r", 0), Abort("r", 1)]
    assert [(o.index, o.finish_reason) for o in outputs[0].outputs] == [(0, "error"), (1, "error")]
    assert outputs[0].finished
    assert "internal error" in outputs[0].outputs[0].stop_reason
    assert outputs[1].outputs[0].text == "b"


def test_accumulate_takes_copies_and_merges():
    processor = processor_for(make_request(n=2, logprobs=0))
    parts = []
    for item in (
        delta("a", 1, logprobs=[entry("a", -1.0, 1)]),
        delta("b", 0, logprobs=[entry("b", -2.0, 1)], num_cached_tokens=3),
        delta("c", 1, logprobs=[entry("c", -4.0, 1)], finish_reason="length"),
        delta(EOS, 0, logprobs=[entry(EOS, -8.0, 1)], finish_reason="stop"),
    ):
        parts += processor.process([item])[0]
    total = None
    for part in parts:
        total = accumulate(total, part)
    assert [(o.index, o.text, o.token_ids, o.cumulative_logprob, o.finish_reason) for o in total.outputs] == [
        (0, "b", ids("b" + EOS), -10.0, "stop"),
        (1, "ac", ids("ac"), -5.0, "length"),
    ]
    assert [len(o.logprobs) for o in total.outputs] == [2, 2]
    assert (total.finished, total.num_cached_tokens) == (True, 3)
    assert [(o.text, len(o.token_ids), len(o.logprobs)) for part in parts for o in part.outputs] == [
        ("a", 1, 1),
        ("b", 1, 1),
        ("c", 1, 1),
        ("", 1, 1),
    ], "the parts are left alone"


def test_the_deltas_are_left_alone():
    item = delta("a")
    processor = processor_for(make_request())
    first, _ = processor.process([item])
    second, _ = processor.process([delta("b")])
    accumulate(first[0], second[0])
    assert item.token_ids == ids("a")


def test_an_embedding_has_values_and_no_text():
    request = GenerationRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(), pooling="mean")
    processor = processor_for(request)
    values = [0.5, -0.25, 3.0e38]
    packed = struct.pack("=3f", *values)
    (output,), aborts = processor.process([delta(embedding=packed, finish_reason="stop", num_cached_tokens=2)])
    assert output.embedding.tolist() == pytest.approx(values)
    assert (output.outputs[0].text, output.finished, output.num_cached_tokens, aborts) == ("", True, 2, [])
    assert accumulate(accumulate(None, output), output).embedding == output.embedding


# ---- requests with an idempotency key


def keyed_state(**params) -> RequestState:
    key = IdempotencyKey("k", b"body", 1800)
    return RequestState(TOKENIZER, msgspec.structs.replace(make_request(**params), key=key), None)


def test_a_log_has_all_deltas_with_tokens_joined():
    log, times = DeltaLog(), RequestTimes(0.1, 0.2)
    one, two = entry("b", -1.0, 1), entry("c", -2.0, 1)
    deltas = [
        delta("", created=1700),
        delta("a", times=times),
        delta("A", 1),
        delta("b"),
        delta("c", num_preemptions=1),
        delta("B", 1, finish_reason="stop"),
        delta("d"),
        delta("e", finish_reason="length"),
        delta("f", 2, logprobs=[one]),
        delta("g", 2, logprobs=[two]),
    ]
    for each in deltas:
        log.add(each)
    copy = log.copy("x")
    assert copy == [
        delta("", request_id="x", created=1700),
        delta("ab", request_id="x", times=times),
        delta("A", 1, request_id="x"),
        delta("cd", request_id="x", num_preemptions=1),
        delta("B", 1, request_id="x", finish_reason="stop"),
        delta("e", request_id="x", finish_reason="length"),
        delta("fg", 2, request_id="x", logprobs=[one, two]),
    ]
    assert [len(each.token_ids) for each in deltas[1:]] == [1] * 9, "those that were delivered are as they were"
    log.add(delta("h", 2, logprobs=[one]))
    assert copy[-1].token_ids == ids("fg")


def test_a_request_that_moves_takes_along_what_came_and_takes_each_token_once():
    state, totals = keyed_state(n=2, logprobs=0), None
    a, b, c = (entry(char, -1.0, 1) for char in "abc")
    begun = [
        delta("", created=1700),
        delta("a", logprobs=[a]),
        delta("a", 1, logprobs=[a], finish_reason="length"),
        delta("b", logprobs=[b]),
    ]
    for each in begun:
        if (output := state.advance(each)) is not None:
            totals = accumulate(totals, output)
    state.lose_engine()
    sent = state.to_send()
    assert (sent.emitted, sent.num_deaths) == ({0: ids("ab")}, 1)
    log = DeltaLog()
    for each in begun:
        log.add(each)
    assert sent.key.deltas == log.copy("r")
    # Another front was faster, so the engine has the request already, and less of it: it tells all from the beginning.
    told = [*begun[:3], delta("bc", logprobs=[b, c]), delta("a", finish_reason="length", logprobs=[a])]
    for each in told:
        if (output := state.advance(each)) is not None:
            totals = accumulate(totals, output)
    assert [(each.text, each.token_ids, len(each.logprobs)) for each in totals.outputs] == [
        ("abca", ids("abca"), 4),
        ("a", ids("a"), 1),
    ]
    assert (totals.created, totals.finished) == (1700, True)


@pytest.mark.parametrize("why", ["the log is too long", "the next engine told less than was known"])
def test_a_request_whose_beginning_is_not_known_is_not_kept_by_the_next_engine(why, monkeypatch):
    monkeypatch.setattr(text_outputs, "MAX_LOG_BYTES", 600 if why == "the log is too long" else 10**6)
    state = keyed_state()
    for each in (delta("", created=1700), delta("abc")):
        state.advance(each)
    assert state.to_send().key is not None
    if why == "the log is too long":
        state.advance(delta("d" * 10))
    else:
        state.advance(delta("", created=1700))
        state.advance(delta("a"))
    expected = list(state.running[0].token_ids)
    state.lose_engine()
    sent = state.to_send()
    assert (sent.key, sent.emitted) == (None, {0: expected})
    state.advance(delta("z"))
    assert state.running[0].token_ids == expected + ids("z"), "the next engine goes on"
    assert state.to_send().key is None


def test_a_request_that_moves_before_its_first_token_begins_again():
    """What came says only that it was scheduled. What first deltas tell, the next engine would not tell otherwise."""
    state = keyed_state(logprobs=0)
    for each in (delta("", created=1700), delta("", times=RequestTimes(1.0, 2.0))):
        state.advance(each)
    state.lose_engine()
    assert state.to_send().emitted is None
    state.advance(delta("a", logprobs=[entry("a", -1.0, 1)]))
    state.lose_engine()
    assert state.to_send().emitted == {0: ids("a")}

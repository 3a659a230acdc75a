"""What kill_matrix.py judges answers by."""

import pytest
from every_kind import Answer, Request, Result, difference

EVENTS = [
    {"choices": [{"index": 0, "text": "The for"}]},
    {"choices": [{"index": 1, "text": "While"}]},
    {"choices": [{"index": 0, "text": " statement", "finish_reason": "length"}]},
    {"choices": [{"index": 1, "text": " it", "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}},
]
REQUEST = Request("n = 2", "/v1/completions", {"prompt": "a", "n": 2, "stream": True})


def answer(*events):
    total = Answer()
    for event in events:
        total.add(event)
    return total


def test_an_answer_is_the_same_however_it_comes():
    whole = {
        "choices": [
            {"index": 0, "text": "The for statement", "finish_reason": "length"},
            {"index": 1, "text": "While it", "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
    }
    assert answer(whole) == answer(*EVENTS)
    assert difference(REQUEST, Result(answer(whole)), answer(*EVENTS)) is None


@pytest.mark.parametrize(
    "events",
    [
        EVENTS[1:],  # lost
        [EVENTS[0], *EVENTS],  # repeated
        [*EVENTS[:2], {"choices": [{"index": 0, "text": " assert", "finish_reason": "length"}]}, *EVENTS[3:]],
        [*EVENTS[:3], {"choices": [{"index": 1, "text": " it", "finish_reason": "length"}]}, EVENTS[4]],
        [*EVENTS[:4], {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6}}],
        EVENTS[:4],
    ],
)
def test_every_difference_is_seen(events):
    assert difference(REQUEST, Result(answer(*events)), answer(*EVENTS)) is not None


def test_what_goes_on_after_its_end_is_wrong():
    with pytest.raises(ValueError, match="choice 0 goes on after its end"):
        answer(*EVENTS[:3], {"choices": [{"index": 0, "text": " more"}]})


def test_what_came_before_a_break_has_to_be_a_beginning():
    whole = answer(*EVENTS)
    assert difference(REQUEST, Result(whole, breaks=[answer(*EVENTS[:2])]), whole) is None
    contradicted = answer({"choices": [{"index": 0, "text": "The fork"}]})
    assert "contradicted" in difference(REQUEST, Result(whole, breaks=[contradicted]), whole)
    assert "contradicted" in difference(REQUEST, Result(breaks=[contradicted]), whole, is_answered=False)


def test_tool_calls_and_log_probabilities_come_together():
    def delta(**fields):
        return {"choices": [{"index": 0, "delta": fields.pop("delta"), **fields}]}

    def call(**function):
        return {"tool_calls": [{"index": 0, "function": function}]}

    streamed = answer(
        delta(delta={"role": "assistant", "content": ""}),
        delta(delta=call(name="travel", arguments=""), logprobs={"content": [{"token": "a", "logprob": -1.0}]}),
        delta(delta=call(arguments='{"a"')),
        delta(delta=call(arguments=": 1}"), logprobs={"content": [{"token": "b", "logprob": -2.0}]}),
        delta(delta={}, finish_reason="tool_calls"),
    )
    message = {"content": None, "tool_calls": [{"function": {"name": "travel", "arguments": '{"a": 1}'}}]}
    tokens = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    choice = {"index": 0, "message": message, "logprobs": {"content": tokens}, "finish_reason": "tool_calls"}
    assert answer({"choices": [choice]}) == streamed

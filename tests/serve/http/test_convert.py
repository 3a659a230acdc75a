"""Bodies to engine requests, and engine outputs to JSON and SSE frames."""

import asyncio
import json
import math

import pytest

from rayllm.api.types import CompletionOutput, EngineInfo, Logprob, RequestOutput
from rayllm.errors import InvalidRequestError
from rayllm.serve.http.convert import ContextLengthError, chat_job, completion_job
from rayllm.serve.http.errors import ApiError
from rayllm.serve.http.protocol import ChatBody, CompletionBody, parse_body
from rayllm.serve.http.replies import ChatReply, CompletionReply

INFO = EngineInfo(model="m", max_model_len=40, vocab_size=128, num_kv_tokens=400, eos_token_ids=[0])


class CharTokenizer:
    """A token is a character; id 1 begins a sequence."""

    special_ids = frozenset({1})
    special_texts = frozenset({"<s>"})

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(c) for c in text]

    def decode(self, token_ids):
        return "".join(chr(t) for t in token_ids if t > 1)

    def token_text(self, token_id):
        return "<s>" if token_id == 1 else chr(token_id)

    def token_bytes(self, token_id):
        return self.token_text(token_id).encode()

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages) + "a:" * add_generation_prompt


def completion(tokenizer=True, **fields):
    """(body, job) of a completion."""
    body = parse_body(CompletionBody, json.dumps({"prompt": "hi"} | fields).encode())
    return body, asyncio.run(completion_job(body, "cmpl-1", INFO, CharTokenizer() if tokenizer else None))


def chat(tokenizer=True, **fields):
    body = parse_body(ChatBody, json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode())
    return body, asyncio.run(chat_job(body, "chatcmpl-1", INFO, CharTokenizer() if tokenizer else None))


def completion_reply(**fields):
    body, job = completion(**fields)
    return CompletionReply(body, job, "cmpl-1", "m", CharTokenizer())


def chat_reply(**fields):
    body, job = chat(**fields)
    return ChatReply(body, job, "chatcmpl-1", "m", CharTokenizer())


def logprobs(text):
    """Each character at -0.5, the one after it at -1, '!' impossible."""
    return [{ord(c): Logprob(-0.5, 1), ord(c) + 1: Logprob(-1.0, 2), 33: Logprob(-math.inf, 3)} for c in text]


def output(text, index=0, finish=None, with_logprobs=False, ids=None, stop_reason=None, **fields):
    ids = [ord(c) for c in text] if ids is None else ids
    entries = logprobs("".join(map(chr, ids))) if with_logprobs else None
    part = CompletionOutput(index, text, ids, logprobs=entries, finish_reason=finish, stop_reason=stop_reason)
    return RequestOutput("r", None, [], [part], finish is not None, **fields)


def events(data):
    """SSE bytes -> list of payloads; checks the framing."""
    assert data.endswith(b"\n\n")
    frames = data.decode().split("\n\n")[:-1]
    assert all(f.startswith("data: ") for f in frames)
    return [json.loads(f[6:]) if f != "data: [DONE]" else "DONE" for f in frames]


# Requests


def test_completion_defaults():
    _, job = completion()
    (request,) = job.requests
    assert request.request_id == "cmpl-1-0"
    assert request.prompt_token_ids == [1, 104, 105]
    assert (request.params.max_tokens, request.params.temperature, request.params.n) == (16, 1.0, 1)
    assert request.params.logprobs is None


def test_completion_default_tokens_fit_into_the_context():
    _, job = completion(prompt=[5] * 30)
    assert job.requests[0].params.max_tokens == 10


def test_every_sampling_field_arrives():
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 9,
        "max_tokens": 5,
        "prompt_logprobs": 2,
    }
    _, job = completion(**fields, logprobs=3, logit_bias={"5": -1}, cache_salt="s", priority=4)
    request = job.requests[0]
    for name, value in fields.items():
        assert getattr(request.params, name) == value
    assert (request.params.logprobs, request.params.logit_bias) == (3, {5: -1})
    assert (request.cache_salt, request.priority) == ("s", 4)


def test_chat_takes_the_rest_of_the_context_and_the_template():
    _, job = chat()
    assert job.prompts == ["u:hi;a:"]
    assert job.requests[0].prompt_token_ids == [ord(c) for c in "u:hi;a:"]  # the template adds special tokens itself
    assert job.requests[0].params.max_tokens is None
    assert chat(add_special_tokens=True)[1].requests[0].prompt_token_ids[0] == 1
    assert chat(max_completion_tokens=3)[1].requests[0].params.max_tokens == 3
    assert chat(logprobs=True)[1].requests[0].params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4)[1].requests[0].params.logprobs == 4
    assert chat(logprobs=False)[1].requests[0].params.logprobs is None


def test_echo_asks_for_prompt_logprobs():
    _, job = completion(prompt=[[104, 105]], echo=True, logprobs=1, max_tokens=0)
    assert job.prompts == ["hi"]
    assert job.discard_output
    assert (job.requests[0].params.prompt_logprobs, job.requests[0].params.max_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("make", "fields", "param", "text"),
    [
        (completion, {"prompt": [5] * 30, "max_tokens": 11}, "prompt", "30 tokens and max_tokens asks for 11 more"),
        (completion, {"prompt": [5] * 41}, "prompt", "context is 40"),
        (completion, {"prompt": [5] * 40}, "prompt", "context is 40"),
        (chat, {"max_tokens": 40}, "messages", "context is 40"),
        (chat, {"messages": [{"role": "user", "content": "x" * 99}]}, "messages", "context is 40"),
    ],
)
def test_more_than_the_context_names_the_limit(make, fields, param, text):
    with pytest.raises(ContextLengthError) as caught:
        make(**fields)
    assert caught.value.param == param
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("make", "fields", "param"),
    [
        (completion, {"prompt": "", "add_special_tokens": False}, "prompt"),
        (completion, {"prompt": [128]}, "prompt"),
        (completion, {"prompt": [-1]}, "prompt"),
        (completion, {"prompt": [10**30]}, "prompt"),
        (completion, {"max_tokens": 0}, "max_tokens"),
        (chat, {"max_tokens": 0}, "max_tokens"),
        (chat, {"max_tokens": -1}, "max_tokens"),
        (completion, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (completion, {"temperature": 0, "n": 2}, "n"),
        (completion, {"temperature": -1}, "temperature"),
        (completion, {"top_p": 0}, "top_p"),
        (completion, {"stop": [""]}, "stop"),
        (completion, {"stop": 3}, "stop"),
        (completion, {"stop": ["x"] * 65}, "stop"),
        (completion, {"stop_token_ids": [200]}, "stop_token_ids"),
        (completion, {"logit_bias": {"200": 1}}, "logit_bias"),
        (completion, {"logit_bias": {"x": 1}}, "logit_bias"),
        (completion, {"seed": 2**63}, "seed"),
        (completion, {"tokenizer": False}, "prompt"),
    ],
)
def test_requests_that_cannot_be_served(make, fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        make(**fields)
    assert caught.value.param == param


def test_without_a_tokenizer_only_ids_work():
    assert completion(tokenizer=False, prompt=[5, 6], echo=True)[1].requests[0].prompt_token_ids == [5, 6]
    with pytest.raises(InvalidRequestError, match="without a tokenizer"):
        chat(tokenizer=False)


# Whole answers


def test_completion_answer():
    reply = completion_reply(n=2, prompt=["a", "b"])
    reply.collect(1, output("x", index=1, num_cached_tokens=2))
    reply.collect(0, output("pq", index=0, finish="stop"))
    reply.collect(1, output("y", index=1, finish="length", num_cached_tokens=2))
    reply.collect(0, output("r", index=1, finish="stop"))
    reply.collect(1, output("z", index=0, finish="stop"))
    answer = reply.whole()
    assert (answer["object"], answer["id"], answer["model"]) == ("text_completion", "cmpl-1", "m")
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "pq", "stop"),
        (1, "r", "stop"),
        (2, "z", "stop"),
        (3, "xy", "length"),
    ]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_completion_logprobs_are_parallel_arrays():
    reply = completion_reply(logprobs=1)
    reply.collect(0, output("a", with_logprobs=True))
    reply.collect(0, output("!", with_logprobs=True, finish="stop"))
    logprob = reply.whole()["choices"][0]["logprobs"]
    assert logprob["tokens"] == ["a", "!"]
    assert logprob["text_offset"] == [0, 1]
    assert logprob["token_logprobs"] == [-0.5, -9999.0]  # '!' overwrites itself with -inf in the fake
    assert logprob["top_logprobs"][0] == {"a": -0.5}
    assert logprob["top_logprobs"][1]["!"] == -9999.0  # the sampled token is there, likely or not


def test_echo_with_logprobs():
    reply = completion_reply(prompt="hi", echo=True, logprobs=1, max_tokens=2)
    prompt_entries = [None, *logprobs("hi")]
    reply.collect(0, output("x", with_logprobs=True, prompt_logprobs=prompt_entries))
    reply.collect(0, output("y", with_logprobs=True, finish="length"))
    choice = reply.whole()["choices"][0]
    assert choice["text"] == "hixy"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i", "x", "y"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]  # the text has no <s>


def test_echo_without_new_tokens():
    reply = completion_reply(prompt=[[104, 105]], echo=True, logprobs=1, max_tokens=0)
    reply.collect(0, output("x", with_logprobs=True, finish="length", prompt_logprobs=[None, *logprobs("i")]))
    answer = reply.whole()
    assert answer["choices"][0]["text"] == "hi"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["h", "i"]
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_extension():
    entries = [None, *logprobs("hi")]
    expected = {"decoded_token": "h", "logprob": -0.5, "rank": 1}
    reply = completion_reply(prompt_logprobs=1)
    reply.collect(0, output("x", finish="stop", prompt_logprobs=entries))
    assert reply.whole()["choices"][0]["prompt_logprobs"][1]["104"] == expected
    reply = chat_reply(prompt_logprobs=1)
    reply.collect(0, output("x", finish="stop", prompt_logprobs=entries))
    assert reply.whole()["prompt_logprobs"][:2] == [None, {**reply.whole()["prompt_logprobs"][1], "104": expected}]


def test_chat_answer_with_logprobs():
    reply = chat_reply(logprobs=True, top_logprobs=2)
    reply.collect(0, output("a", with_logprobs=True, finish="stop"))
    answer = reply.whole()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "a"}
    assert choice["logprobs"]["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -1.0, "bytes": [98]},
            ],
        }
    ]


def test_choices_are_the_n_best_and_usage_counts_all():
    body, job = completion(prompt=["a", "b"], n=2, best_of=3)
    params = job.requests[0].params
    assert (params.n, params.best_of, params.logprobs) == (2, 3, None)
    reply = CompletionReply(body, job, "cmpl-1", "m", CharTokenizer())
    for prompt in range(2):
        both = [CompletionOutput(i, "xyz"[i:], [120, 121], -1.0 - i, finish_reason="stop") for i in range(2)]
        reply.collect(prompt, RequestOutput("r", None, [1], both, True, num_discarded_tokens=7))
    answer = reply.whole()
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, "xyz", None),
        (1, "yz", None),
        (2, "xyz", None),
        (3, "yz", None),
    ]
    assert answer["usage"]["completion_tokens"] == 2 * (2 + 2 + 7)


@pytest.mark.parametrize("make", [completion, chat])
def test_beams_reach_the_engine(make):
    _body, job = make(use_beam_search=True, best_of=4, n=3, length_penalty=0.5, early_stopping="never")
    params = job.requests[0].params
    assert (params.use_beam_search, params.width, params.n) == (True, 4, 3)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")


def test_what_beams_cannot_have_is_refused_by_its_own_name():
    for fields, name in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 0.7}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"best_of": 1}, "best_of"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            completion(**{"use_beam_search": True, "best_of": 2} | fields)
        assert caught.value.param == name
        assert name in str(caught.value)


class PieceTokenizer(CharTokenizer):
    """Token 1 begins a sequence, 2 and 3 are the two bytes of "é", 4 is a word with the space before it."""

    pieces = {1: b"<s>", 2: b"\xc3", 3: b"\xa9", 4: b" word", 5: b"!"}

    def decode(self, token_ids):
        raw = b"".join(self.pieces[t] for t in token_ids if t > 1)
        return raw.decode(errors="replace").removeprefix(" ")  # as tokenizers do that mark words by the space before

    def token_text(self, token_id):
        return self.pieces[token_id].decode(errors="replace")

    def token_bytes(self, token_id):
        return self.pieces[token_id]


def test_text_offsets_are_places_in_the_text():
    body, job = completion(prompt=[[1, 4, 4, 2, 3]], echo=True, logprobs=0, max_tokens=4)
    job = job.__class__(job.requests, [PieceTokenizer().decode([1, 4, 4, 2, 3])])
    reply = CompletionReply(body, job, "cmpl-1", "m", PieceTokenizer())
    ids = [2, 3, 4, 5]
    entries = [{i: Logprob(-0.5, 1)} for i in ids]
    part = CompletionOutput(0, "é word!", ids, logprobs=entries, finish_reason="stop")
    prompt_entries = [None] + [{i: Logprob(-0.5, 1)} for i in (4, 4, 2, 3)]
    reply.collect(0, RequestOutput("r", None, [], [part], True, prompt_entries))
    choice = reply.whole()["choices"][0]
    assert choice["text"] == "word wordéé word!"
    assert choice["logprobs"]["text_offset"] == [0, 0, 4, 9, 9, 10, 10, 11, 16]
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * 8


def test_echo_of_several_prompts_without_new_tokens_streams():
    reply = completion_reply(prompt=["ab", "c"], n=2, echo=True, max_tokens=0, stream=True)
    data = b"".join(
        reply.frames(prompt, output("x", index=index, finish="length")) for prompt in (1, 0) for index in (1, 0)
    )
    choices = [chunk["choices"][0] for chunk in events(data)]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [
        (3, "c", "length"),
        (2, "c", "length"),
        (1, "ab", "length"),
        (0, "ab", "length"),
    ]


# Streams


def test_chat_stream():
    reply = chat_reply(stream=True, stream_options={"include_usage": True})
    data = reply.frames(0, output("a")) + reply.frames(0, output("")) + reply.frames(0, output("b", finish="stop"))
    *chunks, usage, done = events(data + reply.last_frames())
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert done == "DONE"


def test_chat_stream_of_nothing_still_has_role_and_finish():
    reply = chat_reply(stream=True)
    chunks = events(reply.frames(0, output("", ids=[0], finish="stop")))
    assert [c["choices"][0]["delta"] for c in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert "usage" not in chunks[0]
    assert reply.last_frames() == b"data: [DONE]\n\n"


def test_chat_stream_with_logprobs_of_held_back_text():
    reply = chat_reply(stream=True, logprobs=True)
    held = events(reply.frames(0, output("", ids=[97], with_logprobs=True)))
    assert held[1]["choices"][0]["delta"] == {"content": ""}
    assert [t["token"] for t in held[1]["choices"][0]["logprobs"]["content"]] == ["a"]


def test_completion_stream_of_several_choices():
    reply = completion_reply(stream=True, n=2, prompt=["a", "b"], echo=True, logprobs=0)
    data = reply.frames(1, output("x", index=1, with_logprobs=True, prompt_logprobs=[None, *logprobs("b")]))
    data += reply.frames(1, output("y", index=1, with_logprobs=True, finish="stop"))
    first, last = (e["choices"][0] for e in events(data))
    assert (first["index"], first["text"], first["finish_reason"]) == (3, "bx", None)
    assert first["logprobs"]["tokens"] == ["<s>", "b", "x"]
    assert (last["index"], last["text"], last["finish_reason"]) == (3, "y", "stop")
    assert last["logprobs"]["text_offset"] == [2]
    assert last["logprobs"]["top_logprobs"] == [{"y": -0.5}]


def test_completion_stream_skips_held_back_text_and_counts_it():
    reply = completion_reply(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert reply.frames(0, output("", ids=[97])) == b""
    (chunk,) = events(reply.frames(0, output("ab", ids=[98], finish="stop")))
    assert chunk["usage"]["completion_tokens"] == 2
    assert events(reply.last_frames())[0]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("make", [completion_reply, chat_reply])
def test_an_engine_error_is_an_error_and_not_a_finish_reason(make):
    reply = make(stream=True)
    with pytest.raises(ApiError, match="out of luck") as caught:
        reply.frames(0, output("x", finish="error", stop_reason="out of luck"))
    assert caught.value.status == 500

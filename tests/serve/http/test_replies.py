"""Engine outputs to JSON and SSE frames."""

import json
import math

from support.jobs import CharTokenizer, chat_reply, completion, completion_reply

from rayllm.api.types import CompletionOutput, Logprob, RequestOutput
from rayllm.serve.http.replies import CompletionReply
from rayllm.text.outputs import accumulate


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


def whole(reply, *outputs):
    """The whole answer to outputs, each of them (prompt index, output), in any order."""
    totals = {}
    for prompt_index, each in outputs:
        totals[prompt_index] = accumulate(totals.get(prompt_index), each)
    return reply.whole([totals[prompt_index] for prompt_index in sorted(totals)])


# ---- whole answers


def test_completion_answer():
    reply = completion_reply(n=2, prompt=["a", "b"])
    answer = whole(
        reply,
        (1, output("x", index=1, num_cached_tokens=2)),
        (0, output("pq", index=0, finish="stop")),
        (1, output("y", index=1, finish="length", num_cached_tokens=2)),
        (0, output("r", index=1, finish="stop")),
        (1, output("z", index=0, finish="stop")),
    )
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
    logprob = whole(reply, (0, output("a", with_logprobs=True)), (0, output("!", with_logprobs=True, finish="stop")))[
        "choices"
    ][0]["logprobs"]
    assert logprob["tokens"] == ["a", "!"]
    assert logprob["text_offset"] == [0, 1]
    assert logprob["token_logprobs"] == [-0.5, -9999.0]  # '!' overwrites itself with -inf in the fake
    assert logprob["top_logprobs"][0] == {"a": -0.5}
    assert logprob["top_logprobs"][1]["!"] == -9999.0  # the sampled token is there, likely or not


def test_echo_with_logprobs():
    reply = completion_reply(prompt="hi", echo=True, logprobs=1, max_tokens=2)
    prompt_entries = [None, *logprobs("hi")]
    choice = whole(
        reply,
        (0, output("x", with_logprobs=True, prompt_logprobs=prompt_entries)),
        (0, output("y", with_logprobs=True, finish="length")),
    )["choices"][0]
    assert choice["text"] == "hixy"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i", "x", "y"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]  # the text has no <s>


def test_echo_without_new_tokens():
    reply = completion_reply(prompt=[[104, 105]], echo=True, logprobs=1, max_tokens=0)
    answer = whole(reply, (0, output("x", with_logprobs=True, finish="length", prompt_logprobs=[None, *logprobs("i")])))
    assert answer["choices"][0]["text"] == "hi"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["h", "i"]
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_extension():
    entries = [None, *logprobs("hi")]
    expected = {"decoded_token": "h", "logprob": -0.5, "rank": 1}
    reply = completion_reply(prompt_logprobs=1)
    assert (
        whole(reply, (0, output("x", finish="stop", prompt_logprobs=entries)))["choices"][0]["prompt_logprobs"][1][
            "104"
        ]
        == expected
    )
    reply = chat_reply(prompt_logprobs=1)
    answer = whole(reply, (0, output("x", finish="stop", prompt_logprobs=entries)))
    assert answer["prompt_logprobs"][:2] == [None, {**answer["prompt_logprobs"][1], "104": expected}]


def test_chat_answer_with_logprobs():
    reply = chat_reply(logprobs=True, top_logprobs=2)
    answer = whole(reply, (0, output("a", with_logprobs=True, finish="stop")))
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
    body, job, target = completion(prompt=["a", "b"], n=2, best_of=3)
    params = job.requests[0].params
    assert (params.n, params.best_of, params.logprobs) == (2, 3, None)
    both = [CompletionOutput(i, "xyz"[i:], [120, 121], -1.0 - i, finish_reason="stop") for i in range(2)]
    outputs = [RequestOutput("r", None, [1], both, True, num_discarded_tokens=7)] * 2
    answer = CompletionReply(body, job, target).whole(outputs)
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, "xyz", None),
        (1, "yz", None),
        (2, "xyz", None),
        (3, "yz", None),
    ]
    assert answer["usage"]["completion_tokens"] == 2 * (2 + 2 + 7)


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
    reply = completion_reply(tokenizer=PieceTokenizer(), prompt=[[1, 4, 4, 2, 3]], echo=True, logprobs=0, max_tokens=4)
    ids = [2, 3, 4, 5]
    entries = [{i: Logprob(-0.5, 1)} for i in ids]
    part = CompletionOutput(0, "é word!", ids, logprobs=entries, finish_reason="stop")
    prompt_entries = [None] + [{i: Logprob(-0.5, 1)} for i in (4, 4, 2, 3)]
    choice = whole(reply, (0, RequestOutput("r", None, [], [part], True, prompt_entries)))["choices"][0]
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


# ---- streams


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

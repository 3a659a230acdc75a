"""Lines of a batch: requests, results of lines that are none, ids that are the same in each run, bounded lines."""

import asyncio
import json

import pytest

from rayllm.batch import lines
from rayllm.batch.lines import BatchRequest, LineReader, answered, split_lines

URL = "/v1/chat/completions"


def line(custom_id="a", **fields):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"n": 1}} | fields).encode()


def read(*texts):
    reader = LineReader([URL])
    return [reader.read(text) for text in texts]


def split(*chunks):
    async def each():
        for chunk in chunks:
            yield chunk

    async def collect():
        return [line async for line in split_lines(each())]

    return asyncio.run(collect())


def test_a_request_keeps_its_body_as_it_is():
    (request,) = read(b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"x":  1.0}}')
    assert (request.custom_id, request.url, request.body) == ("a", URL, b'{"x":  1.0}')
    assert request.id.startswith("batch_req_")


@pytest.mark.parametrize(
    ("text", "code", "custom_id", "says"),
    [
        (b"nonsense", "invalid_json", None, "not valid JSON"),
        (b"\xff\xfe", "invalid_json", None, "not valid JSON"),
        (b"[1]", "invalid_request", None, "Expected `object`"),
        (line(custom_id=""), "invalid_request", "", "custom_id"),
        (line(custom_id=7), "invalid_request", None, "custom_id"),
        (line(custom_id="x" * 513), "invalid_request", "x" * 512, "<= 512"),
        (line(method="GET"), "invalid_request", "a", "method"),
        (line(surprise=1), "invalid_request", "a", "surprise"),
        (line(body=[]), "invalid_request", "a", "body"),
        (b'{"custom_id": "a", "url": "/v1/chat/completions"}', "invalid_request", "a", "body"),
        (line(url="/v1/models"), "invalid_url", "a", "/v1/models"),
        (line(body={"stream": True}), "stream_not_supported", "a", "stream"),
        (line(body={"background": True}), "background_not_supported", "a", "background"),
    ],
)
def test_a_line_that_is_no_request_has_a_result(text, code, custom_id, says):
    (result,) = read(text)
    assert (result.error.code, result.custom_id, result.response) == (code, custom_id, None)
    assert says in result.error.message
    assert not result.succeeded


def test_a_stream_that_is_off_is_none():
    assert all(isinstance(each, BatchRequest) for each in read(line(body={"stream": False}), line("b", body={})))


def test_ids_are_the_same_wherever_the_lines_are_and_never_twice():
    texts = [line("a"), b"bad", line("a"), line("b"), b"bad", line("a")]
    items = read(*texts)
    assert [getattr(item, "error", None) and item.error.code for item in items] == [
        None, "invalid_json", "duplicate_custom_id", None, "invalid_json", "duplicate_custom_id",
    ]  # fmt: skip
    assert len({item.id for item in items}) == 6
    assert [item.id for item in read(*texts)] == [item.id for item in items]
    assert {item.id for item in read(*reversed(texts))} == {item.id for item in items}
    assert read(line("a", body={"n": 2}))[0].id != items[0].id


def test_a_result_is_a_line_in_openais_form():
    (request,) = read(line())
    text = answered(request, 200, b'{"choices":[]}').line()
    assert text.endswith(b"\n")
    response = {"status_code": 200, "request_id": request.id, "body": {"choices": []}}
    assert json.loads(text) == {"id": request.id, "custom_id": "a", "response": response, "error": None}
    failed = json.loads(read(b"bad")[0].line())
    assert failed["response"] is None and set(failed["error"]) == {"code", "message"}


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_lines_come_out_whole_however_they_are_cut(size):
    text = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"b": 2}\nlast'
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert split(*chunks) == [b'{"a": 1}', b'{"b": 2}', b"last"]
    assert split() == []


def test_a_line_that_is_too_long_is_cut_and_refused(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    found = split(b"0123", b"4567", b"89abcdef", b"ghi\nshort\n", b"x" * 50 + b"\n")
    assert found == [b"0123456789a", b"short", b"x" * 11]
    assert [each.error.code for each in read(*found)] == ["line_too_long", "invalid_json", "line_too_long"]

"""Bodies that gzip has compressed: they are read as far as a body may be long, and no other compression is."""

import gzip
import json
import zlib

import msgspec
import pytest
from support.app import Api, error_of

from rayllm.serve.http import request

BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()


@pytest.fixture
def api():
    return Api()


def post(api, content, encoding="gzip"):
    return api.post("/v1/completions", content=content, headers={"content-encoding": encoding})


@pytest.mark.parametrize("encoding", ["gzip", "GZip", "x-gzip"])
def test_a_gzip_body_is_read(api, encoding):
    assert post(api, gzip.compress(BODY), encoding).json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("size", [1, 7, 2**10, 2**30])
def test_however_it_comes_it_is_the_same(api, monkeypatch, size):
    """In pieces of the wire, and where the pieces that are decompressed end in the midst of it."""
    api.state.fake.info = msgspec.structs.replace(api.state.fake.info, max_model_len=50_000)
    seen = []
    encode = api.state.fake.tokenizer.encode
    api.state.fake.tokenizer.encode = lambda text, special=True: seen.append(text) or encode(text, special)
    prompt = "the same again and again, " * 1000
    content = gzip.compress(json.dumps({"prompt": prompt, "max_tokens": 1}).encode())

    async def pieces():
        for start in range(0, len(content), min(size, 100)):
            yield content[start : start + min(size, 100)]

    monkeypatch.setattr(request, "UNZIPPED_BYTES", size)
    assert post(api, pieces()).status_code == 200
    assert seen == [prompt]


def test_the_limit_is_of_what_is_decompressed(api, monkeypatch):
    """No more is decompressed than shows that it is too much."""
    sizes = []
    make = zlib.decompressobj

    class Counted:
        def __init__(self, *args):
            self._inner = make(*args)

        def decompress(self, *args):
            sizes.append(len(piece := self._inner.decompress(*args)))
            return piece

        def __getattr__(self, name):
            return getattr(self._inner, name)

    monkeypatch.setattr(request.zlib, "decompressobj", Counted)
    limit = 2**20 + 64 * 8192
    assert post(api, gzip.compress(BODY.ljust(limit))).status_code == 200
    assert error_of(post(api, gzip.compress(BODY.ljust(limit + 1))), 413)["code"] == "request_too_large"
    sizes.clear()
    assert error_of(post(api, gzip.compress(b" " * 2**26)), 413)["code"] == "request_too_large"
    assert sum(sizes) <= limit + request.UNZIPPED_BYTES


@pytest.mark.parametrize("cut", [slice(0, -1), slice(0, 12), slice(1, None), slice(0, 0)])
def test_what_is_not_gzip_is_refused(api, cut):
    error = error_of(post(api, gzip.compress(BODY)[cut]), 400)
    assert (error["param"], "gzip" in error["message"]) == ("content-encoding", True)


def test_nothing_comes_after_the_end(api):
    error_of(post(api, gzip.compress(BODY) * 2), 400)


@pytest.mark.parametrize("encoding", ["deflate", "zstd", "br", "gzip, gzip", ""])
def test_other_compressions_are_refused(api, encoding):
    answer = post(api, BODY, encoding)
    assert error_of(answer, 415)["param"] == "content-encoding"
    assert answer.headers["accept-encoding"] == "gzip"

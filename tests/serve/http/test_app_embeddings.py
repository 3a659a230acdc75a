"""`/v1/embeddings` over a fake engine."""

import base64
import struct

import pytest
from support.app import Api, counted, error_of, figures

from rayllm.serve.http.protocol import MAX_INPUTS


@pytest.fixture
def api():
    return Api()


def embed(api, **fields):
    return api.post("/v1/embeddings", json=fields)


def test_the_answer_has_the_form_of_openai(api):
    answer = embed(api, input=["abc", "de"], model="org/fake", user="me").json()
    assert answer.keys() == {"object", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "org/fake")
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert [(each["object"], each["index"]) for each in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert [each["embedding"] for each in answer["data"]] == [
        pytest.approx([0.6, 0.8, 3 / 64]),
        pytest.approx([0.6, 0.8, 2 / 64]),
    ]
    assert api.state.fake.aborted == api.state.fake.started


def test_the_forms_of_the_input_mean_the_same(api):
    ids = [97, 98, 99]
    answers = [embed(api, input=form).json() for form in ("abc", ["abc"], ids, [ids])]
    assert all(answer == answers[0] for answer in answers)
    assert [each["index"] for each in embed(api, input=[ids, [1]]).json()["data"]] == [0, 1]


def test_base64_is_the_float32_values(api):
    floats = embed(api, input="abc", encoding_format="float", dimensions=3).json()["data"][0]["embedding"]
    coded = embed(api, input="abc", encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(coded))) == floats


def test_pooling_is_the_requests_choice(api):
    for fields, sign in (({}, 1), ({"pooling": "last"}, 1), ({"pooling": "mean"}, -1), ({"pooling": None}, 1)):
        assert embed(api, input="abc", **fields).json()["data"][0]["embedding"][1] == pytest.approx(sign * 0.8)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "1 to 2048 entries, not 0"),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input", "1 to 2048 entries, not 2049"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": ""}, "input", "input must not be empty"),
        ({"input": ["a", 1]}, "input", "must be a string"),
        ({"input": {"text": "a"}}, "input", "must be a string"),
        ({"input": [True]}, "input", "must be a string"),
        ({"input": [1000]}, "input", "input has token id 1000; ids of this model are 0 to 999"),
        ({"input": [-1]}, "input", "token id -1"),
        ({"input": ["ok", "x" * 65]}, "input", "input has 65 tokens; this model's context is 64 tokens"),
        ({"input": "a", "dimensions": 2}, "dimensions", "must be 3"),
        ({"input": "a", "dimensions": 0}, "dimensions", "must be 3"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "max"}, "pooling", "'last' or 'mean'"),
        ({"input": "a", "strict_fields": True, "stream": True}, "stream", "unknown field"),
        ({"input": "a", "strict_fields": True, "max_tokens": 3}, "max_tokens", "unknown field"),
        ({"input": "a", "cache_salt": "x" * 257}, "cache_salt", "256"),
        ({"input": "a", "priority": 2**31}, "priority", "2147483648"),
    ],
)
def test_bad_bodies_name_the_field_and_its_limit(api, fields, param, words):
    error = error_of(embed(api, **fields), 400)
    assert error["param"] == param
    assert words in error["message"], error
    assert not api.state.fake.started


def test_an_input_may_fill_the_context_and_too_long_a_one_has_its_code(api):
    assert embed(api, input="x" * 64).status_code == 200
    assert error_of(embed(api, input="x" * 65), 400)["code"] == "context_length_exceeded"


def test_failures_end_the_whole_request(api):
    assert error_of(embed(api, input="a", model="no"), 404)["param"] == "model"
    assert "no such kernel" in error_of(embed(api, input=["a", "poison"]), 500)["message"]
    assert error_of(embed(api, input=["a", "dead"]), 503)["code"] == "engine_unavailable"
    assert sorted(api.state.fake.aborted) == sorted(api.state.fake.started)
    assert api.state.admission.load.completions == 0
    api.state.fake.tokenizer = None
    assert "token ids" in error_of(embed(api, input="abc"), 400)["message"]


def test_embeddings_are_counted(api):
    embed(api, input=["a", "b"])
    metrics = api.state.metrics
    assert counted(metrics, "request_success") == {"stop": 2}
    assert figures(metrics, "e2e_request_latency_seconds_count") == {None: 2}

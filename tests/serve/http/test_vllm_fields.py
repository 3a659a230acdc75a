"""vLLM's fields, as the routes take them and the engine gets them."""

import json

import pytest
from support.app import Api, error_of
from support.chat import Played
from support.chat_templates import HERMES

USER = {"role": "user", "content": "hi"}
DOCUMENTS = "{% for each in documents or [] %}[{{ each.title }}]{% endfor %}" + HERMES


class Seen:
    """The app, and the requests that its engine gets."""

    def __init__(self):
        self.api = Api()
        self.requests = []
        generate = self.api.state.fake.generate

        def seen(request, prompt_text=None):
            self.requests.append(request)
            return generate(request, prompt_text)

        self.api.state.fake.generate = seen

    @property
    def last(self):
        return self.requests[-1]


def chunks(answer):
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.fixture
def seen():
    return Seen()


# ---- what may come


@pytest.mark.parametrize("ask", ["completion", "chat"])
def test_allowed_ids_and_bad_words_reach_the_engine(seen, ask):
    send = getattr(seen.api, ask)
    assert send(allowed_token_ids=[97, 98], bad_words=["ab", "c"], strict_fields=True).status_code == 200
    assert seen.last.params.allowed_token_ids == [97, 98]
    assert seen.last.params.bad_words == ["ab", "c"]
    assert seen.last.bad_token_ids == [[97, 98], [32, 97, 98], [99], [32, 99]]
    assert send(allowed_token_ids=None, bad_words=None).status_code == 200
    assert (seen.last.params.allowed_token_ids, seen.last.bad_token_ids) == (None, [])
    for field, value in (
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1000]),
        ("allowed_token_ids", ["a"]),
        ("bad_words", "ab"),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 65),
        ("bad_words", ["\uffff"]),
    ):
        assert error_of(send(**{field: value}), 400)["param"] == field


def test_bad_words_need_a_tokenizer(seen):
    seen.api.state.fake.tokenizer = None
    assert error_of(seen.api.completion(prompt=[1], bad_words=["a"]), 400)["param"] == "bad_words"


# ---- older names of structured_outputs


@pytest.mark.parametrize(
    ("field", "value", "kind", "made"),
    [
        ("guided_json", {"type": "object"}, "json", '{"type": "object"}'),
        ("guided_json", '{"type": "object"}', "json", '{"type": "object"}'),
        ("guided_regex", "[a-z]+", "regex", "[a-z]+"),
        ("guided_choice", ["yes", "no"], "choice", ["yes", "no"]),
        ("guided_grammar", 'start: "a"', "grammar", 'start: "a"'),
    ],
)
@pytest.mark.parametrize("ask", ["completion", "chat"])
def test_guided_fields_are_structured_outputs(seen, ask, field, value, kind, made):
    send = getattr(seen.api, ask)
    assert send(**{field: value, "strict_fields": True}).status_code == 200
    assert getattr(seen.last.params.structured_outputs, kind) == made
    error = error_of(send(**{field: value, "structured_outputs": {"regex": "a"}}), 400)
    assert error["message"] == f"give structured_outputs or {field}, not both"
    assert error_of(send(**{field: 3}), 400)["param"] == field
    if kind != "json":
        error = error_of(send(**{field: value[:0]}), 400)
        assert (error["param"], error["message"].startswith(field)) == (field, True)


# ---- token ids


def test_token_ids_of_a_completion(seen):
    choices = seen.api.completion(prompt=["hi", "you"], n=2, max_tokens=2, return_token_ids=True).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[97, 98]] * 4
    assert [choice["prompt_token_ids"] for choice in choices] == [[104, 105]] * 2 + [[121, 111, 117]] * 2
    parts = [c["choices"][0] for c in chunks(seen.api.completion(stream=True, max_tokens=3, return_token_ids=True))]
    assert [part["token_ids"] for part in parts] == [[97], [98], [99]]
    assert [part.get("prompt_token_ids") for part in parts] == [[104, 105], None, None]
    assert "token_ids" not in seen.api.completion().text


def test_token_ids_of_a_chat(seen):
    answer = seen.api.chat(max_tokens=2, return_token_ids=True).json()
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([104, 105], [97, 98])
    parts = chunks(seen.api.chat(stream=True, max_tokens=3, return_token_ids=True))
    assert [part.get("prompt_token_ids") for part in parts] == [[104, 105]] + [None] * (len(parts) - 1)
    assert [token for part in parts for token in part["choices"][0].get("token_ids", [])] == [97, 98, 99]
    assert "token_ids" not in seen.api.chat().text


def test_tokens_that_are_no_text_yet_have_their_ids():
    app = Played("<tool_call>hm", step=1)
    parts = app.chunks(extra_body={"return_token_ids": True}, tools=[{"type": "function", "function": {"name": "now"}}])
    ids = [token for part in parts for token in part.choices[0].model_extra.get("token_ids", [])]
    assert "".join(map(chr, ids)) == "<tool_call>hm\0"


# ---- ids of requests


def test_a_client_may_choose_the_id(seen):
    for _ in range(2):  # at the same time too: the engine's own ids differ
        assert seen.api.completion(request_id="mine-1").json()["id"] == "cmpl-mine-1"
    assert seen.requests[0].request_id != seen.requests[1].request_id
    assert seen.api.chat(request_id="mine").json()["id"] == "chatcmpl-mine"
    assert {c["id"] for c in chunks(seen.api.chat(request_id="mine", stream=True))} == {"chatcmpl-mine"}
    for bad in ("", "a b", "x" * 129, "\u00e4", "a\n", 3):
        assert error_of(seen.api.chat(request_id=bad), 400)["param"] == "request_id"


# ---- shorter prompts


def test_the_end_of_a_prompt_is_kept(seen):
    def ids(**fields):
        assert seen.api.completion(max_tokens=4, **fields).status_code == 200
        return seen.last.prompt_token_ids

    assert ids(prompt="abcd", truncate_prompt_tokens=2) == [99, 100]
    assert ids(prompt=[1, 2, 3], truncate_prompt_tokens=2) == [2, 3]
    assert ids(prompt="abcd", truncate_prompt_tokens=9) == [97, 98, 99, 100]
    assert ids(prompt="x" * 90 + "y", truncate_prompt_tokens=-1) == [120] * 59 + [121]
    assert seen.api.completion(prompt="abcd", truncate_prompt_tokens=2, max_tokens=1, echo=True).json()["choices"][0][
        "text"
    ] == ("cda")
    seen.api.chat(truncate_prompt_tokens=1)
    assert seen.last.prompt_token_ids == [105]
    seen.api.post("/v1/embeddings", json={"input": "x" * 100, "truncate_prompt_tokens": -1})
    assert len(seen.last.prompt_token_ids) == 64
    for bad in (0, -2, 1.5):
        assert error_of(seen.api.completion(truncate_prompt_tokens=bad), 400)["param"] == "truncate_prompt_tokens"


# ---- the chat template


def test_a_prompt_may_end_behind_the_last_message():
    app = Played("a", "a")
    app.chat()
    app.chat(extra_body={"add_generation_prompt": False})
    assert app.engine.prompts[0].startswith(app.engine.prompts[1])
    assert app.engine.prompts[0].endswith("assistant\n")
    assert app.engine.prompts[1].rstrip().endswith("<|im_end|>")


@pytest.mark.parametrize("content", ["It is", "It is ", " It is"])
def test_the_last_message_may_be_continued(content):
    app = Played("a", "a")
    body = {"continue_final_message": True}
    app.chat(messages=[USER, {"role": "assistant", "content": content}], extra_body=body)
    app.chat(
        messages=[USER, {"role": "assistant", "content": content}], extra_body=body | {"add_generation_prompt": False}
    )
    assert app.engine.prompts[0] == app.engine.prompts[1]
    assert app.engine.prompts[0].endswith("<|im_start|>assistant" + content)


def test_a_continuation_needs_something_to_go_on_from(seen):
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(seen.api.chat(**both), 400)["param"] == "continue_final_message"
    messages = [USER, {"role": "assistant", "content": " "}]
    error = error_of(seen.api.chat(messages=messages, continue_final_message=True), 400)
    assert (error["param"], "no content" in error["message"]) == ("continue_final_message", True)


def test_documents_go_to_the_template_that_has_a_place_for_them(seen):
    app = Played("a", source=DOCUMENTS)
    app.chat(extra_body={"documents": [{"title": "one", "text": "1"}, {"title": "two"}]})
    assert app.engine.prompts[0].startswith("[one][two]")
    error = error_of(seen.api.chat(documents=[{"title": "one"}]), 400)
    assert (error["param"], "no place for documents" in error["message"]) == ("documents", True)
    assert seen.api.chat(documents=[]).status_code == 200
    assert error_of(seen.api.chat(documents=[{"title": 1}]), 400)["param"] == "documents"


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("prefill", ["<", "I", "The", "im", "end"])
def test_a_short_beginning_of_the_answer_is_not_sought_in_the_template(prefill):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": prefill}]
    expected = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{prefill}"
    app = Played("x", source=CHATML)
    app.chat(messages=turns, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert app.engine.prompts[-1] == expected
    app.post("/v1/messages", {"model": "org/fake", "max_tokens": 5, "messages": turns})
    assert app.engine.prompts[-1] == expected


def test_tags_that_are_special_tokens_are_shown_whoever_says_otherwise():
    app = Played('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    app.engine.tokenizer.special_texts = frozenset({"<tool_call>"})
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    app.chat(tools=tools, extra_body={"skip_special_tokens": True})
    assert app.params.skip_special_tokens is False


def test_what_guided_json_does_not_enforce_is_named():
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    headers = [
        Api().completion(**each).headers for each in ({"structured_outputs": {"json": schema}}, {"guided_json": schema})
    ]
    assert all("uniqueItems" in each["x-rayllm-not-enforced"] for each in headers)


def test_offsets_behind_special_tokens_that_are_shown():
    app = Played("a#b")
    app.engine.tokenizer.special_ids = frozenset({ord("#")})
    body = {"model": "org/fake", "prompt": "x", "max_tokens": 5, "logprobs": 0, "skip_special_tokens": False}
    (choice,) = app.post("/v1/completions", body).json()["choices"]
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]


def test_a_prompt_is_truncated_to_what_fits_if_nothing_is_generated_too():
    answer = Api().completion(prompt="x" * 100, echo=True, max_tokens=0, truncate_prompt_tokens=-1)
    assert answer.status_code == 200, answer.text

"""instructor against a live server: the modes whose result does not depend on what the model knows.

JSON and MD_JSON only ask for a form, and PARALLEL_TOOLS leaves it to the model whether it calls anything.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

instructor = pytest.importorskip("instructor", reason="instructor is not installed")

import openai  # noqa: E402  (after the skip; instructor needs it)
from instructor import Mode  # noqa: E402
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException  # noqa: E402
from pydantic import BaseModel  # noqa: E402

QUESTION = [{"role": "user", "content": "Where shall we go?"}]
FIELDS = {"model": "tiny-pydoc", "messages": QUESTION, "max_tokens": 300, "temperature": 0}
ENFORCED = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA]


class Visit(BaseModel):
    """A stay in a city."""

    city: Literal["Rome", "Oslo"]
    nights: Literal[1, 2, 3]
    guide: bool


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.mark.parametrize("mode", ENFORCED, ids=lambda mode: mode.name)
def test_enforced_modes(client, mode):
    asking = instructor.from_openai(client, mode=mode)
    visit, completion = asking.create_with_completion(response_model=Visit, max_retries=0, **FIELDS)
    assert isinstance(visit, Visit)
    choice = completion.choices[0]
    calls = choice.message.tool_calls
    assert (calls is None) == (mode is Mode.JSON_SCHEMA)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    text = calls[0].function.arguments if calls else choice.message.content
    assert Visit.model_validate_json(text).model_dump() == visit.model_dump()
    *early, last = asking.create_partial(response_model=Visit, max_retries=0, **FIELDS)
    assert isinstance(Visit(**last.model_dump()), Visit)  # another one: the tool of a partial result has another name
    assert len(early) > 2 and early[0].guide is None


def test_responses(client):
    asking = instructor.from_openai(client, mode=Mode.RESPONSES_TOOLS)
    assert isinstance(asking.create(response_model=Visit, max_retries=0, **FIELDS), Visit)


def test_async(url):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            asking = instructor.from_openai(client, mode=Mode.TOOLS)
            return await asyncio.gather(
                *(asking.create(response_model=Visit, max_retries=0, **FIELDS) for _ in range(4))
            )

    assert all(isinstance(visit, Visit) for visit in asyncio.run(ask()))


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_a_result_that_a_validator_refuses_is_asked_for_again(client, mode):
    """The second request brings the first answer and its error back, as a tool's message or the user's."""

    class Picky(Visit):
        def model_post_init(self, _context):
            raise ValueError("never good enough")

    asking = instructor.from_openai(client, mode=mode)
    sent = []
    asking.on("completion:kwargs", lambda *_args, **fields: sent.append(list(fields["messages"])))
    with pytest.raises(InstructorRetryException, match="never good enough"):
        asking.create(response_model=Picky, max_retries=1, **FIELDS)
    assert len(sent) == 2
    assert len(sent[1]) > len(sent[0])


def test_an_answer_that_is_cut_off_is_an_error(client):
    asking = instructor.from_openai(client, mode=Mode.TOOLS)
    with pytest.raises(IncompleteOutputException):
        asking.create(response_model=Visit, max_retries=0, **FIELDS | {"max_tokens": 2})

"""Forced calls at temperature 1 by the bundled model: all valid, none cut."""

import pytest
from forced_calls import ROWS, forced_calls, is_valid

from rayllm import LLM
from rayllm.serve.http.chat_format import ChatFormat


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", num_gpu_blocks_override=256) as llm:
        yield llm


@pytest.mark.parametrize("row", ["a named tool", "required, one call"])
def test_forced_calls_are_valid_and_complete(llm, row):
    single, schemas = ROWS[row]
    replies = forced_calls(llm, schemas, single, 4, max_tokens=256, temperature=1.0)
    assert [reply.finish_reason for reply in replies] == ["stop"] * 4
    form = ChatFormat("json", schemas=schemas, single_call=single)
    assert all(is_valid(reply, form) for reply in replies)
    cut = replies[0]
    cut.text = cut.text.rpartition('"')[0]
    assert not is_valid(cut, form)

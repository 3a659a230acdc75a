"""dspy against a live server: its language model by itself, and signatures whose outputs are held to their types."""

import asyncio
from typing import Literal

import pytest

dspy = pytest.importorskip("dspy", reason="dspy is not installed")

from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider  # noqa: E402


class Choose(dspy.Signature):
    """Choose a city for a traveller."""

    wish: str = dspy.InputField()
    city: Literal["Rome", "Oslo"] = dspy.OutputField()
    guide: bool = dspy.OutputField()


@pytest.fixture
def options(url):
    common = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 300, "cache": False}
    return common | {"num_retries": 0}


def test_chat_and_completions(options):
    chat = dspy.LM("openai/tiny-pydoc", **options | {"max_tokens": 12})
    (text,) = chat("What does len do?")
    assert text
    assert chat(messages=[{"role": "user", "content": "What does len do?"}]) == [text]
    assert asyncio.run(chat.acall("What does len do?")) == [text]
    assert len(chat("What does len do?", n=2, temperature=1.0)) == 2
    completion = dspy.LM("openai/tiny-pydoc", model_type="text", **options | {"max_tokens": 12})
    assert completion("The for statement")[0]


def test_a_signature_is_answered_in_its_types(options):
    """JSONAdapter sends the signature as a schema to a provider that is declared to take one."""
    access = AccessPolicy(provider="rayllm", env_keys=(), base_url=options["api_base"])
    provider = ProviderDefinition.chat(access, compat=OpenAIChatCompat())
    register_provider(provider, supports=ModelSupport(response_schema=True), replace=True)
    with dspy.context(lm=dspy.LM("rayllm/tiny-pydoc", **options), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Choose)(wish="somewhere warm")
    assert answer.city in ("Rome", "Oslo")
    assert isinstance(answer.guide, bool)


def test_errors(options):
    with pytest.raises(Exception, match="other"):
        dspy.LM("openai/other", **options)("hi")

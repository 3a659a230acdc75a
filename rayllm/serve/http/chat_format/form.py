"""What a text is made of: all that a model writes, or what to look for in one reply."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rayllm.config.options import ServerConfig
from rayllm.serve.http.chat_format.families import THINK_TAGS, Family, Reasoning, family_of, reasoning_of, tags_of
from rayllm.text.tokenizer import Tokenizer


class ChatFormat(msgspec.Struct, frozen=True):
    """The form of a model's calls and of its reasoning, and which calls to look for."""

    tools: Family | Literal["json"] | None = None  # the form of calls; None if there are none, or not known
    reasoning: Reasoning | None = None  # the form of reasoning; None if there is none
    inside: bool = False  # whether the text begins with reasoning in any case, because the prompt opened the tag
    schemas: dict[str, dict[str, Any]] = {}  # of the parameters of the tools that may be called, by their names
    single_call: bool = False  # whether what follows the first call is left out

    @property
    def thinks(self) -> bool:
        """Whether the text may have reasoning in it."""
        return self.reasoning is not None

    @property
    def is_harmony(self) -> bool:
        """Whether all of the text is messages of gpt-oss."""
        return "gpt_oss" in (self.tools, self.reasoning)

    @property
    def tags(self) -> set[str]:
        """The tags that must be in the text for its parts to be found."""
        return tags_of(self.tools, self.reasoning)

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the tag that begins reasoning."""
        return self.reasoning in THINK_TAGS and prompt.rstrip().endswith(THINK_TAGS[self.reasoning].beginning)


def chat_format(server: ServerConfig, tokenizer: Tokenizer) -> ChatFormat:
    """What a model writes: what the options say, and for "auto" what its chat template shows."""
    tools, reasoning = server.tool_call_parser, server.reasoning_parser
    return ChatFormat(
        tools=family_of(tokenizer.chat_template_source(with_tools=True)) if tools == "auto" else _known(tools),
        reasoning=reasoning_of(tokenizer.chat_template_source()) if reasoning == "auto" else _known(reasoning),
    )


def _known(option: Any) -> Any:
    """An option's value, None for "none"."""
    return None if option == "none" else option

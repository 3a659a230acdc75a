"""How a model writes reasoning and tool calls, per server and per reply, and the parser of one chat completion."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from rayllm.config.options import ServerConfig
from rayllm.serve.http import reasoning
from rayllm.serve.http.tool_calls import TAGS, Event, ToolFormat, tool_call_parser


class HasChatTemplate(Protocol):
    """What is used of the tokenizer here."""

    def chat_template_source(self, with_tools: bool = False) -> str: ...


class ChatFormat(msgspec.Struct, frozen=True):
    """What this server's model writes. tools: the form of its calls, None if unknown. thinks: it may use <think>."""

    tools: Literal["hermes", "llama3"] | None = None
    thinks: bool = False


def chat_format(server: ServerConfig, tokenizer: HasChatTemplate | None) -> ChatFormat:
    """The format of a model: what the options say, and for "auto" what its chat template shows."""
    if tokenizer is None:
        return ChatFormat()
    with_tools, plain = tokenizer.chat_template_source(with_tools=True), tokenizer.chat_template_source()
    tools, thinks = server.tool_call_parser, server.reasoning_parser
    guessed = _guess_tools(with_tools)
    return ChatFormat(
        tools=guessed if tools == "auto" else None if tools == "none" else tools,
        thinks=reasoning.CLOSE in plain if thinks == "auto" else thinks == "think",
    )


def _guess_tools(template: str) -> Literal["hermes", "llama3"] | None:
    if "<tool_call>" in template:
        return None if "<function=" in template else "hermes"  # some write XML between the same tags
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None


class ReplyFormat(msgspec.Struct, frozen=True):
    """What to look for in one reply.

    tools: form of the calls, None to look for none. tool_names: the offered tools. single_call: at most one call.
    thinks: the text may begin with reasoning; inside: it does, because the prompt opened the tag.
    """

    tools: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    single_call: bool = False
    thinks: bool = False
    inside: bool = False

    @property
    def tags(self) -> frozenset[str]:
        """The tags that must be in the text to be found."""
        tags = [*TAGS] if self.tools == "hermes" else []
        return frozenset([*tags, reasoning.OPEN, reasoning.CLOSE] if self.thinks else tags)


class ParsedText(msgspec.Struct):
    """What a piece of a completion's text turned out to be: reasoning, then text and tool calls in order."""

    reasoning: str
    events: list[Event]


class ChatTextParser:
    """Parses the text of one chat completion, piece by piece."""

    def __init__(self, form: ReplyFormat):
        self._splitter = reasoning.ReasoningSplitter(form.inside) if form.thinks else None
        self._tools = form.tools and tool_call_parser(form.tools, form.tool_names, form.single_call)

    @property
    def has_calls(self) -> bool:
        return bool(self._tools and self._tools.num_calls)

    def feed(self, text: str, finished: bool) -> ParsedText:
        """Take the next piece; with `finished` it is the last one, and nothing is held back any more."""
        thought = ""
        if self._splitter is not None:
            thought, text = self._splitter.feed(text)
            if finished:
                more, rest = self._splitter.finish()
                thought, text = thought + more, text + rest
        if self._tools is None:
            return ParsedText(thought, [text] if text else [])
        events = self._tools.feed(text)
        return ParsedText(thought, events + self._tools.finish() if finished else events)

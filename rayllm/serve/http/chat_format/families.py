"""The families of models whose tool calls are known, by their names in the option `tool_call_parser`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from rayllm.serve.http.chat_format.calls import CallForm
from rayllm.serve.http.chat_format.deepseek import DEEPSEEK
from rayllm.serve.http.chat_format.deepseek_dsml import DEEPSEEK_DSML, DSML
from rayllm.serve.http.chat_format.gemma4 import GEMMA4
from rayllm.serve.http.chat_format.gemma4 import OPEN as GEMMA4_CALL
from rayllm.serve.http.chat_format.glm import GLM
from rayllm.serve.http.chat_format.harmony import TAGS
from rayllm.serve.http.chat_format.hermes import HERMES
from rayllm.serve.http.chat_format.json_calls import JSON_CALLS
from rayllm.serve.http.chat_format.llama import LLAMA3, LLAMA4
from rayllm.serve.http.chat_format.minimax import MINIMAX
from rayllm.serve.http.chat_format.mistral import MISTRAL
from rayllm.serve.http.chat_format.qwen3_coder import QWEN3_CODER

Family = Literal[
    "hermes",
    "qwen3_coder",
    "llama3",
    "llama4",
    "mistral",
    "deepseek",
    "deepseek_v32",
    "glm",
    "minimax",
    "gemma4",
    "gpt_oss",
]
Reasoning = Literal["think", "mistral", "gemma4", "gpt_oss"]


class ThinkTags(NamedTuple):
    """What stands around reasoning. label: what the opening tag is followed by, which is no token of its own."""

    opening: str
    closing: str
    label: str = ""

    @property
    def beginning(self) -> str:
        """The opening tag and its label."""
        return self.opening + self.label


# gpt-oss is not among them: all of its text is in a form of its own, see `harmony.py`.
CALL_FORMS: dict[str, CallForm] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3": LLAMA3,
    "llama4": LLAMA4,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "deepseek_v32": DEEPSEEK_DSML,
    "glm": GLM,
    "minimax": MINIMAX,
    "gemma4": GEMMA4,
    "json": JSON_CALLS,
}
THINK_TAGS: dict[str, ThinkTags] = {
    "think": ThinkTags("<think>", "</think>"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "gemma4": ThinkTags("<|channel>", "<channel|>", "thought"),
}


def tags_of(tools: str | None, reasoning: str | None) -> set[str]:
    """The tags that must be in the text for its calls and its reasoning to be found."""
    tags = set(CALL_FORMS[tools].tags) if tools in CALL_FORMS else set()
    tags |= set(THINK_TAGS[reasoning][:2]) if reasoning in THINK_TAGS else set()
    return tags | set(TAGS) if "gpt_oss" in (tools, reasoning) else tags


def family_of(template: str) -> Family | None:
    """Whose calls a chat template shows: the first family of which it has a mark that no family after it has."""
    has = template.__contains__
    if has("<|channel|>") and has("<|message|>"):
        return "gpt_oss"
    if has(DSML):
        return "deepseek_v32"
    if has("<｜tool▁call▁begin｜>"):
        return "deepseek"
    if has("[TOOL_CALLS]"):
        return "mistral"
    if has("<minimax:tool_call>"):
        return "minimax"
    if has(GEMMA4_CALL):
        return "gemma4"
    if has("<arg_key>"):
        return "glm"
    if has("<function="):
        return "qwen3_coder"
    if has("<tool_call>"):
        return "hermes"
    if has("<|python_start|>") or (has("<|header_start|>") and has('"parameters"')):
        return "llama4"
    if has("<|python_tag|>") or (has("<|start_header_id|>") and has('"parameters"')):
        return "llama3"
    return None


def reasoning_of(template: str) -> Reasoning | None:
    """How a chat template shows that its model reasons."""
    if "<|channel|>" in template and "<|message|>" in template:
        return "gpt_oss"
    marked: tuple[Reasoning, ...] = ("mistral", "gemma4", "think")
    return next((name for name in marked if THINK_TAGS[name].closing in template), None)

"""Chat templates: messages in, prompt text out, rendered in jinja2's sandbox.

Templates come from the model folder only, never from a request. The variables and extensions are those that
`transformers` offers them, so that a template gives the same text here as there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rayllm.errors import InvalidRequestError

MAX_OUTPUT_CHARS = 16 * 2**20
MAX_LOOP_STEPS = 10**6  # over all range() of one rendering: nested ranges would run for years without any output
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "range")
_CONTINUE_MARK = "\N{OBJECT REPLACEMENT CHARACTER}continue-here\N{OBJECT REPLACEMENT CHARACTER}"


class ChatTemplate:
    """The chat templates of one model, each compiled once. Rendering is thread-safe.

    templates: name -> jinja source. "default" serves all requests, "tool_use", where there is one, those with tools.
    special_tokens: variables like bos_token and eos_token. A template that does not compile is reported by
    `render`, not here: completions need none.
    """

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]):
        self._special_tokens = special_tokens
        self._sources = templates
        self._compiled: dict[str, jinja2.Template | str] = {}  # the template, or what is wrong with it
        self._variables: dict[str, set[str]] = {}  # what a template may read from outside
        environment = _environment()
        for name, source in templates.items():
            try:
                self._compiled[name] = environment.from_string(source)
                self._variables[name] = jinja2.meta.find_undeclared_variables(environment.parse(source))
            except Exception as error:  # a template may be wrong in any way; jinja2 lets some ValueErrors through
                self._compiled[name] = f"the model's chat template does not compile: {error}"

    def source(self, *, with_tools: bool) -> str:
        """The jinja source that requests with or without tools get; "" if there is none."""
        name = self._name(with_tools)
        return "" if name is None else self._sources[name]

    def variables(self, *, with_tools: bool) -> Set[str]:
        """What that template may read from outside; it ignores all else. Empty if it does not compile."""
        return self._variables.get(self._name(with_tools) or "", frozenset())

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        messages, tools, documents: plain JSON values; keys of messages whose value is None are left out, as templates
        tell "absent" from "present". continue_final_message: the text ends within the last message, for the model
        to go on with it. template_kwargs: further variables, over the special tokens.

        Raises InvalidRequestError: no template, a template's own complaint, or more than 16 Mi characters.
        """
        template = self._choose(with_tools=tools is not None)
        if not messages:
            raise InvalidRequestError("messages must not be empty", "messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
            )
        extra = template_kwargs or {}
        for name in _RESERVED:
            if name in extra:
                raise InvalidRequestError(f"chat_template_kwargs must not set {name!r}", "chat_template_kwargs")
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if continue_final_message:
            chat[-1] = _marked(chat[-1])
        text = _render(
            template,
            self._special_tokens
            | extra
            | {
                "messages": chat,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                "range": _bounded_range(),
            },
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, *, with_tools: bool) -> jinja2.Template:
        if not self._compiled:
            raise InvalidRequestError(
                "the model has no chat template (tokenizer_config.json has no chat_template and there is no "
                "chat_template.jinja); use /v1/completions",
                "messages",
            )
        name = self._name(with_tools)
        if name is None:
            raise InvalidRequestError(
                f"the model has several chat templates ({', '.join(sorted(self._compiled))}) but no default one",
                "messages",
            )
        found = self._compiled[name]
        if isinstance(found, str):
            raise InvalidRequestError(found, "messages")
        return found

    def _name(self, with_tools: bool) -> str | None:
        names = ["tool_use", "default"] if with_tools else ["default"]
        return next((name for name in names if name in self._sources), None)


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render piece by piece, so that an endless template is stopped at the limit and not by the memory's end."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_OUTPUT_CHARS:
                break
            pieces.append(piece)
    except Exception as error:  # anything: templates index, add and call what users sent
        raise InvalidRequestError(f"the model's chat template refused the messages: {error}", "messages") from None
    if size > MAX_OUTPUT_CHARS:
        raise InvalidRequestError(
            f"the model's chat template made more than {MAX_OUTPUT_CHARS} characters of the messages", "messages"
        )
    return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; serving only prints its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _bounded_range() -> Callable[..., range]:
    """A `range` for one rendering whose calls share a budget of MAX_LOOP_STEPS."""
    left = MAX_LOOP_STEPS

    def bounded(*args: int) -> range:
        nonlocal left
        result = range(*args)
        left -= len(result) + 1
        if left < 0:
            raise OverflowError(f"its range() calls add up to more than {MAX_LOOP_STEPS} steps")
        return result

    return bounded


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark and a space where its text ends. Content is a string or a list of parts.

    The space tells whether the template trims its messages: then the text to continue must be trimmed too.
    """
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + _CONTINUE_MARK + " "}
    if isinstance(content, list):
        for place in reversed(range(len(content))):
            part = content[place]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                new_part = part | {"text": part["text"] + _CONTINUE_MARK + " "}
                return message | {"content": [*content[:place], new_part, *content[place + 1 :]]}
    raise InvalidRequestError("continue_final_message needs a last message with text content", "messages")


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_CONTINUE_MARK)
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message does not work here: the model's chat template drops or changes the last message",
            "messages",
        )
    trimmed = not text.startswith(" ", place + len(_CONTINUE_MARK))
    return text[:place].rstrip() if trimmed else text[:place]

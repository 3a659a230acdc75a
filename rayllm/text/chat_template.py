"""Chat templates: messages in, prompt text out, rendered in jinja2's sandbox.

Templates come from the model folder only, never from a request. They see the variables and extensions that
`transformers` gives them, so a template makes the same text here as there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rayllm.errors import InvalidRequestError

MAX_OUTPUT_CHARS = 16 * 2**20
MAX_LOOP_STEPS = 10**6  # of all range() calls of one rendering: nested loops could run for years without any output
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "range"}


class CallArguments(dict[str, Any]):
    """The arguments of a call in a message: an object, and where a template joins it to text, its JSON text.

    Templates of most families look into the object or write its JSON themselves; those of DeepSeek join the text that
    the model wrote to the tags around it.
    """

    __slots__ = ("_text",)

    def __init__(self, fields: dict[str, Any], text: str):
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class _Template(NamedTuple):
    """A template of the model, or none."""

    source: str = ""
    compiled: jinja2.Template | None = None  # None if there is none, or it does not compile
    variables: Set[str] = frozenset()  # what it may read from outside
    error: str = ""  # why nothing is compiled


class ChatTemplate:
    """The chat templates of one model, each compiled once. Rendering is thread-safe.

    templates: name -> jinja source. "default" serves all requests, and "tool_use", where there is one, those with
    tools. special_tokens: variables like bos_token and eos_token. A template that does not compile is an error of
    `render`, not of the constructor, as requests without messages need none.
    """

    def __init__(self, templates: dict[str, str], special_tokens: dict[str, str]):
        environment, names = _environment(), ", ".join(sorted(templates)) or "none"
        missing = _Template(
            error="the model has no chat template for this request; tokenizer_config.json, chat_template.jinja and "
            f"additional_chat_templates have: {names}. Use /v1/completions"
        )
        compiled = {name: _compile(environment, source) for name, source in templates.items()}
        self._without_tools = compiled.get("default", missing)
        self._with_tools = compiled.get("tool_use", self._without_tools)
        self._special_tokens = special_tokens

    def source(self, with_tools: bool = False) -> str:
        """The jinja source that requests with or without tools get; "" if there is none."""
        return self._find(with_tools).source

    def variables(self, with_tools: bool = False) -> Set[str]:
        """What that template may read from outside; it ignores all else. Empty if it does not compile."""
        return self._find(with_tools).variables

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        documents: list[dict[str, str]] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        messages, tools, documents: plain JSON values, and `CallArguments`. Keys of messages whose value is None are
        left out, because templates test whether a key is there. template_kwargs: further variables, which replace
        special tokens of the same name.

        Raises InvalidRequestError: no template, a template's own complaint, or more than 16 Mi characters.
        """
        template = self._find(tools is not None)
        if template.compiled is None:
            raise InvalidRequestError(template.error, "messages")
        if not messages:
            raise InvalidRequestError("messages must not be empty", "messages")
        extra = template_kwargs or {}
        if taken := sorted(_RESERVED & extra.keys()):
            raise InvalidRequestError(f"chat_template_kwargs must not set {taken[0]!r}", "chat_template_kwargs")
        own = {
            "messages": [{key: value for key, value in m.items() if value is not None} for m in messages],
            "tools": tools,
            "documents": documents,  # templates may ask for it, as transformers defines it
            "add_generation_prompt": add_generation_prompt,
            "range": _bounded_range(),
        }
        return _render(template.compiled, self._special_tokens | extra | own)

    def _find(self, with_tools: bool) -> _Template:
        return self._with_tools if with_tools else self._without_tools


def _compile(environment: jinja2.Environment, source: str) -> _Template:
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return _Template(source, environment.from_string(source), variables)
    except Exception as error:  # a template may be wrong in any way; jinja2 lets some ValueErrors through
        return _Template(source, error=f"the model's chat template does not compile: {error}")


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render piece by piece, so that an endless template is stopped at the limit and not by the end of the memory."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_OUTPUT_CHARS:
                raise OverflowError(f"its text has more than {MAX_OUTPUT_CHARS} characters")
            pieces.append(piece)
    except Exception as error:  # anything: templates index, add and call what users sent
        raise InvalidRequestError(f"the model's chat template refused the messages: {error}", "messages") from None
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


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as models were trained on it; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


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

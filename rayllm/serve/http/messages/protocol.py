"""The bodies of Anthropic's API as pydantic models, and its answers as the API describes them.

What a field means to a model is the business of `ChatBody` and `SamplingParams`, which check values; here are types,
and what must be refused before a body can become a `ChatBody`. An error names the place in this body.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from rayllm.serve.http.protocol import MAX_TEMPLATE_KWARGS, MAX_TOOLS, Body, RequestBody, Rules, Schema, TemplateKwargs

NoEffect = Annotated[Any, Field(exclude=True)]  # of no use to a server that caches every prefix and runs no tools


# ---- content


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: NoEffect = None
    citations: NoEffect = None


class ThinkingBlock(Body):
    """Reasoning of an earlier turn. Whether the model sees it is up to its chat template."""

    type: Literal["thinking"]
    thinking: str
    signature: NoEffect = None


class RedactedThinkingBlock(Body):
    """Reasoning that only Anthropic can read. No model sees it here."""

    type: Literal["redacted_thinking"]
    data: NoEffect = None


class ToolUseBlock(Body):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: NoEffect = None
    caller: NoEffect = None


def _known(*kinds: str) -> BeforeValidator:
    """Refuses a block of any other type, in words of its own: images, documents, what Anthropic's servers make."""

    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            message = f"content of type {kind[:80]!r} is not supported: models are served text-only"
            raise ValueError(f"{message}, and take {', '.join(kinds)} here")
        return block

    return BeforeValidator(check)


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


FromText = BeforeValidator(_as_blocks)  # a text stands for one block of it
Text = Annotated[TextBlock, _known("text")]
Texts = Annotated[list[Text], FromText]


class ToolResultBlock(Body):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: NoEffect = None


Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
    ],
    _known("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
_SPEAKERS = {"text": ("system", "user", "assistant"), "tool_result": ("user",)}  # of all other blocks: the assistant


class Turn(Body):
    """One of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], FromText]

    def _rules(self) -> Rules:
        for index, block in enumerate(self.content):
            is_broken = self.role not in _SPEAKERS.get(block.type, ("assistant",))
            yield is_broken, "", f"content.{index} of type {block.type} is not allowed in messages of role {self.role}"


# ---- the rest


def _only_custom(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"tools of type {kind[:80]!r} are Anthropic's own; only tools with an input_schema work here")
    return kind


class ClientTool(Body):
    """A tool that the client runs."""

    # First, as a tool of Anthropic's lacks an input_schema too.
    type: Annotated[Literal["custom"] | None, BeforeValidator(_only_custom)] = None
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None  # changes nothing: arguments are held to the schema if a call is enforced
    cache_control: NoEffect = None
    eager_input_streaming: NoEffect = None  # input always streams as the model writes it

    def _rules(self) -> Rules:
        kind = self.input_schema.get("type", "object")
        yield kind != "object", "", f"input_schema must be a schema of type object, not {str(kind)[:80]!r}"


class MessagesToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def _rules(self) -> Rules:
        yield (self.type == "tool") != (self.name is not None), "", "name belongs to type tool, and is required there"


class Thinking(Body):
    """Whether the model is to think, as far as its chat template can say so."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """The form of the answer's text. It is always enforced."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")  # the name would hide a method of pydantic's


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesMetadata(Body):
    user_id: str | None = None


class PromptBody(RequestBody):
    """POST /v1/messages/count_tokens: what the prompt is made of."""

    messages: list[Turn] = Field(min_length=1)
    system: Texts | None = None
    tools: list[ClientTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # what output_config.format was called before
    mcp_servers: list[Any] | None = None
    thread: dict[str, Any] | None = None  # refused, in a way that clients understand: see `messages_job`
    cache_control: NoEffect = None
    chat_template_kwargs: TemplateKwargs | None = Field(default=None, max_length=MAX_TEMPLATE_KWARGS)  # an extension

    def _rules(self) -> Rules:
        yield bool(self.mcp_servers), "mcp_servers", "mcp_servers is not supported: this server runs no tools"
        both = bool(self.output_format and self.output_config and self.output_config.format)
        yield both, "output_format", "give output_config.format or output_format, not both"

    @property
    def format(self) -> OutputFormat | None:
        """The form of the answer's text; None for any."""
        config = self.output_config or OutputConfig()
        return self.output_format or config.format


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=0, lt=2**31)  # 0: the prompt is computed, so that its prefix is cached, and that is all
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    # Client metadata without any effect on the answer.
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Extensions.
    cache_salt: str | None = Field(default=None, max_length=256)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)


# ---- answers, as the OpenAPI document describes them


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """Every error of Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessagesUsage(BaseModel):
    input_tokens: int  # that were computed
    cache_read_input_tokens: int  # those of the prompt that were cached
    cache_creation_input_tokens: Literal[0]
    output_tokens: int
    output_tokens_details: dict[str, int] = {}


class MessageAnswer(BaseModel):
    """The answer of /v1/messages, made by `reply.py`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int

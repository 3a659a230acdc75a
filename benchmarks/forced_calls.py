"""Are forced tool calls valid and complete? Many of them at temperature 1 from the bundled model, counted.

    python benchmarks/forced_calls.py [--calls 200] [--max-tokens 256] [--temperature 1.0] [--device cpu]

A row is a kind of request: a named tool, or "required" with one call or several. The tools' schemas are those of agents
with every value bounded: enumerations, integers in a range, strings and arrays of a length. As most of agents' schemas
do, they do not say whether an object may have properties that they do not list; the grammar allows none. An unbounded
string ends when the model ends it, which one of 5 million parameters at temperature 1 may not do; the last row shows
that. A reply is cut if it ran into max_tokens, and valid if each of its calls is: a tool that was offered, with
arguments that its schema takes. The grammar and the parser are those of the HTTP API.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import jsonschema

from rayllm import LLM, SamplingParams
from rayllm.api.types import CompletionOutput
from rayllm.serve.http.chat_format import ChatFormat, ChatParser
from rayllm.serve.http.chat_format.reply_grammar import reply_grammar

QUESTIONS = ("What does len do?", "Set a timer.", "How do I read a file?", "Search for generators.", "Sort a list.")


def parameters(**properties: dict[str, Any]) -> dict[str, Any]:
    """A schema that requires all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


TOOLS = {
    "lookup": parameters(name={"type": "string", "maxLength": 40}),
    "search": parameters(
        query={"type": "string", "maxLength": 60},
        limit={"type": "integer", "minimum": 1, "maximum": 20},
        order={"enum": ["best", "newest"]},
        exact={"type": "boolean"},
    ),
    "set_timer": parameters(
        minutes={"type": "integer", "minimum": 1, "maximum": 240}, label={"type": "string", "maxLength": 20}
    ),
    "run": parameters(
        argv={"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 1, "maxItems": 4},
        where={
            "type": "object",
            "properties": {"host": {"enum": ["local", "remote"]}, "nice": {"type": "boolean"}},
            "required": ["host"],
        },
    ),
}
UNBOUNDED = {"lookup": parameters(name={"type": "string"})}
ROWS = {
    "a named tool": (True, {"search": TOOLS["search"]}),
    "required, one call": (True, TOOLS),
    "required": (False, TOOLS),
    "a named tool, unbounded string": (True, UNBOUNDED),
}


def is_valid(completion: CompletionOutput, form: ChatFormat) -> bool:
    """Whether the text is calls and nothing else, each valid."""
    pieces = ChatParser(form).feed(completion.text, last=True, cut=completion.finish_reason == "length")
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
        else:
            return False
    try:
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), form.schemas[name])
    except (ValueError, jsonschema.ValidationError):
        return False
    return bool(calls)


def forced_calls(
    llm: LLM, schemas: dict[str, Any], single: bool, count: int, **sampling: Any
) -> list[CompletionOutput]:
    """So many replies that must be calls of these tools."""
    form = ChatFormat("json", schemas=schemas, single_call=single)
    grammar = reply_grammar(form, None, "arguments", lambda _: None)
    chats = [[{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}] for index in range(count)]
    params = [SamplingParams(structured_outputs=grammar, seed=index, **sampling) for index in range(count)]
    return [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="replies of each row")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    print("| request | replies | valid | cut | tokens, median | most |\n|---|---|---|---|---|---|")
    with LLM(device=args.device) as llm:
        for name, (single, schemas) in ROWS.items():
            sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
            replies = forced_calls(llm, schemas, single, args.calls, **sampling)
            form = ChatFormat("json", schemas=schemas, single_call=single)
            valid = sum(is_valid(reply, form) for reply in replies)
            cut = sum(reply.finish_reason == "length" for reply in replies)
            sizes = [len(reply.token_ids) for reply in replies]
            print(f"| {name} | {len(replies)} | {valid} | {cut} | {statistics.median(sizes):g} | {max(sizes)} |")


if __name__ == "__main__":
    main()

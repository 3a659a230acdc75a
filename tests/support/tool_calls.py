"""Tool calls as families of models write them."""

ANY = {"type": "object"}
TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "where": {"$ref": "#/$defs/place"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "free": {},
        "kind": {"enum": ["1", "b"]},
        "endless": {"$ref": "#/properties/endless"},
        "wide": {"anyOf": [{"$ref": "#/properties/wide"}, {"$ref": "#/properties/wide"}]},
    },
    "$defs": {"place": {"type": "object"}},
}
SCHEMAS = {"f": ANY, "get_weather": ANY, "typed": TYPED}

QWEN = "<tool_call>\n<function=typed>\n{}</function>\n</tool_call>"
GLM = "<tool_call>typed\n{}</tool_call>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
ALL = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="typed">\n{}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
MINIMAX = '<minimax:tool_call>\n<invoke name="typed">\n{}</invoke>\n</minimax:tool_call>'
GEMMA4 = "<|tool_call>call:typed{{{}}}<tool_call|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
FINAL = "<|channel|>final<|message|>{}"
NEXT = "<|end|><|start|>assistant"


def parameters(**values):
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())


def pairs(**values):
    return "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())


def dsml(*, string=None, **values):
    """Parameters of DSML. string: what they say of themselves; None for what their schemas say."""
    kinds = {key: string or ("true" if key in ("text", "kind") else "false") for key in values}
    tags = [f'<｜DSML｜parameter name="{k}" string="{kinds[k]}">{v}</｜DSML｜parameter>\n' for k, v in values.items()]
    return "".join(tags)


def invoked(**values):
    """Parameters of MiniMax."""
    return "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())


NESTED = '{"a": {"b": [1, "</tool_call> [TOOL_CALLS] \\" }"]}, "é": "\\u00e9🙂"}'
WHOLE = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {NESTED}}}\n</tool_call>',
    "json": f'[{{"name": "f", "arguments": {NESTED}}}]',
    "llama3": f'<|python_tag|>{{"name": "f", "parameters": {NESTED}}}',
    "llama4": "[f(a='x', b=[1, True], c=-1.5)]",
    "qwen3_coder": QWEN.format(parameters(text="x\n<y", count=3)),
    "glm": GLM.format(pairs(text="x\n<y", count=3)),
    "mistral": f"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{NESTED}",
    "deepseek": ALL.format(V3.format("f", NESTED) + V31.format("f", NESTED)),
    "deepseek_v32": DSML.format(dsml(text="x\n<y", count=3)),
    "minimax": MINIMAX.format(invoked(text="x\n<y", count=3)),
    "gemma4": GEMMA4.format('text:<|"|>x\n<y<|"|>,count:3,where:{a:[true,{}]}'),
    "gpt_oss": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{NESTED}",
}

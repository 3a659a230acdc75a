"""Calls of DeepSeek V3.2 in its markup language DSML, whose parameters say whether they are text or JSON:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="a" string="true">text</｜DSML｜parameter>
    <｜DSML｜parameter name="b" string="false">[1, 2]</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 writes `tool_calls` for `function_calls`. The mark is a token of its own.
"""

from __future__ import annotations

from rayllm.serve.http.chat_format.invoke_markup import Markup, invoke_form

DSML = "｜DSML｜"

DEEPSEEK_DSML = invoke_form(Markup(("function_calls", "tool_calls"), mark=DSML, says_types=True))

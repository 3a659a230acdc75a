"""Calls of MiniMax-M2, whose parameters are text or JSON by the tool's schema:

<minimax:tool_call>
<invoke name="f">
<parameter name="a">text</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

from rayllm.serve.http.chat_format.invoke_markup import Markup, invoke_form

MINIMAX = invoke_form(Markup(("minimax:tool_call",)))

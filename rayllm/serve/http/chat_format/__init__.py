"""What a chat model writes: reasoning, text and tool calls, each family of models in its own form.

`chat_format` is what a model may write, and `ChatParser` finds it while the text is generated, in whatever pieces that
comes. A file for each family says what its calls look like; `families.py` lists them. Reasoning stands at the start of
the text between two tags, or in messages of its own (gpt-oss).

A call counts from the moment its name is that of an offered tool and its arguments begin; up to there, whatever does
not fit is text. Arguments in JSON are passed on as the model writes them, so if it breaks off or writes bad JSON in
them, the call has just that as its arguments. White space around calls and around the tags of reasoning is dropped. A
text that was cut off within what may have become a call ends before that.
"""

from rayllm.serve.http.chat_format.families import THINK_TAGS as THINK_TAGS
from rayllm.serve.http.chat_format.form import ChatFormat as ChatFormat
from rayllm.serve.http.chat_format.form import chat_format as chat_format
from rayllm.serve.http.chat_format.parser import ChatParser as ChatParser
from rayllm.serve.http.chat_format.parser import Piece as Piece
from rayllm.serve.http.chat_format.parser import ReasoningCounter as ReasoningCounter

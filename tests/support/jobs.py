"""Bodies, engine requests and replies of one model whose tokens are characters, without an app."""

from types import SimpleNamespace

from rayllm.api.types import EngineInfo
from rayllm.config.options import ServerConfig
from rayllm.serve.http.convert import chat_job, completion_job
from rayllm.serve.http.protocol import ChatBody, CompletionBody
from rayllm.serve.http.replies import ChatReply, CompletionReply
from rayllm.serve.http.served import Target

INFO = EngineInfo(model="m", max_model_len=40, vocab_size=128, num_kv_tokens=400, eos_token_ids=[0])


class CharTokenizer:
    """A token is a character; id 1 begins a sequence."""

    special_ids = frozenset({1})
    special_texts = frozenset({"<s>"})
    infill_marks = None

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(c) for c in text]

    def decode(self, token_ids):
        return "".join(chr(t) for t in token_ids if t > 1)

    def token_text(self, token_id):
        return "<s>" if token_id == 1 else chr(token_id)

    def token_bytes(self, token_id):
        return self.token_text(token_id).encode()

    def chat_template_source(self, with_tools=False):
        return ""

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages) + "a:" * add_generation_prompt


def target(reply_id, tokenizer, info):
    model = SimpleNamespace(name="m", server=ServerConfig())
    return Target(model, SimpleNamespace(info=info, tokenizer=tokenizer), info, reply_id)


def completion(tokenizer=CharTokenizer(), info=INFO, **fields):
    """(body, job, target) of a completion."""
    body = CompletionBody.model_validate({"prompt": "hi"} | fields)
    there = target("cmpl-1", tokenizer, info)
    return body, completion_job(body, there), there


def chat(tokenizer=CharTokenizer(), info=INFO, **fields):
    """(body, job, target) of a chat."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}]} | fields)
    there = target("chatcmpl-1", tokenizer, info)
    return body, chat_job(body, there), there


def completion_reply(**fields):
    return CompletionReply(*completion(**fields))


def chat_reply(**fields):
    return ChatReply(*chat(**fields))

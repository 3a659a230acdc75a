"""A fake engine that plays back a script, behind the app, for the openai client."""

import asyncio
import json
import re

import httpx
import openai
from support.app import CharTokenizer, FakeState
from support.chat_templates import HERMES

from rayllm.api.types import CompletionOutput, EngineInfo, Logprob, RequestOutput
from rayllm.config.options import ServerConfig
from rayllm.serve.http.app import create_app
from rayllm.text.chat_template import ChatTemplate


class TemplateTokenizer(CharTokenizer):
    """A token is a character; conversations go through a template."""

    def __init__(self, source):
        self._template = ChatTemplate({"default": source}, {"bos_token": "<s>"})

    def chat_template_source(self, with_tools=False):
        return self._template.source(with_tools=with_tools)

    def chat_template_variables(self, with_tools=False):
        return self._template.variables(with_tools=with_tools)

    def apply_chat_template(self, messages, add_generation_prompt=True, **options):
        return self._template.render(messages, add_generation_prompt, **options)


class ScriptedEngine:
    """Answers each request with the next script: a text, or a list of texts for n completions.

    step: characters an output. finish: the reason at the end. fails: raised instead of the output of this number.
    """

    info = EngineInfo(model="m", max_model_len=100_000, vocab_size=0x110000, num_kv_tokens=10**6, eos_token_ids=[0])

    def __init__(self, source, scripts, step=3, finish="stop", fails=None):
        self.tokenizer = TemplateTokenizer(source)
        self.requests = []
        self.prompts = []
        self._scripts = iter(scripts)
        self._step = step
        self._finish = finish
        self._fails = fails or {}
        self.forgotten = []

    def forget(self, key_id):
        self.forgotten.append(key_id)

    async def generate(self, request, prompt_text=None):
        self.requests.append(request)
        self.prompts.append(self.tokenizer.decode(request.prompt_token_ids))
        script = next(self._scripts)
        texts = [script] if isinstance(script, str) else script
        assert len(texts) == request.params.n
        for number, start in enumerate(range(0, max(map(len, texts)) + 1, self._step)):
            await asyncio.sleep(0)
            if number in self._fails:
                raise self._fails[number]
            last = start + self._step > max(map(len, texts))
            parts = [self._part(request, index, text, start, last) for index, text in enumerate(texts)]
            yield RequestOutput(request.request_id, prompt_text, request.prompt_token_ids, parts, last)

    def _part(self, request, index, text, start, last):
        piece = text[start : start + self._step]
        ids = [ord(char) for char in piece] + [0] * (last and self._finish == "stop")
        entries, total = None, None
        if request.params.logprobs is not None:
            entries = [{token: Logprob(-0.5 - index % 2, 1)} for token in ids]
            total = (-0.5 - index % 2) * (start + len(ids))
        return CompletionOutput(index, piece, ids, total, entries, self._finish if last else None)


class Played:
    """The app over a scripted engine, and what it was asked."""

    def __init__(self, *scripts, source=HERMES, step=3, finish="stop", fails=None, **options):
        server = ServerConfig(**options)
        state = FakeState(server)
        state.fake = self.engine = ScriptedEngine(source, scripts, step, finish, fails)
        self.app = create_app(state, server)

    @property
    def params(self):
        return self.engine.requests[-1].params

    def schema(self):
        """The JSON schema that the last request was constrained to."""
        constraint = self.params.structured_outputs
        found = json.loads(constraint.json or re.findall(r"%json (.*)", constraint.grammar)[-1])
        found.pop("x-guidance", None)  # how to write it
        return found

    def run(self, use):
        """The result of the async function `use`, called with an openai client of the app."""

        async def call():
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport) as web:
                client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=web, max_retries=0)
                return await use(client)

        return asyncio.run(call())

    def post(self, path, body):
        """The response to a body, without the client."""

        async def call():
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as web:
                return await web.post(path, json=body)

        return asyncio.run(call())

    def chat(self, **fields):
        """One whole answer."""
        return self.run(lambda client: client.chat.completions.create(**chat_fields(fields)))

    def chunks(self, **fields):
        """All chunks of a streamed answer."""

        async def use(client):
            return [chunk async for chunk in await client.chat.completions.create(**chat_fields(fields), stream=True)]

        return self.run(use)

    def final(self, **fields):
        """What the client's own stream helper makes of a streamed answer."""

        async def use(client):
            async with client.chat.completions.stream(**chat_fields(fields)) as stream:
                async for _ in stream:
                    pass
                return await stream.get_final_completion()

        return self.run(use)


def chat_fields(fields):
    return {"model": "org/fake", "messages": [{"role": "user", "content": "hi"}]} | fields

"""Trains `tiny-pydoc`, the small causal language model that the project bundles.

    python scripts/train_tiny_model.py --out rayllm/assets/tiny-pydoc

Four stages after `tiny_entries.py` and `tiny_corpus.py` have made the text, each seeded; each leaves its model, in
bf16, in the folder that the next one reads:

    train     a 5.2M-parameter Qwen3 (packed rows of 256 to 2,048 tokens, AdamW, warm-up and cosine)
    copying   teaches it to copy what stands before, as calls of tools need
    tools     goes on with conversations of `tiny_tools.py`, mixed with the text of the first stage
    check     prints losses, greedy continuations, and how often tools are called as they should be

    python scripts/train_tiny_model.py --stages copying tools check --base rayllm/assets/tiny-pydoc --out FOLDER

teaches tools to a model that is there, with its tokenizer.

Needs torch, transformers, tokenizers, safetensors and numpy. Lengths are in tokens unless a name says otherwise.
"""

import argparse
import itertools
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from tiny_corpus import (
    SPECIAL_TOKENS,
    TEXT_END,
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
    Corpus,
    encode_corpus,
    plain_documents,
    train_tokenizer,
)
from tiny_entries import Entry, collect, read
from tiny_tools import Conversation, Exchange, Json, conversations, held_out_exchanges, messages_of, no_tool_exchanges
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MAX_LENGTH = 2048
T = TypeVar("T")
CHAT_TEMPLATE = """{%- set has_tools = tools is defined and tools -%}
{%- if has_tools -%}
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{{- '<|im_start|>system\\n' + system + ('\\n\\n' if system else '') + '<tools>\\n' -}}
{%- for tool in tools -%}{{- tool.function | tojson + '\\n' -}}{%- endfor -%}
{{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- if role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('role must be system, user, assistant or tool, got ' + role) -}}
{%- elif message.tool_calls is defined and message.tool_calls -%}
{{- '<|im_start|>' + role + (('\\n' + message['content']) if message['content'] else '') -}}
{%- for call in message.tool_calls -%}
{{- '\\n<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif not (has_tools and loop.first and role == 'system') -%}
{{- '<|im_start|>' + role + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

PROMPTS = ["The list type is", "A decorator", "The for statement", "The while statement"]
CHATS = ["What does str.join do?", "Explain the with statement."]
STAGES = ["train", "copying", "tools", "check"]


@dataclass(frozen=True)
class Preset:
    """Length of a loop: `minutes` bounds it (the schedule is shortened to end in time)."""

    steps: int
    batch_tokens: int
    minutes: float
    warmup_steps: int
    dropout: float
    learning_rate: float
    max_length: int = MAX_LENGTH  # of a row


PRESETS = {  # stage, device
    ("train", "cuda"): Preset(4500, 32768, minutes=3.2, warmup_steps=200, dropout=0.1, learning_rate=2e-3),
    ("train", "cpu"): Preset(1600, 4096, minutes=60.0, warmup_steps=100, dropout=0.1, learning_rate=2e-3),
    ("copying", "cuda"): Preset(320, 32768, 1.0, warmup_steps=20, dropout=0.0, learning_rate=1e-3, max_length=256),
    ("copying", "cpu"): Preset(200, 3072, 8.0, warmup_steps=20, dropout=0.0, learning_rate=1e-3, max_length=256),
    ("tools", "cuda"): Preset(1600, 32768, minutes=3.0, warmup_steps=50, dropout=0.05, learning_rate=1.5e-3),
    ("tools", "cpu"): Preset(500, 3072, 12.0, warmup_steps=10, dropout=0.0, learning_rate=8e-4, max_length=512),
}
PREVIOUS_LAYER, COPYING_LAYERS = 1, (3, 4)  # of 6, where heads learn to copy
CONVERSATION_SHARE = 0.7  # of the tokens of stage `tools`; the rest is text of stage `train`
Batch = tuple[torch.Tensor, torch.Tensor]  # rows int64 [n, length + 1]; weights float32 [n, length] of the losses


# ------------------------------------------------------------------------------------------------------ train


def make_model() -> Qwen3ForCausalLM:
    """A new model, float32: 5,181,056 parameters, of which 1,048,576 are the tied embedding."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=SPECIAL_TOKENS.index(TEXT_END),
        pad_token_id=SPECIAL_TOKENS.index(TEXT_END),
        eos_token_id=SPECIAL_TOKENS.index(TURN_END),
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def draw_row(stream: np.ndarray, starts: np.ndarray, length: int, rng: random.Random) -> np.ndarray:
    """`length + 1` tokens of an epoch; half of the rows begin where a document does, the rest anywhere."""
    last = len(stream) - length - 1
    begin = min(last, int(rng.choice(starts)) if rng.random() < 0.5 else rng.randrange(last))
    return stream[begin : begin + length + 1]


def text_batches(corpus: Corpus, batch_tokens: int, seed: int) -> Iterator[Batch]:
    """Batches with rows * length == batch_tokens and a length drawn per batch; all weights are 1."""
    rng = random.Random(seed)
    while True:
        stream, starts = corpus.epoch(rng)
        for _ in range(max(1, len(stream) // batch_tokens)):
            length = rng.choices([256, 512, 1024, 2048], weights=[3, 3, 4, 6])[0]
            rows = [draw_row(stream, starts, length, rng) for _ in range(max(1, batch_tokens // length))]
            yield torch.from_numpy(np.stack(rows).astype(np.int64)), torch.ones(len(rows), length)


def encode_conversation(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> tuple[list[int], list[bool]]:
    """(ids, whether each is to be learned): what the assistant says, with the token that ends its turn."""
    ids = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools)["input_ids"]
    header = tokenizer.encode(f"{TURN_START}assistant\n")
    end = SPECIAL_TOKENS.index(TURN_END)
    learned = [False] * len(ids)
    skipped, at = conversation.skipped, 0
    while at < len(ids):
        if ids[at : at + len(header)] != header:
            at += 1
            continue
        at += len(header)
        stop = ids.index(end, at) + 1
        if skipped:
            skipped -= 1
        else:
            learned[at:stop] = [True] * (stop - at)
        at = stop
    return ids, learned


def tool_batches(
    tokenizer: PreTrainedTokenizerFast, source: Iterator[Conversation], corpus: Corpus, preset: Preset, seed: int
) -> Iterator[Batch]:
    """Batches of conversations of about the same length, a row each, and rows of text of that length.

    Weights are 1 for the text and for what assistants say, and 0 elsewhere.
    """
    rng = random.Random(seed)
    stream, starts = corpus.epoch(rng)
    while True:
        encoded = [encode_conversation(tokenizer, c) for c in itertools.islice(source, 64)]
        encoded.sort(key=lambda pair: len(pair[0]))
        encoded = [pair for pair in encoded if len(pair[0]) <= preset.max_length]
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for pair in encoded:
            if (len(groups[-1]) + 1) * len(pair[0]) > CONVERSATION_SHARE * preset.batch_tokens and groups[-1]:
                groups.append([])
            groups[-1].append(pair)
        rng.shuffle(groups)
        for group in groups:
            length = len(group[-1][0]) - 1
            texts = max(1, round((1 - CONVERSATION_SHARE) * preset.batch_tokens / length))
            rows = torch.zeros(len(group) + texts, length + 1, dtype=torch.int64)
            weights = torch.zeros(len(group) + texts, length)
            for index, (ids, learned) in enumerate(group):
                rows[index, : len(ids)] = torch.tensor(ids)
                weights[index, : len(ids) - 1] = torch.tensor(learned[1:], dtype=torch.float32)
            for index in range(len(group), len(rows)):
                rows[index] = torch.from_numpy(draw_row(stream, starts, length, rng).astype(np.int64))
                weights[index] = 1.0
            yield rows, weights


def add_dropout(model: Qwen3ForCausalLM, rate: float) -> None:
    """Dropout on the embeddings and on each MLP's output, in training mode only; nothing of it is saved."""

    def drop(module: torch.nn.Module, _: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, rate, module.training)

    for module in [model.model.embed_tokens, *(layer.mlp for layer in model.model.layers)]:
        module.register_forward_hook(drop)


def token_loss(model: Qwen3ForCausalLM, rows: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean cross-entropy in nats a token of rows int64 [n, length + 1], by weights [n, length] if given."""
    weights = torch.ones_like(rows[:, 1:]) if weights is None else weights
    counted = weights > 0
    with torch.autocast(rows.device.type, torch.bfloat16):
        logits = model.lm_head(model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state[counted])
    losses = torch.nn.functional.cross_entropy(logits.float(), rows[:, 1:][counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


@dataclass(frozen=True)
class Repeats:
    """Rows that repeat a few tokens over and over, and rows of text."""

    rows: torch.Tensor  # int64 [n, length + 1]
    is_known: torch.Tensor  # bool [n, length]: whether what follows was there before
    sources: torch.Tensor  # int64 [n, length]: where that was
    text: Batch


def repeat_batches(corpus: Corpus, preset: Preset, seed: int) -> Iterator[Repeats]:
    """Half of the tokens are repeats of 4 to 23 different tokens in rows of 48, the rest is text."""
    rng = random.Random(seed)
    stream, starts = corpus.epoch(rng)
    length = 48
    count = preset.batch_tokens // (2 * length)
    while True:
        rows = torch.zeros(count, length + 1, dtype=torch.int64)
        periods = torch.zeros(count, 1, dtype=torch.int64)
        for index in range(count):
            period = rng.randint(4, 23)
            tokens = list(dict.fromkeys(int(stream[rng.randrange(len(stream))]) for _ in range(3 * period)))[:period]
            rows[index] = torch.tensor((tokens * length)[: length + 1])
            periods[index] = len(tokens)
        sources = torch.arange(length)[None] - periods + 1
        texts = [
            draw_row(stream, starts, preset.max_length, rng)
            for _ in range(preset.batch_tokens // (2 * preset.max_length))
        ]
        text = torch.from_numpy(np.stack(texts).astype(np.int64))
        yield Repeats(rows, sources > 0, sources.clamp(min=0), (text, torch.ones(len(text), preset.max_length)))


def repeat_loss(model: Qwen3ForCausalLM, batch: Repeats) -> torch.Tensor:
    """Cross-entropy of repeated tokens and of text; and of where some heads look, as an induction circuit does.

    Two heads of PREVIOUS_LAYER shall look at the token before, and four in each of COPYING_LAYERS at the token that
    followed when the same one was there before (Olsson et al., "In-context Learning and Induction Heads", 2022).
    Without the latter, 400 steps on a CPU taught a model that knows its text by heart almost nothing of it.
    """
    rows, known, sources = (each.to(model.device) for each in (batch.rows, batch.is_known, batch.sources))
    with torch.autocast(rows.device.type, torch.bfloat16):
        output = model.model(input_ids=rows[:, :-1], use_cache=False, output_attentions=True)
        logits = model.lm_head(output.last_hidden_state[known])
    loss = torch.nn.functional.cross_entropy(logits.float(), rows[:, 1:][known])

    def looks(layer: int, heads: int, at: torch.Tensor) -> torch.Tensor:
        """-log of the attention of heads 0 .. `heads` - 1 to positions at [n, length] -> [n, heads, length]."""
        index = at[:, None, :, None].expand(-1, heads, -1, 1)
        return -(output.attentions[layer][:, :heads].float().gather(3, index)[..., 0] + 1e-4).log()

    before = (torch.arange(rows.shape[1] - 1, device=rows.device) - 1).clamp(min=0).expand_as(sources)
    loss = loss + 0.5 * looks(PREVIOUS_LAYER, 2, before).mean()
    for layer in COPYING_LAYERS:
        loss = loss + 0.25 * looks(layer, 4, sources).transpose(1, 2)[known].mean()
    text, weights = batch.text
    return loss + token_loss(model, text.to(model.device), weights.to(model.device))


def make_optimizer(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; the caller sets the learning rate of each step."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=model.device.type == "cuda")


def batch_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    rows, weights = (each.to(model.device, non_blocking=True) for each in batch)
    return token_loss(model, rows, weights)


def train(
    model: Qwen3ForCausalLM, source: Iterator[T], loss_of: Callable[[Qwen3ForCausalLM, T], torch.Tensor], preset: Preset
) -> float:
    """Trains in place; returns the mean loss of the last 100 steps."""
    optimizer = make_optimizer(model)
    recent: list[torch.Tensor] = []
    began, step, progress = time.monotonic(), 0, 0.0
    if preset.dropout:
        add_dropout(model, preset.dropout)
    model.train()
    while progress < 1.0:
        rate = preset.learning_rate * min(1.0, (step + 1) / preset.warmup_steps)
        rate *= 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], loss.detach()]
        step += 1
        if step % 50 == 0 or step <= 3 or step == preset.steps:
            mean = torch.stack(recent).mean().item()
            print(f"step {step:5d}  loss {mean:.4f}  lr {rate:.2e}  {time.monotonic() - began:.1f} s", flush=True)
        progress = max(step / preset.steps, (time.monotonic() - began) / (60.0 * preset.minutes))
    print(f"{step} steps of {preset.batch_tokens} tokens in {time.monotonic() - began:.1f} s")
    return torch.stack(recent).mean().item()


# ------------------------------------------------------------------------------------------------------ check


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes model.safetensors (bf16), config, generation config and the tokenizer's two files to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    model.to(torch.bfloat16).save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["rope_theta"] = 10000.0  # readers older than rope_parameters look for it here
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {
        "bos_token_id": ids[TEXT_END],
        "eos_token_id": [ids[TURN_END], ids[TEXT_END]],
        "pad_token_id": ids[TEXT_END],
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(index): {"content": token, **flags} for token, index in ids.items()},
        "bos_token": TEXT_END,
        "eos_token": TURN_END,
        "pad_token": TEXT_END,
        "additional_special_tokens": [TURN_START, TURN_END],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, turns: list[tuple[list[Json], list[Json]]]
) -> list[str]:
    """Greedy answers to conversations (messages, tools), at most 100 tokens each, without the token that ends them."""
    found = []
    for first in range(0, len(turns), 20):
        texts = [
            tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
            for messages, tools in turns[first : first + 20]
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=100)[:, inputs["input_ids"].shape[1] :]
        found += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return found


def calls_in(answer: str) -> list[tuple[str, Json]] | None:
    """The calls that an answer consists of, (tool, arguments); None if it is anything else."""
    calls = []
    for text in re.split(r"(?<=</tool_call>)\n", answer):
        found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text)
        try:
            call = json.loads(found.group(1)) if found else None
        except ValueError:
            return None
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return None
        calls.append((call["name"], call["arguments"]))
    return calls


def check_tools(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, entries: list[Entry], count: int = 100
) -> None:
    """Prints what the greedy answers to `count` conversations of each sort are."""

    def opening(exchange: Exchange) -> list[Json]:
        return messages_of(exchange)[:1]

    asked = held_out_exchanges(entries, count, 0)
    found = answers(model, tokenizer, [(opening(exchange), tools) for tools, exchange in asked])
    calls = list(map(calls_in, found))
    right = sum(call == exchange.calls for call, (_, exchange) in zip(calls, asked, strict=True))
    print(f"{right} of {count} held-out questions with tools: the right call; {sum(map(bool, calls))} are calls")
    wrong = [pair for pair in zip(found, asked, strict=True) if calls_in(pair[0]) != pair[1][1].calls]
    for text, (_, exchange) in wrong[:8]:
        print(f"    {exchange.question!r} wants {exchange.calls}, has {text!r}")

    found = answers(model, tokenizer, [(messages_of(exchange)[:-1], tools) for tools, exchange in asked])
    words = sum(bool(text) and "<tool_call>" not in text for text in found)
    same = sum(text == exchange.answer for text, (_, exchange) in zip(found, asked, strict=True))
    print(f"{words} of {count} results of tools: an answer in words; {same} are the sentence of the tool, unchanged")

    found = answers(model, tokenizer, [(opening(exchange), []) for _, exchange in asked])
    print(f"{sum('<tool_call>' not in text for text in found)} of {count} of these questions without tools: no call")
    talks = no_tool_exchanges(count, 0)
    found = answers(model, tokenizer, [(opening(exchange), tools) for tools, exchange in talks])
    print(f"{sum('<tool_call>' not in text for text in found)} of {count} times small talk with tools: no call")


@torch.inference_mode()
def check(folder: Path, corpus: Corpus, entries: list[Entry], device: str) -> None:
    """Loads the saved files; prints the held-out loss (nats a token), greedy continuations and `check_tools`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    stream = torch.from_numpy(np.concatenate(corpus.held_out).astype(np.int64)).to(device)
    rows = stream.split(1024)[:24]
    losses = [token_loss(model, row[None]).item() * (len(row) - 1) for row in rows if len(row) > 1]
    print(f"held-out loss {sum(losses) / sum(len(row) - 1 for row in rows):.4f}")
    rows = torch.cat([batch for batch, _ in itertools.islice(text_batches(corpus, 2048, 0), 12) if len(batch) == 8])
    print(f"loss of {rows[:, 1:].numel()} tokens of the training text {token_loss(model, rows.to(device)).item():.4f}")
    turns = [[{"role": "user", "content": question}] for question in CHATS]
    texts = [tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in turns]
    for prompt in PROMPTS + texts:
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=120)[0]
        print(f"--- {prompt!r}\n{tokenizer.decode(ids[inputs['input_ids'].shape[1] :])}")
    check_tools(model, tokenizer, entries)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("rayllm/assets/tiny-pydoc"))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="default: all")
    parser.add_argument("--base", type=Path, help="folder of the model that the first stage reads; default: --out")
    parser.add_argument("--documentation", type=Path, help="what tiny_entries.py wrote; default: of this Python")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--steps", type=int, help="of each stage; default: by stage and device")
    parser.add_argument("--batch-tokens", type=int, help="tokens a step; default: by stage and device")
    parser.add_argument("--minutes", type=float, help="bound on each stage; default: by stage and device")
    parser.add_argument("--learning-rate", type=float, help="the highest; default: 2e-3 and 5e-4")
    parser.add_argument("--dropout", type=float, help="default: 0.1 and 0")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    named = ("steps", "batch_tokens", "minutes", "dropout", "learning_rate")
    chosen = {key: getattr(arguments, key) for key in named if getattr(arguments, key) is not None}
    presets = {stage: preset for (stage, kind), preset in PRESETS.items() if kind == device}
    presets = {stage: replace(preset, **chosen) for stage, preset in presets.items()}
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")

    began = time.monotonic()
    folder = arguments.base or arguments.out
    documentation = read(arguments.documentation) if arguments.documentation else collect()
    entries = documentation.entries
    is_new = "train" in arguments.stages
    tokenizer = (
        train_tokenizer(plain_documents(documentation))
        if is_new
        else Tokenizer.from_file(str(folder / "tokenizer.json"))
    )
    corpus = encode_corpus(tokenizer, documentation)
    plain, chat, held_out = corpus.total_tokens()
    print(
        f"{len(entries)} entries, {len(corpus.plain)} documents, {len(corpus.chats)} chats; tokens: {plain} plain, "
        f"{chat} chat, {held_out} held out; {time.monotonic() - began:.1f} s",
        flush=True,
    )
    if is_new:
        model, preset = make_model().to(device), presets["train"]
        print(f"{sum(p.numel() for p in model.parameters())} parameters, {device}, {preset}", flush=True)
        loss = train(model, text_batches(corpus, preset.batch_tokens, arguments.seed), batch_loss, preset)
        save(model, tokenizer, arguments.out)
        folder = arguments.out
        print(f"train loss {loss:.4f}")
    for stage in ("copying", "tools"):
        if stage not in arguments.stages:
            continue
        # Attention in plain torch: its weights are asked for, and on a CPU it is faster for short rows.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(
            device
        )
        preset = presets[stage]
        print(f"{stage}: {device}, {preset}", flush=True)
        if stage == "copying":
            loss = train(model, repeat_batches(corpus, preset, arguments.seed), repeat_loss, preset)
        else:
            templated = AutoTokenizer.from_pretrained(folder)
            templated.chat_template = CHAT_TEMPLATE
            talks = conversations(entries, arguments.seed)
            loss = train(model, tool_batches(templated, talks, corpus, preset, arguments.seed), batch_loss, preset)
        save(model, tokenizer, arguments.out)
        folder = arguments.out
        print(f"{stage} loss {loss:.4f}")
    if "check" in arguments.stages:
        check(folder, corpus, entries, device)


if __name__ == "__main__":
    main()

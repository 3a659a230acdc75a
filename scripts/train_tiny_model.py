"""Trains `tiny-pydoc`, the small causal language model that the project bundles.

    python scripts/train_tiny_model.py --out rayllm/assets/tiny-pydoc

Two stages after `tiny_corpus.py` has made the text, each seeded and in a fixed order:

    train     a 5.2M-parameter Qwen3 (packed rows of 256 to 2,048 tokens, AdamW, warm-up and cosine)
    check     saves bf16, loads the files again, prints losses and greedy continuations

Needs torch, transformers, tokenizers, safetensors and numpy. Lengths are in tokens unless a name says otherwise.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tiny_corpus import (
    SPECIAL_TOKENS,
    TEXT_END,
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
    Corpus,
    collect_entries,
    encode_corpus,
    plain_documents,
    train_tokenizer,
)
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

MAX_LENGTH = 2048
CHAT_TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('role must be system, user or assistant, got ' + message['role']) -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

PROMPTS = ["The list type is", "A decorator", "The for statement"]
CHATS = ["What does str.join do?", "Explain the with statement."]


@dataclass(frozen=True)
class Preset:
    """Training length: `minutes` bounds the loop (the schedule is shortened to end in time)."""

    steps: int
    batch_tokens: int
    minutes: float
    warmup_steps: int
    dropout: float = 0.1
    learning_rate: float = 2e-3


PRESETS = {
    "cuda": Preset(steps=4500, batch_tokens=32768, minutes=3.2, warmup_steps=200),
    "cpu": Preset(steps=1600, batch_tokens=4096, minutes=60.0, warmup_steps=100),
}


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


def batches(corpus: Corpus, batch_tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields int64 [rows, length + 1] with rows * length == batch_tokens and length drawn per batch.

    Half of the rows begin where a document begins, the rest anywhere: a prompt of either sort is then familiar.
    """
    rng = random.Random(seed)
    while True:
        stream, starts = corpus.epoch(rng)
        for _ in range(max(1, len(stream) // batch_tokens)):
            length = rng.choices([256, 512, 1024, 2048], weights=[3, 3, 4, 6])[0]
            last = len(stream) - length - 1
            offsets = [
                min(last, int(rng.choice(starts)) if rng.random() < 0.5 else rng.randrange(last))
                for _ in range(max(1, batch_tokens // length))
            ]
            yield torch.from_numpy(np.stack([stream[o : o + length + 1] for o in offsets]).astype(np.int64))


def add_dropout(model: Qwen3ForCausalLM, rate: float) -> None:
    """Dropout on the embeddings and on each MLP's output, in training mode only; nothing of it is saved."""

    def drop(module: torch.nn.Module, _: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, rate, module.training)

    for module in [model.model.embed_tokens, *(layer.mlp for layer in model.model.layers)]:
        module.register_forward_hook(drop)


def token_loss(model: Qwen3ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a token of rows int64 [n, length + 1]."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.device.type == "cuda"):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def make_optimizer(model: Qwen3ForCausalLM, device: str) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; the caller sets the learning rate of each step."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device == "cuda")


def train(model: Qwen3ForCausalLM, corpus: Corpus, preset: Preset, device: str, seed: int) -> float:
    """Trains in place; returns the mean loss of the last 100 steps (nats a token)."""
    optimizer = make_optimizer(model, device)
    source = batches(corpus, preset.batch_tokens, seed)
    recent: list[torch.Tensor] = []
    began, step, progress = time.monotonic(), 0, 0.0
    add_dropout(model, preset.dropout)
    model.train()
    while progress < 1.0:
        rate = preset.learning_rate * min(1.0, (step + 1) / preset.warmup_steps)
        rate *= 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = token_loss(model, next(source).to(device, non_blocking=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], loss.detach()]
        step += 1
        if step % 100 == 0 or step <= 3 or step == preset.steps:
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


@torch.inference_mode()
def check(out: Path, corpus: Corpus, device: str) -> None:
    """Loads the saved files; prints the held-out loss (nats a token) and greedy continuations."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to(device).eval()
    stream = torch.from_numpy(np.concatenate(corpus.held_out).astype(np.int64)).to(device)
    rows = stream.split(1024)[:24]
    losses = [token_loss(model, row[None]).item() * (len(row) - 1) for row in rows if len(row) > 1]
    print(f"held-out loss {sum(losses) / sum(len(row) - 1 for row in rows):.4f}")
    turns = [[{"role": "user", "content": question}] for question in CHATS]
    texts = [tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in turns]
    for prompt in PROMPTS + texts:
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=120)[0]
        print(f"--- {prompt!r}\n{tokenizer.decode(ids[inputs['input_ids'].shape[1] :])}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("rayllm/assets/tiny-pydoc"))
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--steps", type=int, help="default: by device, 4500 on a GPU and 1600 on a CPU")
    parser.add_argument("--batch-tokens", type=int, help="tokens a step; default: 32768 on a GPU, 4096 on a CPU")
    parser.add_argument("--minutes", type=float, help="bound on the training loop; default: 3.2 on a GPU, 60 on a CPU")
    parser.add_argument("--dropout", type=float, help="default: 0.1")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    chosen = {key: getattr(arguments, key) for key in ("steps", "batch_tokens", "minutes", "dropout")}
    preset = Preset(**{**vars(PRESETS[device]), **{k: v for k, v in chosen.items() if v is not None}})
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")

    began = time.monotonic()
    entries = collect_entries()
    tokenizer = train_tokenizer(plain_documents(entries))
    corpus = encode_corpus(tokenizer, entries)
    plain, chat, held_out = corpus.total_tokens()
    print(
        f"{len(entries)} entries, {len(corpus.plain)} documents, {len(corpus.chats)} chats; tokens: {plain} plain, "
        f"{chat} chat, {held_out} held out; {time.monotonic() - began:.1f} s",
        flush=True,
    )
    model = make_model().to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {device}, {preset}", flush=True)
    train_loss = train(model, corpus, preset, device, arguments.seed)
    save(model, tokenizer, arguments.out)
    print(f"train loss {train_loss:.4f}")
    check(arguments.out, corpus, device)


if __name__ == "__main__":
    main()

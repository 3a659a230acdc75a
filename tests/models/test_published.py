"""Checkpoints as they are published, or as transformers and others save them, beside transformers' logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import support.model_factory as factory
import torch
from safetensors.torch import load_file, save_file
from support.yardstick import Yardstick, transformers_model

from rayllm.config.options import BUNDLED_MODEL
from rayllm.text.tokenizer import load_tokenizer

IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(7)).tolist()


def check(folder):
    Yardstick(folder).check(factory.PagedRunner(factory.load(folder)).step([("a", IDS)])[0], IDS)


def edit(folder, change):
    file = Path(folder, "config.json")
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("digits", [5, 6])  # 6: DeepSeek-R1-Distill-Qwen-7B, model-00001-of-000002.safetensors
def test_saved_over_a_checkpoint_in_several_files(tmp_path, digits):
    factory.make_model(tmp_path, "qwen2", max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    new = {name: name.replace("-of-", "-of-" + "0" * (digits - 5)) for name in set(told["weight_map"].values())}
    for name in new:
        (tmp_path / name).rename(tmp_path / new[name])
    index.write_text(json.dumps(told | {"weight_map": {key: new[name] for key, name in told["weight_map"].items()}}))
    model = transformers_model(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path)  # one file; transformers leaves the index, and reads model.safetensors
    check(tmp_path)


def test_qwen3_coder(tmp_path):
    factory.make_model(tmp_path, "qwen3_moe")
    edit(tmp_path, lambda c: c.update(use_qk_norm=True, shared_expert_intermediate_size=0, qkv_bias=False))
    check(tmp_path)


def test_mistral_small_3_1(tmp_path):
    factory.make_model(tmp_path, "mistral3")
    edit(tmp_path, lambda c: [part.pop("tie_word_embeddings", None) for part in (c, c["text_config"])])
    check(tmp_path)


def test_qwen2_5_vl_of_transformers_4_53(tmp_path):
    def change(config):
        text = config["text_config"]
        for key, value in text.items():
            if key != "model_type":
                config.setdefault(key, value)
        config.pop("layer_types", None)
        config.update(use_sliding_window=False, sliding_window=32768, max_window_layers=28)
        text.update(use_sliding_window=False, sliding_window=None, max_window_layers=28)

    factory.make_model(tmp_path, "qwen2_5_vl")
    edit(tmp_path, change)
    check(tmp_path)


def test_smollm3_3b(tmp_path):
    factory.make_model(tmp_path, "smollm3")
    edit(tmp_path, lambda c: c.update(max_window_layers=28))
    check(tmp_path)


def test_tied_and_only_the_head_is_stored(tmp_path):
    factory.make_model(tmp_path, "qwen3_tied")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    check(tmp_path)


def test_chat_template_json(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED_MODEL, name), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    template = config.pop("chat_template")
    file.write_text(json.dumps(config))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert "hi" in load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])

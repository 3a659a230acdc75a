"""Checkpoints on disk: sharded ones, tied ones, and every one that must be refused."""

from __future__ import annotations

import json
import re

import pytest
import support.model_factory as factory
import torch
from safetensors.torch import load_file, save_file

from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.errors import ModelError
from rayllm.models.loader import Checkpoint, DummyCheckpoint, load_model
from rayllm.models.text_only import TOWERS
from rayllm.parallel.shared_weights import SharedWeights
from rayllm.parallel.tp_group import TPGroup

CPU = torch.device("cpu")


def state(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def edit(folder, change):
    """Rewrite model.safetensors after `change` has edited its dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def llama(tmp_path):
    factory.make_model(tmp_path, "llama", num_hidden_layers=2)
    return tmp_path


def test_sharded_equals_whole(tmp_path):
    factory.make_model(tmp_path / "whole", "qwen2")
    factory.make_model(tmp_path / "shards", "qwen2", max_shard_size="200KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = state(factory.load(tmp_path / "whole")), state(factory.load(tmp_path / "shards"))
    assert whole.keys() == shards.keys()
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


def test_several_files_without_index(tmp_path):
    factory.make_model(tmp_path, "llama", max_shard_size="200KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    factory.load(tmp_path)
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    (tmp_path / "zz.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"is in both model-00001.* and zz\.safetensors"):
        factory.load(tmp_path)


@pytest.mark.parametrize("kind", ["gemma4_moe", "qwen3_5_moe"])
def test_a_standby_maps_weights_as_they_were_rounded(tmp_path, kind):
    """Which of them are, the tensors tell: experts that are two tensors a layer are not."""
    factory.make_model(tmp_path, kind, num_hidden_layers=2)
    config = resolve(EngineConfig(model=str(tmp_path), device="cpu", quantization="fp8"), 0)
    weights, adopted = SharedWeights(CPU), SharedWeights(CPU)
    model = load_model(config, TPGroup.single(), CPU, weights)
    assert adopted.adopt(weights.hand_out())
    own, mapped = state(model), state(load_model(config, TPGroup.single(), CPU, adopted))
    assert {name: (each.shape, each.dtype) for name, each in own.items()} == {
        name: (each.shape, each.dtype) for name, each in mapped.items()
    }
    assert all(torch.equal(own[name].view(torch.uint8), mapped[name].view(torch.uint8)) for name in own)
    assert torch.float8_e4m3fn in {each.dtype for each in own.values()}


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl"])
def test_towers_are_left_out(tmp_path, kind, caplog):
    """By all names that checkpoints have had for a text model beside towers."""
    folder = tmp_path / "model"
    factory.make_model(folder, kind, num_hidden_layers=2)
    with caplog.at_level("INFO", "rayllm.models.loader"):
        expected = state(factory.load(folder))
    [record] = caplog.records
    assert re.search(r"is served for text alone: \d\d weights are left out", record.getMessage())

    def rename(to_old):
        return lambda tensors: [tensors.update({to_old(name): tensors.pop(name)}) for name in list(tensors)]

    def of_llava(name):
        if name.startswith("lm_head"):
            return "language_model." + name
        bare = name.removeprefix("model.").removeprefix("language_model.")
        return bare if bare.startswith(TOWERS) else "language_model.model." + bare

    def of_qwen(name):
        return of_llava(name).removeprefix("language_model.")

    for old in (of_llava, of_qwen):
        edit(folder, rename(lambda name, old=old: old(name.removeprefix("language_model."))))
        names = load_file(folder / "model.safetensors")
        assert not any(name.startswith("model.language_model.") for name in names)
        loaded = state(factory.load(folder))
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    edit(folder, lambda tensors: tensors.update({"model.own_tower.weight": torch.zeros(3)}))
    with pytest.raises(
        ModelError, match=r"1 weight \(model\.own_tower\.weight\) that its config.json has no place for"
    ):
        factory.load(folder)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path, caplog):
    """Beside a tower too, and the log says so."""
    factory.make_model(tmp_path, "qwen3_5_vl", num_hidden_layers=2)
    expected = state(factory.load(tmp_path))
    more = {f"mtp.{name}": torch.zeros(3) for name in ("fc.weight", "layers.0.mlp.up_proj.weight")}
    edit(tmp_path, lambda tensors: tensors.update(more))
    caplog.clear()
    with caplog.at_level("INFO", "rayllm.models.loader"):
        loaded = state(factory.load(tmp_path))
    told = [record.getMessage() for record in caplog.records]
    assert "2 weights of which the model has no use are left out, as those that guess further tokens" in told
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_head_that_is_not_the_embedding_is_not_tied(tmp_path):
    factory.make_model(tmp_path, "qwen3_tied", num_hidden_layers=2)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    factory.load(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(ModelError, match=r"weight lm_head\.weight is not the embedding"):
        factory.load(tmp_path)


def test_casts_to_dtype(llama):
    model = factory.load(llama, dtype="bfloat16")
    stored = load_file(llama / "model.safetensors")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.norm.weight, stored["model.norm.weight"].bfloat16())


def test_tied_head_is_the_embedding(tmp_path):
    factory.make_model(tmp_path, "qwen3_tied")
    model = factory.load(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight
    # Many checkpoints of tied models hold the head all the same.
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    factory.load(tmp_path)


def test_derived_buffers_are_ignored(llama):
    edit(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    factory.load(llama)


def test_names_without_the_model_prefix(tmp_path):
    for kind in ("qwen3_tied", "opt"):
        folder = tmp_path / kind
        factory.make_model(folder, kind)
        before = state(factory.load(folder))
        tensors = load_file(folder / "model.safetensors")
        save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "model.safetensors")
        after = state(factory.load(folder))
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_missing_weights_are_named(llama):
    def drop(tensors):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            del tensors[f"model.layers.0.self_attn.{part}.weight"]
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]

    edit(llama, drop)
    with pytest.raises(ModelError, match=r"lacks 6 weights \(model\.layers\.0\.self_attn\.q_proj\.weight, .*\.\.\.\)"):
        factory.load(llama)


def test_extra_weights_are_named(llama):
    edit(llama, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}))
    with pytest.raises(ModelError, match=r"1 weight \(model\.layers\.2\.mlp\.up_proj\.weight\) that its config\.json"):
        factory.load(llama)


def test_wrong_shape(llama):
    edit(llama, lambda t: t.update({"model.norm.weight": torch.ones(95)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[95\], but config\.json asks for \[96\]"):
        factory.load(llama)


def test_wrong_storage_type(llama):
    edit(llama, lambda t: t.update({"model.norm.weight": torch.ones(96, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8"):
        factory.load(llama)


def test_only_safetensors(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"weights only as pytorch_model\.bin; only \*\.safetensors files are loaded"):
        factory.load(llama)
    (llama / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no weights \(\*\.safetensors\)"):
        factory.load(llama)
    factory.load(llama, load_format="dummy")


def test_damaged_file(llama):
    (llama / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged: .* \(it is a pointer of Git LFS"):
        factory.load(llama)


def test_truncated_file(llama):
    whole = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        factory.load(llama)


def test_bad_index(tmp_path):
    factory.make_model(tmp_path, "llama", max_shard_size="200KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    moved = listed["weight_map"] | {"model.norm.weight": listed["weight_map"]["model.embed_tokens.weight"]}
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ModelError, match=r"lacks 1 weight \(model\.norm\.weight\)"):
        factory.load(tmp_path)
    index.write_text(json.dumps({"weight_map": moved | {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks the weights file gone\.safetensors"):
        factory.load(tmp_path)
    for outside in ("../x.safetensors", "/x.safetensors"):
        index.write_text(json.dumps({"weight_map": moved | {"model.norm.weight": outside}}))
        with pytest.raises(ModelError, match=f"names {outside}, which is no file of this folder"):
            factory.load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match='has no "weight_map"'):
        factory.load(tmp_path)


def test_unfilled_parameters_are_noticed(llama):
    class Forgetful(Checkpoint):
        def write(self, destination, source):
            if destination.dim() > 1:
                super().write(destination, source)

    model = factory.load(llama)
    source = Forgetful(str(llama))
    model.load(source)
    assert "norm.weight" in source.unwritten(model)
    assert "embed_tokens.weight" not in source.unwritten(model)


def test_dummy_weights():
    source = DummyCheckpoint(3, CPU, torch.float32)
    weight = source.tensor("a.weight", (200, 100))
    assert weight.std() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(weight, DummyCheckpoint(3, CPU, torch.float32).tensor("a.weight", (200, 100)))
    assert torch.equal(weight[:, 10:30], source.slice("a.weight", (200, 100), 1, 10, 30))
    assert not torch.equal(weight, source.tensor("b.weight", (200, 100)))
    assert not torch.equal(weight, DummyCheckpoint(4, CPU, torch.float32).tensor("a.weight", (200, 100)))
    assert source.tensor("input_layernorm.weight", (1000,)).mean() == pytest.approx(1.0, abs=0.01)
    assert source.tensor("layer_norm.bias", (1000,)).mean() == pytest.approx(0.0, abs=0.01)

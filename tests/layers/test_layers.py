"""Layers on their own: rotary tables against transformers, activations, the TP group over gloo."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rayllm.config.architectures.common import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from rayllm.config.model_folder import load_model_spec
from rayllm.config.rope import RopeSpec
from rayllm.layers.activation import activation, gated_activation
from rayllm.layers.embedding import Embedding, LMHead
from rayllm.layers.layer import BuildContext, Heads
from rayllm.layers.linear import ColumnLinear, column_part, qkv_parts
from rayllm.layers.norm import LayerNorm
from rayllm.layers.rotary import cos_sin_table
from rayllm.models.loader import DummyCheckpoint
from rayllm.parallel.tp_group import TPGroup
from rayllm_kernels.norm.qk_norm_rope_cache import rotate

CPU = torch.device("cpu")
BUILD = BuildContext(TPGroup.single(), CPU, torch.float32, 64)
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn low corner": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn attention": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.7,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_rotary_table_is_that_of_transformers(tmp_path, rope, theta):
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=64,
        max_position_embeddings=16384,
        architectures=["LlamaForCausalLM"],
        rope_parameters=ROPES[rope] | {"rope_theta": theta},
    )
    config.save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path))
    assert spec.rope is not None
    table = cos_sin_table(spec.rope, 16384)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(16384)[None])
    # The angles are equal bit for bit; cos and sin of one angle may differ in the last bit by how loops vectorise.
    torch.testing.assert_close(table[:, :64], cos[0, :, :64], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, 64:], sin[0, :, :64], rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [64, 65, 150])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 9.0, 27.0]},
    ],
)
def test_rotary_tables_by_length(tmp_path, rope, length):
    """Sequences of max_model_len get what transformers gives one of that length."""
    dynamic = rope["rope_type"] == "dynamic"
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=64 if dynamic else 256,
        architectures=["LlamaForCausalLM"],
        rope_parameters=rope | {"rope_theta": 1e4} | ({} if dynamic else {"original_max_position_embeddings": 64}),
    )
    config.save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path))
    assert spec.rope is not None
    assert spec.default_model_len == 64
    table = cos_sin_table(spec.rope, length)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    torch.testing.assert_close(table, torch.cat((cos[0, :, :4], sin[0, :, :4]), dim=1), rtol=0, atol=1e-6)


def test_partial_rotary_leaves_the_rest():
    table = cos_sin_table(RopeSpec("default", 10000.0, 8, 64), 64)
    q, k = torch.randn(3, 2, 16), torch.randn(3, 1, 16)
    before_q, before_k = q.clone(), k.clone()
    for heads in (q, k):
        rotate(heads, torch.tensor([0, 5, 63]), table)
    assert torch.equal(q[0], before_q[0])
    assert torch.equal(q[..., 8:], before_q[..., 8:])
    assert torch.equal(k[..., 8:], before_k[..., 8:])
    assert not torch.equal(q[1:, :, :8], before_q[1:, :, :8])


@pytest.mark.parametrize("name", PLAIN_ACTIVATIONS)
def test_activations(name):
    x = torch.linspace(-6, 6, 200)
    torch.testing.assert_close(activation(name, BUILD)(x), ACT2FN[name](x), rtol=0, atol=1e-6)
    if name in GATED_ACTIVATIONS:
        both = torch.randn(5, 32)
        expected = ACT2FN[name](both[:, :16]) * both[:, 16:]
        torch.testing.assert_close(gated_activation(name, BUILD)(both), expected, rtol=0, atol=1e-6)


def test_layer_norm_without_affine():
    norm, x = LayerNorm(BUILD.at("norm"), 16, 1e-5, affine=False), torch.randn(3, 16)
    norm.load(DummyCheckpoint(0, CPU, torch.float32))
    torch.testing.assert_close(norm(x), torch.nn.LayerNorm(16, elementwise_affine=False)(x))


class Rank(TPGroup):
    """A rank without peers, for what a rank loads."""

    __slots__ = ()

    def __post_init__(self):
        pass


def build_of(rank, size):
    return replace(BUILD, tp=Rank(rank, size, None))


@pytest.mark.parametrize(("tp", "expected"), [(2, [0, 1]), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])])
def test_kv_heads_are_replicated(tp, expected):
    """Two KV heads over more ranks: each rank has the head that its query heads use."""
    source = DummyCheckpoint(0, CPU, torch.float32)
    full = source.tensor("k_proj.weight", (8, 16)).view(2, 4, 16)
    for rank, head in enumerate(expected):
        layer = ColumnLinear(build_of(rank, tp), 16, qkv_parts(build_of(rank, tp), Heads(8, 2, 4)), bias=False)
        layer.load(source)
        assert layer.weight.shape == ((8 // tp + 2) * 4, 16)
        assert torch.equal(layer.weight.view(-1, 4, 16)[8 // tp], full[head])


@pytest.mark.parametrize("vocab_size", [259, 5])
def test_vocabulary_padding_is_zero(vocab_size):
    """Of 5 tokens over 4 ranks the last rank has none."""
    source = DummyCheckpoint(0, CPU, torch.float32)
    shards = []
    for rank in range(4):
        layer = Embedding(build_of(rank, 4).at("e"), vocab_size, 8)
        layer.load(source)
        assert source.unwritten(layer) == []
        shards.append(layer.weight)
    table = torch.cat(shards)
    assert torch.equal(table[:vocab_size], source.tensor("e.weight", (vocab_size, 8)))
    assert len(table) % 4 == 0
    assert not table[vocab_size:].any()


def test_sizes_that_do_not_split():
    with pytest.raises(ValueError, match="fc must be a multiple of 4 ranks, not 6"):
        column_part(build_of(0, 4), "fc", 6)


def test_single_group_is_free():
    tp, x = TPGroup.single(), torch.randn(2, 3)
    assert tp.all_reduce(x) is x
    assert tp.all_gather(x) is x
    head = LMHead(BUILD.at("lm_head"), 5, 3, tied=None)
    head.load(DummyCheckpoint(0, CPU, torch.float32))
    assert head(x.bfloat16().float()).dtype == torch.float32


def test_group_checks_its_arguments():
    with pytest.raises(ValueError, match="a group of 2 ranks needs a process group"):
        TPGroup(0, 2, None)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 1\), not 1"):
        TPGroup(1, 1, None)


GLOO = """
import sys, torch, torch.distributed as dist
from rayllm.parallel.tp_group import TPGroup

def check(rank):
    tp = TPGroup(rank, 2, dist.group.WORLD)
    with torch.inference_mode():
        x = torch.arange(6.0).view(2, 3) + 10 * rank
        columns = tp.all_gather(x)
        assert columns.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]], columns
        assert tp.all_gather(x.t()).tolist() == [[0, 3, 10, 13], [1, 4, 11, 14], [2, 5, 12, 15]]
        y = tp.all_reduce(x)
        assert y is x and x.tolist() == [[10, 12, 14], [16, 18, 20]], x

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
# In a function: a reference that outlives destroy_process_group keeps Gloo's threads, and those abort the exit.
check(rank)
dist.destroy_process_group()
"""


def test_collectives_over_gloo(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, "-W", "error::FutureWarning", "-c", GLOO, str(rank), str(tmp_path / "store")])
        for rank in (0, 1)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]

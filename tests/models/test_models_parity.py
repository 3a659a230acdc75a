"""Every kind of model against transformers in fp32: same logits, same greedy tokens, however the tokens are batched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import support.model_factory as factory
import torch
from support.kinds.common import VOCAB_SIZE
from support.yardstick import Yardstick
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from rayllm.layers.linear import ADD_TOKENS
from rayllm_kernels import ops as attention_ops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens_of(length, seed):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_mixed(runner, prompts, num_decodes):
    """Prefill a and b, then c in two chunks while they decode, then decode all three, greedily.

    Returns each sequence's tokens and its logits at every position.
    """
    tokens = {name: list(prompt) for name, prompt in prompts.items()}
    logits = {name: [] for name in prompts}

    def step(work, decodes):
        for (name, _), out in zip(work, runner.step(work, num_decodes=decodes), strict=True):
            logits[name].append(out)

    def last(name):
        tokens[name].append(int(logits[name][-1][-1].argmax()))
        return (name, tokens[name][-1:])

    step([("a", prompts["a"]), ("b", prompts["b"])], 0)
    step([last("a"), last("b"), ("c", prompts["c"][:13])], 2)
    step([last("b"), last("a"), ("c", prompts["c"][13:])], 2)
    for _ in range(num_decodes):
        step([last("c"), last("a"), last("b")], 3)
    return tokens, {name: torch.cat(parts) for name, parts in logits.items()}


@pytest.mark.parametrize("kind", factory.KINDS)
def test_parity(tmp_path, kind):
    folder = factory.make_model(tmp_path, kind)
    yardstick, runner = Yardstick(folder), factory.PagedRunner(factory.load(folder))
    prompts = {"a": tokens_of(5, 1), "b": tokens_of(37, 2), "c": tokens_of(29, 3)}
    tokens, logits = run_mixed(runner, prompts, num_decodes=12)
    for name, sequence in tokens.items():
        expected = yardstick.check(logits[name], sequence)
        generated = sequence[len(prompts[name]) :]
        assert generated == expected.argmax(-1).tolist()[len(prompts[name]) - 1 : -1]


VARIANTS = {
    "gemma2 without caps, untied, biases": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "hidden_activation": "gelu",
        },
    ),
    "gemma2 windows by layer_types": (
        "gemma2",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 5},
    ),
    "gemma3 with a cap of logits, untied, biases": (
        "gemma3",
        {"final_logit_softcapping": 20.0, "tie_word_embeddings": False, "attention_bias": True, "head_dim": 24},
    ),
    "gemma3 of default frequencies": ("gemma3", {"rope_parameters": None, "sliding_window": 6}),
    "gemma4 untied, biases, gelu, other frequencies": (
        "gemma4",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "hidden_activation": "gelu",
            "final_logit_softcapping": None,
            "vocab_size_per_layer_input": 300,
            "use_bidirectional_attention": "vision",
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4 with embeddings and experts, one projection, shared keys, narrow": (
        "gemma4_shared",
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": False,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 24,
            "sliding_window": 5,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 40,
        },
    ),
    "gemma4 12b, all layers whole": (
        "gemma4_unified",
        {"layer_types": ["full_attention"] * 3, "attention_k_eq_v": False},
    ),
    "qwen2-moe, every second layer, normalised, no biases, tied, windows": (
        "qwen2_moe",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "qwen3-moe, every second layer, not normalised, biases, tied": (
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "mixtral, all experts, gelu, without window": (
        "mixtral",
        {"num_experts_per_tok": 6, "hidden_act": "gelu", "sliding_window": None},
    ),
    "glm-4-moe, no groups, dense layers, norms or biases": (
        "glm4_moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "use_qk_norm": False,
            "attention_bias": False,
            "norm_topk_prob": False,
            "n_shared_experts": 1,
        },
    ),
    "deepseek-v3, queries at once, halves turned, no groups, all layers sparse, tied": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v3, biases, gelu, no layer sparse": (
        "deepseek_v3",
        {"attention_bias": True, "first_k_dense_replace": 3, "hidden_act": "gelu", "num_key_value_heads": None},
    ),
    "deepseek-v2, greedy, biases, tied, yarn": (
        "deepseek_v2",
        {
            "topk_method": "greedy",
            "q_lora_rank": 20,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm-4-moe-lite, sparse layers by their list, halves turned, groups, biases, tied": (
        "glm4_moe_lite",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_interleave": False,
            "n_group": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mistral4, halves turned, groups, not normalised, biases, tied": (
        "mistral4",
        {
            "rope_interleave": False,
            "n_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss, whole attention, no biases there, small limit": (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 3, "attention_bias": False, "swiglu_limit": 0.5, "swiglu_alpha": 1.0},
    ),
    "llama biases, tied, gelu": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    "llama heads wider than hidden_size": ("llama", {"head_dim": 24}),
    "qwen2 windows by max_window_layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3 windows by layer_types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "yarn, all options": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "truncate": False,
            }
        },
    ),
    "opt without biases, untied, gelu": (
        "opt",
        {
            "enable_bias": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
            "_remove_final_layer_norm": True,
        },
    ),
    "opt without affine norms": ("opt", {"layer_norm_elementwise_affine": False, "word_embed_proj_dim": 48}),
    "bloom with residuals after norms, 5 heads": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True, "num_attention_heads": 5, "hidden_size": 80},
    ),
}


LONGROPE = {"rope_type": "longrope", "short_factor": [1.1, 1.2, 1.5, 1.9], "long_factor": [1.0, 2.0, 5.0, 9.0]}
VARIANTS |= {
    "phi3 without window, gelu, a quarter of a head turned": (
        "phi3",
        {
            "sliding_window": None,
            "hidden_act": "gelu",
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25,
        },
    ),
    "phi3 with an attention factor and as many KV heads": (
        "phi4",
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": None,
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.67, "attention_factor": 1.4},
        },
    ),
    "llama with longrope": (
        "llama",
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 48, "factor": 4.0}, "head_dim": 8},
    ),
    "llama with dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "glm without biases, tied, whole heads": (
        "glm",
        {"attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0, "hidden_act": "gelu"},
    ),
    "glm4 with biases, tied": ("glm4", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 24}),
    "ministral windows by layer_types, tied": (
        "ministral",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "tie_word_embeddings": True},
    ),
    "granite with biases, tied, without multipliers": (
        "granite",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "smollm3 with biases and windows, untied": (
        "smollm3",
        {
            "no_rope_layers": None,
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ),
    "ministral3 with a window, tied": ("ministral3", {"sliding_window": 8, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(tmp_path, variant):
    kind, overrides = VARIANTS[variant]
    folder = factory.make_model(tmp_path, kind, num_hidden_layers=3, **overrides)
    runner, prompt = factory.PagedRunner(factory.load(folder)), tokens_of(40, 4)
    head = runner.step([("a", prompt[:39])])[0]
    tail = runner.step([("a", prompt[39:])], num_decodes=1)[0]
    Yardstick(folder).check(torch.cat((head, tail)), prompt)


@pytest.mark.parametrize("kind", factory.KINDS)
def test_only_wanted_rows_are_computed_to_the_end(tmp_path, kind):
    folder = factory.make_model(tmp_path, kind)
    work = [("a", tokens_of(5, 1)), ("b", tokens_of(9, 2)), ("c", tokens_of(4, 3))]
    total = sum(len(tokens) for _, tokens in work)
    for rows in ([4, 13, 17], [17, 0], [], [17] + [0] * (total + 2)):
        whole, part = factory.PagedRunner(factory.load(folder)), factory.PagedRunner(factory.load(folder))
        batch = part.batch(work, 0, 0)
        with torch.inference_mode():
            expected = whole.model(replace(whole.batch(work, 0, 0), logit_rows=None), whole.caches)[rows]
            actual = part.model(replace(batch, logit_rows=torch.tensor(rows, dtype=torch.int64)), part.caches)
        assert actual.shape == expected.shape == (len(rows), whole.model.spec.hidden_size)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        for written, kept in zip(part.caches, whole.caches, strict=True):
            torch.testing.assert_close(written[0], kept[0], equal_nan=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_parity_of_many_tokens(tmp_path, kind):
    folder = factory.make_model(tmp_path, kind, max_position_embeddings=2048)
    prompt = tokens_of(ADD_TOKENS + 7, 4)
    [logits] = factory.PagedRunner(factory.load(folder), num_blocks=256).step([("a", prompt)])
    Yardstick(folder).check(logits, prompt)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("phi4", {}),
        ("llama", {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}, "head_dim": 8}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64}),
    ],
)
def test_frequencies_by_length(tmp_path, kind, overrides):
    """Within the pretraining's context by default; with a larger max_model_len, those of a sequence as long as that."""
    folder, prompt = factory.make_model(tmp_path, kind, num_hidden_layers=2, **overrides), tokens_of(100, 9)
    yardstick, short, long = Yardstick(folder), factory.load(folder), factory.load(folder, max_model_len=100)
    for model, tokens in ((short, prompt[:64]), (long, prompt)):
        runner = factory.PagedRunner(model)
        logits = [runner.step([("a", tokens[:-5])])[0]]
        logits += [runner.step([("a", [token])], num_decodes=1)[0] for token in tokens[-5:]]
        yardstick.check(torch.cat(logits), tokens)
        assert model.layers[0].self_attn.attention.rotary.shape[0] == len(tokens)


ROPE_KINDS = ("llama", "llama3_rope", "llama_linear", "llama_yarn", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rotary_table_is_as_long_as_sequences_may_be(tmp_path, kind):
    """Of a context of a million, only max_model_len rows are held, and the angles stay those of the whole context."""
    folder = factory.make_model(tmp_path, kind, num_hidden_layers=2, max_position_embeddings=2**20)
    model, prompt = factory.load(folder, max_model_len=48), tokens_of(48, 8)
    assert {layer.self_attn.attention.rotary.shape for layer in model.layers} == {(48, 16)}
    assert len({layer.self_attn.attention.rotary.data_ptr() for layer in model.layers}) == 1
    [logits] = factory.PagedRunner(model).step([("a", prompt)])
    Yardstick(folder).check(logits, prompt)


def test_padded_decode_batch(tmp_path):
    """Rows that pad a captured graph write no KV and disturb nobody."""
    folder = factory.make_model(tmp_path, "qwen3")
    plain, padded = factory.PagedRunner(factory.load(folder)), factory.PagedRunner(factory.load(folder))
    prompt = tokens_of(21, 5)
    for runner in (plain, padded):
        runner.step([("a", prompt), ("b", prompt[:9])])
    work = [("a", [3]), ("b", [4])]
    for left, right in zip(plain.step(work, num_decodes=2), padded.step(work, num_decodes=2, padding=2), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)
    for (cache, _), (other, _) in zip(plain.caches, padded.caches, strict=True):
        assert torch.equal(cache.k.isnan(), other.k.isnan())
        assert torch.equal(cache.v.isnan(), other.v.isnan())


def test_bfloat16_stays_close(tmp_path):
    """Loading casts; logits come out in the model's dtype, with its error and not more."""
    folder = factory.make_model(tmp_path, "llama")
    prompt = tokens_of(30, 6)
    exact = factory.PagedRunner(factory.load(folder)).step([("a", prompt)])[0]
    runner = factory.PagedRunner(factory.load(folder, dtype="bfloat16"), dtype=torch.bfloat16)
    rounded = runner.step([("a", prompt)])[0]
    assert rounded.dtype == torch.bfloat16
    rounded = rounded.float()
    assert (rounded - exact).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize(
    ("kind", "options"), [("qwen3", {}), ("opt_post", {}), ("bloom", {}), ("deepseek_v3", {"first_k_dense_replace": 3})]
)
def test_decode_reads_nothing_on_the_host(tmp_path, kind, options, monkeypatch):
    """A CUDA graph can capture a decode: no operation outside the kernels depends on a tensor's contents."""
    model = factory.load(factory.make_model(tmp_path, kind, **options))
    runner = factory.PagedRunner(model)
    runner.step([("a", tokens_of(9, 7))])
    batch = runner.batch([("a", [5])], num_decodes=1, padding=3)
    # The torch references of these do read tensors; their Triton counterparts do not.
    monkeypatch.setattr(attention_ops, "reshape_and_cache", lambda *_, **__: None)
    monkeypatch.setattr(attention_ops, "latent_norm_rope_cache", lambda *_, **__: None)

    def queries(qkv, *_, **__):
        return qkv.view(len(qkv), -1, model.spec.head_dim)[:, : -2 * model.num_kv_heads_per_rank]

    monkeypatch.setattr(attention_ops, "qk_norm_rope_cache", queries)
    monkeypatch.setattr(attention_ops, "decode_schedule", lambda *_, **__: None)
    monkeypatch.setattr(attention_ops, "paged_decode_attention", lambda *_, **__: None)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        hidden = model(batch, runner.caches)
        assert isinstance(hidden, FakeTensor)
        assert model.compute_logits(hidden).shape == (4, VOCAB_SIZE)
        with pytest.raises(DataDependentOutputException):
            hidden.sum().item()

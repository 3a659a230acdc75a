"""Models with latent attention: whole engines against transformers, what their cache holds, and what is refused."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import support.model_factory as factory
import torch
import transformers
from support.thread_group import ThreadGroup

from rayllm import LLM, SamplingParams
from rayllm.api.types import KVBlocks
from rayllm.config.model_folder import load_model_spec
from rayllm.config.options import EngineConfig
from rayllm.config.resolved import resolve
from rayllm.errors import ConfigError, ModelError
from rayllm.layers import latent_attention, latent_plan
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker.cache import CacheEngine, block_bytes, lay_out_blocks
from rayllm_kernels import ops

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """(folder, 16 prompts of 1 to 200 tokens of which some begin alike, transformers' greedy tokens)."""
    folder = factory.make_model(tmp_path_factory.mktemp("deepseek"), "deepseek_v3")
    rng = random.Random(3)
    shared = [rng.randrange(250) for _ in range(60)]
    lengths = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 50, 64, 65, 90, 130, 200]
    prompts = [[rng.randrange(250) for _ in range(length)] for length in lengths]
    prompts[11:14] = [shared + prompt[60:] for prompt in prompts[11:14]]
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for prompt in prompts:
        tokens, cache, new = [], None, prompt
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                out = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache, new = out.past_key_values, [int(out.logits[0, -1].argmax())]
            tokens += new
        expected.append(tokens)
    return folder, prompts, expected


SMALL = {"block_size": 4, "num_gpu_blocks_override": 60, "max_model_len": 230, "max_num_batched_tokens": 64}


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"preemption_mode": "swap", "swap_space": 0.01} | SMALL,
        {"preemption_mode": "recompute", "enable_prefix_caching": False} | SMALL,
    ],
)
def test_greedy_tokens_of_engines(deepseek, options):
    folder, prompts, expected = deepseek
    with LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **options) as llm:
        for _ in range(2 if options.get("enable_prefix_caching", True) else 1):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        stats = llm.stats()
        assert (stats.prefix_cache_hits > 0) == options.get("enable_prefix_caching", True)
        if "preemption_mode" in options:
            assert stats.num_preemptions > 0
            assert (stats.num_swap_preemptions > 0) == (options["preemption_mode"] == "swap")
        llm.engine.check_integrity()


@pytest.fixture
def expanding(monkeypatch):
    """Chunks of few tokens are expanded too, in pieces of few keys. The calls that do: queries and pieces of each."""
    calls = []

    def counted(q, cache, weight, scale, pieces, room, out):
        calls.append((q.shape[0], len(pieces)))
        ops.expanded_prefill_attention(q, cache, weight, scale, pieces, room, out)

    monkeypatch.setattr(latent_plan, "MIN_QUERIES", 4)
    monkeypatch.setattr(latent_plan, "PIECE_KEYS", 8)
    monkeypatch.setattr(latent_plan, "ROOM_BYTES", 24 * 8 * (12 + 20) * 4)
    monkeypatch.setattr(latent_attention, "ops", SimpleNamespace(**vars(ops) | {"expanded_prefill_attention": counted}))
    return calls


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 40, "max_num_seqs": 16}, {"preemption_mode": "swap", "swap_space": 0.01} | SMALL],
)
def test_greedy_tokens_of_expanded_prompts(deepseek, expanding, options):
    """In chunks, behind cached beginnings, beside decodes and chunks that are too short for it."""
    folder, prompts, expected = deepseek
    with LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.stats().prefix_cache_hits > 0
    assert min(queries for queries, _ in expanding) < 40
    assert max(pieces for _, pieces in expanding) > 3


def test_the_deterministic_mode_has_one_form(deepseek, expanding):
    folder, prompts, expected = deepseek
    options = {"deterministic": True, "enable_prefix_caching": False}
    with LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, **options) as llm:
        outputs = llm.generate(prompts[-4:], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected[-4:]
    assert not expanding


@pytest.mark.parametrize("kind", ["deepseek_v3", "mistral4"])
def test_ranks_share_the_heads_of_expanded_chunks(tmp_path, expanding, kind):
    """Long chunks, short ones and decodes in one step, on one rank and on two, equal all of them absorbed."""
    folder = factory.make_model(tmp_path, kind)

    def drive(tp):
        runner = factory.PagedRunner(factory.load(folder, tp))
        ids = torch.arange(1, 250, 3).tolist()
        steps = [
            runner.step([("a", ids[:70]), ("b", ids[:2]), ("c", ids[5:30])]),
            runner.step([("a", [7]), ("c", ids[:50]), ("b", ids[:3]), ("d", ids[:20]), ("e", ids[1:3])], num_decodes=1),
            runner.step([("d", ids[:30]), ("a", ids[:40])]),
            runner.step([("d", [3]), ("e", [4]), ("a", [5])], num_decodes=3),
        ]
        return torch.cat([logits for step in steps for logits in step])

    alone = drive(TPGroup.single())
    num_layers = len(expanding) // 5  # runs of chunks: two in the first step, two in the second, one in the third
    assert [queries for queries, _ in expanding[::num_layers]] == [70, 25, 50, 20, 70]
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(drive, ThreadGroup.make(2)))
    count = len(expanding)
    latent_plan.MIN_QUERIES = 1000
    absorbed = drive(TPGroup.single())
    assert len(expanding) == count
    for logits in (alone, *ranks):
        torch.testing.assert_close(logits, absorbed, atol=2e-4, rtol=0)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_block_holds_one_row_a_token_and_layer(deepseek, tp):
    """On every rank, whatever their number: 32 numbers of a latent and 8 of a key."""
    spec = load_model_spec(deepseek[0])
    places = lay_out_blocks(spec, tp, 16)
    assert block_bytes(places, torch.float32) == 3 * 16 * 40 * 4
    cache = CacheEngine(KVBlocks(2, 0), places, torch.float32, torch.device("cpu"))
    for layer in cache.layers:
        k, v, scales = layer.kv
        assert k.shape == (2, 1, 16, 40)
        assert v.shape == (2, 1, 16, 32)
        assert v.data_ptr() == k.data_ptr()
        assert scales is None
        k.fill_(1.0)
    assert bool((cache.pool == 1.0).all())


def test_sizes_of_deepseek_v3(tmp_path):
    """Of its config.json: 70 KB a token in bf16, and not the 4 MB of heads with keys and values of their own."""
    Path(tmp_path, "config.json").write_text(json.dumps(DEEPSEEK_V3))
    spec = load_model_spec(str(tmp_path))
    assert block_bytes(lay_out_blocks(spec, 8, 1), torch.bfloat16) == 61 * 576 * 2 == 70272
    assert spec.experts is not None
    assert [spec.is_sparse(layer) for layer in (2, 3, 60)] == [False, True, True]
    assert spec.attention_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert spec.max_model_len == 163840
    assert spec.quantization is not None


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("DeepseekV32ForCausalLM", {}, "architectures: DeepseekV32ForCausalLM is not supported"),
        ("DeepseekV4ForCausalLM", {}, "architectures: DeepseekV4ForCausalLM is not supported"),
        (None, {"index_topk": 2048}, '"index_topk" is not understood'),
        (None, {"num_key_value_heads": 64}, "num_key_value_heads 64 must be num_attention_heads, 128"),
        (None, {"head_dim": 128}, "head_dim 128 must be qk_rope_head_dim, 64"),
        (None, {"qk_head_dim": 128}, "qk_head_dim 128 must be qk_nope_head_dim and qk_rope_head_dim together, 192"),
        (None, {"kv_lora_rank": 1024}, "kv_lora_rank 1024 is more than the 512 that attention supports"),
        (None, {"qk_rope_head_dim": 256}, "qk_rope_head_dim 256 is more than the 128 that attention supports"),
        (None, {"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, not 63"),
        (None, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (None, {"scoring_func": "softmax"}, "scoring_func softmax is not supported"),
        (None, {"topk_method": "greedy"}, "topk_method greedy is not supported"),
        (None, {"n_group": 7}, "n_group 7 must share 256 experts evenly"),
        (None, {"attention_bias": True, "q_lora_rank": None}, "attention_bias true is not supported without"),
    ],
)
def test_refusals(tmp_path, architecture, fields, message):
    told = DEEPSEEK_V3 | fields
    if architecture is not None:
        told |= {"architectures": [architecture]}
    Path(tmp_path, "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match=message):
        load_model_spec(str(tmp_path))


def test_a_cache_in_fp8_is_refused(deepseek):
    options = EngineConfig(model=deepseek[0], device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 is not supported for latent attention"):
        resolve(options, 0)

"""The KV cache in fp8, from the option to the tokens: scales and their sources, pools in bytes, whole engines."""

from __future__ import annotations

import json

import pytest
import support.model_factory as factory
import torch
from safetensors.torch import load_file, save_file
from support.stand_ins import cpu_config

from rayllm import LLM, SamplingParams
from rayllm.api.types import EngineInfo, KVBlocks
from rayllm.config.model_folder import load_model_spec
from rayllm.config.options import EngineConfig, make_config
from rayllm.config.resolved import resolve
from rayllm.errors import ConfigError, ModelError
from rayllm.layers.attention import KVCache, LayerCache
from rayllm.parallel.tp_group import TPGroup
from rayllm.worker import worker
from rayllm.worker.cache import CacheEngine, LayerPlace
from rayllm.worker.kv_scales import CALIBRATION_TOKENS, MARGIN, find_scales, scale_for
from rayllm.worker.worker import RankModel
from rayllm_kernels.device import Hardware, assumed
from rayllm_kernels.ops import KVScales

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TEXTS = ["The for statement", "What does str.join do?", "A with statement", "Classes are", "The value of"]


@pytest.fixture
def llama(tmp_path):
    factory.make_model(tmp_path, "llama", num_hidden_layers=2)
    return tmp_path


def load(folder, rank=0, size=1):
    return factory.load(folder, TPGroup(rank, size, None if size == 1 else object()))


def add_scales(folder, tensors):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {f"model.layers.{name}": tensor for name, tensor in tensors.items()}, path)


def scales_of(model, kv_dtype):
    def run(batch, caches):
        with torch.inference_mode():
            model(batch, caches)

    return find_scales(model, kv_dtype, 16, run)


def test_scale_for_leaves_the_margin_and_no_more_than_twice_that():
    largest = torch.tensor([1e-3, 0.5, 1.0, 7.0, 223.9, 224.0, 224.1, 3000.0])
    scale = scale_for(largest, E4M3)
    room = 448.0 / (largest / scale)
    assert ((room >= MARGIN) & (room < 2 * MARGIN)).all()
    assert torch.equal(scale.log2(), scale.log2().round())
    assert scale_for(torch.tensor([0.0]), E4M3).tolist() == [1.0]


def test_e4m3_is_calibrated_with_random_tokens(llama):
    model = load(llama)
    assert scales_of(model, torch.bfloat16) is None
    measured = scales_of(model, E4M3)
    assert len(measured) == 2
    for k, v in measured:
        assert k.shape == v.shape == (4,)
        assert torch.equal(k.log2(), k.log2().round())
    again = scales_of(load(llama), E4M3)
    for ours, theirs in zip(measured, again, strict=True):
        assert torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v)
    # Other tokens stay inside the range: the largest key and value of each head, against its scale.
    runner = factory.PagedRunner(model, block_size=8)
    runner.step([("a", [(7 * i * i) % 256 for i in range(200)])])
    for (cache, _group), scales in zip(runner.caches, measured, strict=True):
        for part, scale in zip((cache.k, cache.v), scales, strict=True):
            reach = part.nan_to_num().abs().amax((0, 2, 3)) / scale
            assert (reach < 448.0).all()
            assert (reach > 448.0 / 16).all()


@pytest.mark.parametrize(("most", "expected"), [(33, 33), (2 * CALIBRATION_TOKENS, CALIBRATION_TOKENS)])
def test_calibration_takes_no_more_tokens_than_a_sequence_may_have(tmp_path, most, expected):
    context = 2 * CALIBRATION_TOKENS
    folder = factory.make_model(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=context)
    model = factory.load(folder, max_model_len=most)
    seen = []
    find_scales(model, E4M3, 16, lambda batch, _caches: seen.append(len(batch.positions)))
    assert seen == [expected]


def test_values_that_are_not_finite_are_refused(llama):
    model = load(llama)

    def run(_batch, caches):
        caches[1].kv.v[0, 0, 0, 0] = torch.inf

    with pytest.raises(ModelError, match="kv_cache_dtype: keys or values of layer 1 are not finite"):
        find_scales(model, E4M3, 16, run)


def test_e5m2_needs_no_scale(llama):
    for k, v in scales_of(load(llama), E5M2):
        assert k.tolist() == v.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["k_scale", "attn.k_scale", "k_proj.k_scale"])
def test_scales_of_a_checkpoint_win(llama, name):
    v_name = name.replace("k_", "v_")
    add_scales(
        llama,
        {
            f"0.self_attn.{name}": torch.tensor([0.1, 0.2, 0.3, 0.4]),
            f"0.self_attn.{v_name}": torch.tensor(0.5, dtype=torch.bfloat16),
        },
    )
    model = load(llama)
    for kv_dtype in (E4M3, E5M2):
        first, second = scales_of(model, kv_dtype)
        assert torch.allclose(first.k, torch.tensor([0.1, 0.2, 0.3, 0.4]))
        assert first.v.tolist() == [0.5] * 4
        assert (second.k.tolist() == [1.0] * 4) == (kv_dtype == E5M2)
    # Each rank has those of its heads; with more ranks than heads, neighbours share one.
    assert [load(llama, rank, 2).kv_scales[0].k.tolist() for rank in range(2)] == [
        pytest.approx([0.1, 0.2]),
        pytest.approx([0.3, 0.4]),
    ]
    assert [load(llama, rank, 8).kv_scales[0].k.tolist() for rank in (0, 1, 2, 7)] == [
        pytest.approx([value]) for value in (0.1, 0.1, 0.2, 0.4)
    ]
    assert [load(llama, rank, 2).kv_scales[0].v.tolist() for rank in range(2)] == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"1.self_attn.k_scale": torch.ones(1)}, r"has model\.layers\.1\.self_attn\.k_scale, but lacks .*v_scale"),
        ({"1.self_attn.v_scale": torch.ones(1)}, r"has model\.layers\.1\.self_attn\.v_scale, but lacks .*k_scale"),
        (
            {"0.self_attn.k_scale": torch.ones(3), "0.self_attn.v_scale": torch.ones(1)},
            r"k_scale must be one scale, or one for each of 4 KV heads, not 3",
        ),
        ({"0.self_attn.k_scale": torch.ones(1), "0.self_attn.v_scale": torch.zeros(1)}, r"v_scale must be positive"),
        (
            {"0.self_attn.k_scale": torch.ones(1), "0.self_attn.v_scale": torch.tensor([1.0, 1.0, 1.0, torch.nan])},
            r"v_scale must be positive",
        ),
    ],
)
def test_bad_scales_of_a_checkpoint(llama, tensors, message):
    add_scales(llama, tensors)
    with pytest.raises(ModelError, match=message):
        load(llama)


def test_a_checkpoint_may_say_that_only_its_kv_cache_is_quantised(llama):
    config = json.loads((llama / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert load_model_spec(str(llama)).quantization is None
    quantization["config_groups"] = {"group_0": {"weights": {"num_bits": 8}}}
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=r"quantization_config\.config_groups\.group_0\.targets must be a list"):
        load_model_spec(str(llama))


def test_options(tmp_path):
    def resolved(**options):
        return resolve(make_config(EngineConfig, {"device": "cpu", "dtype": "float16"} | options), 0).kv_dtype

    assert resolved() == "float16"
    assert resolved(kv_cache_dtype="fp8") == resolved(kv_cache_dtype="fp8_e4m3") == "float8_e4m3fn"
    assert resolved(kv_cache_dtype="fp8_e5m2") == "float8_e5m2"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: .*'auto', 'fp8', 'fp8_e4m3' or 'fp8_e5m2', not 'int8'"):
        resolved(kv_cache_dtype="int8")
    odd = factory.make_model(tmp_path, "opt", hidden_size=99, num_attention_heads=3)
    assert resolved(model=odd) == "float16"
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 needs an even head_dim; the model's is 33"):
        resolved(model=odd, kv_cache_dtype="fp8")


def test_a_gpu_without_e4m3_is_refused_before_the_model_is_loaded(monkeypatch):
    """Another format goes on to the device, which is none that this test can load a model on."""

    def load_on(capability, kv_cache_dtype):
        config = resolve(EngineConfig(device="cuda", kv_cache_dtype=kv_cache_dtype), num_gpus=1)
        with assumed(torch.device("cuda", 0), Hardware(108, 163 << 10, capability)):
            RankModel(config, TPGroup.single(), torch.device("cuda", 0))

    def reached(*_args):
        raise NotImplementedError("the device")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "A100")
    monkeypatch.setattr(torch.cuda, "set_device", reached)
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype fp8 needs .* 8\.9 or more, and A100 has less; fp8_e5m2 works"
    ):
        load_on((8, 0), "fp8")
    for capability, kv_cache_dtype in (((8, 0), "fp8_e5m2"), ((8, 0), "auto"), ((8, 9), "fp8"), ((9, 0), "fp8_e4m3")):
        with pytest.raises(NotImplementedError, match="the device"):
            load_on(capability, kv_cache_dtype)


def test_pools_are_bytes_that_layers_see_as_numbers():
    places = [LayerPlace(0, layer * 2 * 3 * 4 * 8, (3, 4, 8)) for layer in range(2)]
    scales = [KVScales(torch.full((3,), 1.0 + layer), torch.full((3,), 2.0)) for layer in range(2)]
    cache = CacheEngine(KVBlocks(5, 4), places, E4M3, CPU, scales)
    assert cache.pool[0].nbytes == 2 * 2 * 3 * 4 * 8
    assert cache.host_pool.dtype == cache.pool.dtype == torch.uint8
    for layer, ((k, v, own), _group) in enumerate(cache.layers):
        assert k.dtype == v.dtype == E4M3
        assert own is scales[layer]
        assert k.data_ptr() == cache.pool[0, layer * 192 :].data_ptr()
        assert v.data_ptr() == cache.pool[0, layer * 192 + 96 :].data_ptr()
    assert not cache.layers[0].kv.k.float().any()
    cache.pool.random_(0, 255, generator=torch.Generator().manual_seed(0))
    before = cache.pool.clone()
    cache.copy([(0, 3)])
    cache.swaps.swap_out([(1, 2)])
    cache.pool[1].zero_()
    cache.swaps.swap_in([(2, 4)])
    assert torch.equal(cache.pool[3], before[0])
    assert torch.equal(cache.pool[4], before[1])
    for dtype, given in ((E4M3, None), (torch.float16, scales)):
        with pytest.raises(ValueError, match="scales"):
            CacheEngine(KVBlocks(1, 0), places, dtype, CPU, given)


def test_twice_the_tokens_in_the_same_memory(monkeypatch):
    monkeypatch.setattr(worker, "CPU_POOL_BYTES", 4 << 20)

    def blocks(**options):
        config = cpu_config(dtype="bfloat16", swap_space=0.01, **options)
        return RankModel(config, TPGroup.single(), CPU).count_blocks()

    plain, small = blocks(), blocks(kv_cache_dtype="fp8")
    assert small.gpu == 2 * plain.gpu
    assert small.cpu // 2 == plain.cpu


def test_the_start_says_what_the_cache_is_in():
    from rayllm.serve.cluster.launch import describe_start  # imports Ray Serve

    info = EngineInfo(model="m", max_model_len=9, vocab_size=9, num_kv_tokens=2048, eos_token_ids=[])
    assert describe_start(info)[-2] == "KV cache 2,048 tokens"
    info = EngineInfo(
        model="m", max_model_len=9, vocab_size=9, num_kv_tokens=4096, eos_token_ids=[], kv_cache_dtype="fp8_e5m2"
    )
    assert describe_start(info)[-2] == "KV cache 4,096 tokens in fp8_e5m2"


def generate(llm, prompts=TEXTS, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain_tokens():
    with LLM(device="cpu") as llm:
        return generate(llm)


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
def test_the_bundled_model(plain_tokens, kind):
    """Cached prefixes, preemption by swap and a small pool change nothing; against fp32 most greedy tokens stay."""
    with LLM(device="cpu", kv_cache_dtype=kind) as llm:
        first = generate(llm)
        assert generate(llm) == first
        assert llm.stats().prefix_cache_hits == 0  # the prompts are shorter than a block
        again = [[*llm.tokenizer.encode(text), *tokens[:16]] for text, tokens in zip(TEXTS, first, strict=True)]
        rest = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        assert generate(llm, again, rest) == [tokens[16:] for tokens in first]
        assert llm.stats().prefix_cache_hits > 0
    with LLM(
        device="cpu",
        kv_cache_dtype=kind,
        num_gpu_blocks_override=10,
        block_size=8,
        max_model_len=60,
        swap_space=0.01,
        preemption_mode="swap",
    ) as llm:
        assert generate(llm) == first
        assert llm.stats().swapped_in_blocks > 0
        llm.engine.check_integrity()
    same = sum(
        a == b for ours, theirs in zip(first, plain_tokens, strict=True) for a, b in zip(ours, theirs, strict=True)
    )
    assert same > 0.5 * GREEDY.max_tokens * len(TEXTS)


def test_deterministic_mode():
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)

    def results(llm, texts):
        outputs = [output.outputs[0] for output in llm.generate(texts, params, use_tqdm=False)]
        return [
            [(token, entry[token].logprob) for token, entry in zip(out.token_ids, out.logprobs, strict=True)]
            for out in outputs
        ]

    with LLM(device="cpu", kv_cache_dtype="fp8", deterministic=True) as llm:
        together = results(llm, TEXTS[:3])
    with LLM(device="cpu", kv_cache_dtype="fp8", deterministic=True, max_num_batched_tokens=3, max_num_seqs=2) as llm:
        assert [results(llm, [text])[0] for text in TEXTS[:3]] == together


@pytest.mark.parametrize("kind", ["qwen3", "opt", "bloom"])
def test_a_cache_in_fp8_is_read_as_it_was_written(tmp_path, kind):
    """Any model, in chunks and decodes: logits close to those of an exact cache, and the same however it is cut."""
    folder = factory.make_model(tmp_path, kind, num_hidden_layers=2)
    model, tokens = load(folder), [(5 * i * i) % 256 for i in range(90)]
    exact = factory.PagedRunner(model).step([("a", tokens)])[0]
    scales = scales_of(model, E4M3)
    results = []
    for cuts in ((90,), (30, 60, 90), (89, 90)):
        runner = factory.PagedRunner(model)
        runner.caches = [
            LayerCache(KVCache(k.nan_to_num().to(E4M3), v.nan_to_num().to(E4M3), own))
            for ((k, v, _), _group), own in zip(runner.caches, scales, strict=True)
        ]
        first, logits = 0, []
        for cut in cuts:
            logits.append(runner.step([("a", tokens[first:cut])], num_decodes=int(cut - first == 1))[0])
            first = cut
        results.append(torch.cat(logits))
    assert 1e-4 < (results[0] - exact).norm() / exact.norm() < 0.2
    for other in results[1:]:
        assert (other - results[0]).norm() / exact.norm() < 0.05

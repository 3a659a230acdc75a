"""Adapters in the whole engine: what a request says is what its adapter, merged into the weights, says."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import (
    DELTA_LINEARS,
    GEMMA4_LINEARS,
    GROUPED_DELTA_LINEARS,
    LATENT_LINEARS,
    LLAMA_LINEARS,
    edit_config,
    greedy,
    make_adapter,
    merged,
)
from support.kinds.common import EOS
from support.model_factory import make_model
from support.yardstick import transformers_model

from rayllm import LLM, SamplingParams
from rayllm.errors import ConfigError, InvalidRequestError, ModelError

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
RANKS = (4, 8, 16, 64)
PROMPT_TOKENS = 20


class Adapted:
    """A tiny model with adapters, and what they say: by transformers, the adapter merged."""

    def __init__(self, folder: Path, kind: str):
        torch.set_num_threads(1)
        self.folder = make_model(folder / "model", kind)
        self.model = transformers_model(self.folder)
        rng = random.Random(0)
        self.prompts = [[rng.randrange(EOS - 1) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
        self.paths: dict[str | None, str | None] = {None: None}
        self.expected: dict[str | None, list[list[int]]] = {}

    def add(self, name: str, path: str) -> None:
        self.paths[name] = path

    def says(self, name: str | None) -> list[list[int]]:
        """Of each prompt."""
        if name not in self.expected:
            with merged(self.model, self.paths[name]) as model:
                self.expected[name] = greedy(model, self.prompts, NUM_TOKENS)
        return self.expected[name]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    case = Adapted(folder, "llama")
    for number in range(100):
        name = f"a{number}"
        case.add(name, make_adapter(folder / name, case.folder, rank=RANKS[number % 4], seed=number))
    return case


def engine(case: Adapted, **options) -> LLM:
    settings = {"device": "cpu", "skip_tokenizer_init": True, "enable_lora": True, "max_lora_rank": 64, **options}
    return LLM(case.folder, **settings)


def check(llm: LLM, case: Adapted, names: list[str | None], prompt: int = 0) -> None:
    """All at once."""
    outputs = llm.generate([case.prompts[prompt]] * len(names), GREEDY, use_tqdm=False, adapter=names)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [case.says(name)[prompt] for name in names]
    llm.engine.check_integrity()
    assert llm.stats().num_used_blocks == 0


def test_a_hundred_adapters_in_mixed_batches(llama):
    """Of all ranks, over few slots, and none of them meets the cached prefixes of another one."""
    names = [name for name in llama.paths if name is not None]
    assert len({str(llama.says(name)) for name in [None, *names]}) > 95, "the adapters say the same"
    with engine(llama, lora_modules={name: llama.paths[name] for name in names}, max_loras=8, max_num_seqs=16) as llm:
        assert llm.list_lora_adapters() == names
        check(llm, llama, names)
        order = [*names[:30], *[None] * 5, *names[10:25]]
        random.Random(1).shuffle(order)
        check(llm, llama, order)
        check(llm, llama, order, prompt=1)
        assert llm.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 12, "block_size": 4, "max_loras": 2, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 12, "block_size": 4, "swap_space": 0.1, "preemption_mode": "swap", "max_loras": 3},
        {"deterministic": True, "max_loras": 2},
        {"enable_prefix_caching": False, "max_loras": 1},
    ],
    ids=["recompute", "swap", "deterministic", "one-slot"],
)
def test_small_pools_and_few_slots(llama, options):
    names = ["a0", "a1", None, "a2", "a0", "a3", None, "a1", "a5"]
    with engine(llama, lora_modules={name: llama.paths[name] for name in names if name}, **options) as llm:
        check(llm, llama, names)
        if "num_gpu_blocks_override" in options:
            assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen3", "all-linear"),
        ("bloom", "all-linear"),
        ("opt", "all-linear"),
        ("qwen3_5_moe", DELTA_LINEARS),
        *(
            pytest.param(*others, marks=pytest.mark.full_matrix)
            for others in [
                ("qwen3_5", DELTA_LINEARS),
                ("qwen3_next", GROUPED_DELTA_LINEARS),
                ("deepseek_v3", LATENT_LINEARS),
                ("mistral4", LATENT_LINEARS),
                ("gemma4", GEMMA4_LINEARS),
                ("gemma4_moe", LLAMA_LINEARS),
                ("gemma4_shared", GEMMA4_LINEARS),
                ("gpt_oss", LLAMA_LINEARS),
                ("minimax_m2", LLAMA_LINEARS),
                ("qwen2_moe", LLAMA_LINEARS),
            ]
        ),
    ],
)
def test_other_models(tmp_path, kind, targets):
    """Among them: head norms after the adapter; a fused and interleaved qkv; biases; states, whose blocks are an
    adapter's own too.
    """
    case = Adapted(tmp_path, kind)
    for number, rank in enumerate((4, 7)):
        path = make_adapter(tmp_path / str(number), case.folder, rank=rank, seed=number, targets=targets)
        case.add(f"a{number}", path)
    with engine(case, lora_modules={name: path for name, path in case.paths.items() if name}) as llm:
        for _ in range(2):
            check(llm, case, ["a0", None, "a1", "a0"])
        assert llm.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 16}, "alpha_pattern": {".*k_proj": 64}},
        {"targets": r".*layers\.[02]\..*(q|v|down)_proj"},
        {"targets": ["v_proj"], "dtype": torch.bfloat16},
    ],
    ids=["rslora", "patterns", "regex", "bfloat16"],
)
def test_what_an_adapter_may_say(llama, tmp_path, config):
    name = f"config {tmp_path}"
    llama.add(name, make_adapter(tmp_path / "adapter", llama.folder, seed=7, size=0.6, **config))
    with engine(llama) as llm:
        llm.load_lora_adapter("x", llama.paths[name])
        outputs = llm.generate(llama.prompts, GREEDY, use_tqdm=False, adapter="x")
        assert [output.outputs[0].token_ids for output in outputs] == llama.says(name)
        assert llama.says(name) != llama.says(None)


def test_adapters_come_and_go(llama, tmp_path):
    """One that is loaded again under its name, with other weights, does not meet what the first one left."""
    folder = tmp_path / "adapter"
    shutil.copytree(llama.paths["a0"], folder)
    with engine(llama, max_loras=2, max_cpu_loras=2) as llm:
        llm.load_lora_adapter("x", str(folder))
        check_as(llm, llama, "x", "a0")
        llm.unload_lora_adapter("x")
        with pytest.raises(InvalidRequestError, match="the adapter 'x' is not loaded"):
            llm.generate(llama.prompts, GREEDY, use_tqdm=False, adapter="x")
        with pytest.raises(InvalidRequestError, match="no adapter 'x' is loaded"):
            llm.unload_lora_adapter("x")
        shutil.copytree(llama.paths["a1"], folder, dirs_exist_ok=True)
        llm.load_lora_adapter("x", str(folder))
        check_as(llm, llama, "x", "a1")
        llm.load_lora_adapter("y", llama.paths["a2"])
        with pytest.raises(InvalidRequestError, match="2 adapters are loaded, as many as max_cpu_loras allows"):
            llm.load_lora_adapter("z", llama.paths["a3"])
        with pytest.raises(InvalidRequestError, match="'y' is loaded already"):
            llm.load_lora_adapter("y", llama.paths["a3"])
        llm.unload_lora_adapter("x")
        llm.load_lora_adapter("z", llama.paths["a3"])
        check_as(llm, llama, "z", "a3")
        check_as(llm, llama, "y", "a2")


def check_as(llm: LLM, case: Adapted, name: str, expected: str) -> None:
    outputs = llm.generate(case.prompts, GREEDY, use_tqdm=False, adapter=name)
    assert [output.outputs[0].token_ids for output in outputs] == case.says(expected)


def test_a_request_keeps_an_adapter_that_is_unloaded(llama):
    with engine(llama, max_loras=1) as llm:
        core = llm.engine
        llm.load_lora_adapter("x", llama.paths["a0"])
        request = llm._make(llama.prompts[0], GREEDY, adapter="x")
        core.add(request)
        tokens = [token for _ in range(3) for delta in core.step() for token in delta.token_ids]
        llm.unload_lora_adapter("x")
        while core.has_work():
            tokens += [token for delta in core.step() for token in delta.token_ids]
        assert tokens == llama.says("a0")[0]
        llm.load_lora_adapter("x", llama.paths["a1"])
        check_as(llm, llama, "x", "a1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, not IA3"),
        ({"bias": "all"}, "bias must be none, not all"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
        ({"a_new_key": 3}, "a_new_key is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"r": 0}, "r must be a positive number, not 0"),
        ({"r": 4}, r"q_proj.lora_A.weight is \[8, 96\] of torch.float32, but must be \[4, 96\]"),
        ({"r": 80, "lora_alpha": 16}, "q_proj has rank 80, and max_lora_rank is 64"),
        ({"lora_alpha": 1e40}, "q_proj.lora_B.weight is not finite, times alpha / r"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, not 'false'"),
        ({"target_modules": ["q_proj"]}, "is of a module that target_modules does not name"),
        ({"target_modules": None}, "target_modules must be a list"),
        ({"target_modules": "("}, "is no regular expression"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern must map"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(llama, tmp_path, fields, message):
    path = make_adapter(tmp_path / "adapter", llama.folder, rank=8)
    edit_config(path, **fields)
    with engine(llama) as llm, pytest.raises(ModelError, match=message):
        llm.load_lora_adapter("x", path)


def change(path: str, **renamed: str) -> None:
    file = Path(path, "adapter_model.safetensors")
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors[renamed["to"]] = tensors.pop(name)
    save_file(tensors, file)


def test_matrices_that_are_not_finite_are_refused(llama, tmp_path):
    path = make_adapter(tmp_path / "adapter", llama.folder, rank=8)
    file = Path(path, "adapter_model.safetensors")
    tensors = load_file(file)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][0, 0] = float("nan")
    save_file(tensors, file)
    with engine(llama) as llm, pytest.raises(ModelError, match=r"q_proj\.lora_A\.weight is not finite"):
        llm.load_lora_adapter("x", path)


def test_bad_folders_and_tensors_are_named(llama, tmp_path):
    with engine(llama) as llm:
        with pytest.raises(ModelError, match=r"adapter folder .*nothing does not exist"):
            llm.load_lora_adapter("x", str(tmp_path / "nothing"))
        with pytest.raises(ModelError, match=r"has no adapter_config.json"):
            llm.load_lora_adapter("x", str(tmp_path))
        with pytest.raises(InvalidRequestError, match="lora_name: an adapter's name has"):
            llm.load_lora_adapter("a b", str(tmp_path))
        for number, (name, message) in enumerate(
            [
                ("base_model.model.lm_head.lora_A.weight", "lm_head is adapted, and the model has no"),
                ("base_model.model.model.embed_tokens.lora_embedding_A", "lora_embedding_A is not supported"),
                ("base_model.model.model.layers.0.self_attn.q_proj.bias", "q_proj.bias is not supported"),
            ]
        ):
            path = make_adapter(tmp_path / str(number), llama.folder)
            edit_config(path, target_modules="all-linear")
            change(path, to=name)
            with pytest.raises(ModelError, match=message):
                llm.load_lora_adapter("x", path)
        path = make_adapter(tmp_path / "damaged", llama.folder)
        Path(path, "adapter_model.safetensors").write_bytes(b"nothing")
        with pytest.raises(ModelError, match="is damaged"):
            llm.load_lora_adapter("x", path)
        check(llm, llama, [None])
        assert llm.list_lora_adapters() == []


def test_options_that_do_not_fit(llama, tmp_path):
    with LLM(llama.folder, device="cpu", skip_tokenizer_init=True) as llm:
        with pytest.raises(InvalidRequestError, match="adapters need the option enable_lora"):
            llm.load_lora_adapter("x", llama.paths["a0"])
        with pytest.raises(InvalidRequestError, match="the adapter 'x' is not loaded"):
            llm.generate(llama.prompts, GREEDY, use_tqdm=False, adapter="x")
        with pytest.raises(InvalidRequestError, match="adapter has 1 entries for 2 prompts"):
            llm.generate(llama.prompts, GREEDY, use_tqdm=False, adapter=["x"])
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        engine(llama, enable_lora=False, lora_modules={"x": llama.paths["a0"]})
    with pytest.raises(ConfigError, match="max_loras needs enable_lora"):
        engine(llama, enable_lora=False, max_loras=3)
    with pytest.raises(ConfigError, match="an adapter is name=path"):
        engine(llama, lora_modules=["x"])
    with pytest.raises(ModelError, match=r"lora_modules: x: adapter folder .* does not exist"):
        engine(llama, lora_modules={"x": str(tmp_path / "nothing")})

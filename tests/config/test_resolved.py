"""What options come to on a machine, and which cannot work there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.model_factory import make_model

from rayllm.config.options import BUNDLED_MODEL, EngineConfig
from rayllm.config.resolved import resolve, uses_ray
from rayllm.errors import ConfigError, ModelError


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda")],
)
def test_the_device(device, num_gpus, expected):
    assert resolve(EngineConfig(device=device), num_gpus).device == expected


@pytest.mark.parametrize(
    ("executor", "tp", "expected"), [("auto", 1, "local"), ("local", 1, "local"), ("ray", 1, "ray"), ("auto", 2, "ray")]
)
def test_where_ranks_run(executor, tp, expected):
    options = EngineConfig(executor=executor, tensor_parallel_size=tp)
    assert resolve(options, 0).executor == expected
    assert uses_ray(options) == (expected == "ray")


@pytest.mark.parametrize(
    ("options", "num_gpus", "message"),
    [
        ({"device": "cuda"}, 0, r'device "cuda" needs a GPU, and there is none \(device "cpu" works\)'),
        ({"tensor_parallel_size": 4}, 2, "tensor_parallel_size 4 on device cuda needs 4 GPUs; there are 2"),
        ({"tensor_parallel_size": 2, "executor": "local"}, 2, 'executor "local" runs one rank, but .* is 2'),
        (
            {"preemption_mode": "swap"},
            0,
            'preemption_mode: must be "cost" or "recompute" if swap_space is 0, not "swap"',
        ),
        ({"max_model_len": 10**6}, 0, "max_model_len 1000000 exceeds the model's limit of"),
    ],
)
def test_what_cannot_work(options, num_gpus, message):
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**options), num_gpus)


def test_what_follows_from_the_device():
    for choice, has_standbys in (("auto", True), ("none", False)):
        options = EngineConfig(executor="ray", standby_ranks=choice)
        assert [resolve(options, gpus).standbys for gpus in (0, 1)] == [has_standbys, has_standbys]
    assert not resolve(EngineConfig(), 0).standbys, "one rank, in the driver's process"
    assert [resolve(EngineConfig(), gpus).max_num_batched_tokens for gpus in (0, 1)] == [128, 8192]
    assert resolve(EngineConfig(max_num_batched_tokens=64), 0).max_num_batched_tokens == 64


def test_ranks_that_cannot_share_the_model(tmp_path):
    folder = make_model(tmp_path, "bloom")
    with pytest.raises(ModelError, match="tensor_parallel_size 8 does not divide the model's 12 attention heads"):
        resolve(EngineConfig(model=folder, tensor_parallel_size=8), 0)


def test_a_model_that_is_not_there():
    with pytest.raises(ModelError):
        resolve(EngineConfig(model="/no/such/folder"), 0)


def test_number_formats(tmp_path):
    folder = make_model(tmp_path, "llama")  # in float32
    assert resolve(EngineConfig(model=folder), 0).dtype == "float32"
    assert resolve(EngineConfig(model=folder), 1).dtype == "bfloat16"
    assert resolve(EngineConfig(model=folder, dtype="float16"), 0).dtype == "float16"
    formats = {"auto": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    for name, expected in formats.items():
        assert resolve(EngineConfig(model=folder, kv_cache_dtype=name), 1).kv_dtype == expected


def test_fp8_needs_an_even_head_dim(tmp_path):
    folder = make_model(tmp_path, "bloom", hidden_size=36)
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 needs an even head_dim; the model's is 3"):
        resolve(EngineConfig(model=folder, kv_cache_dtype="fp8"), 0)


def test_the_folder_is_absolute_and_the_length_is_the_models(monkeypatch):
    monkeypatch.chdir(Path(BUNDLED_MODEL).parent)
    config = resolve(EngineConfig(model=Path(BUNDLED_MODEL).name), 0)
    assert config.options.model == str(Path(BUNDLED_MODEL).resolve())
    assert config.max_model_len == config.spec.max_model_len
    assert resolve(EngineConfig(max_model_len=64), 0).max_model_len == 64


def test_how_many_sequences_run_at_once():
    """On GPUs the ranks choose, as only they know the memory."""
    assert resolve(EngineConfig(), 0).num_seqs_choices == (32,)
    assert resolve(EngineConfig(), 1).num_seqs_choices == (256, 512, 1024)
    for num_gpus in (0, 1):
        assert resolve(EngineConfig(max_num_seqs=7), num_gpus).num_seqs_choices == (7,)

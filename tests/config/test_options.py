"""The option classes: each field is described, names of files and flags are sorted, errors name the option."""

import re

import pytest

from rayllm.config.options import (
    OFFLINE_BATCHED_TOKENS,
    EngineConfig,
    ServerConfig,
    check_names,
    make_config,
    make_models,
)
from rayllm.config.resolved import BATCHED_TOKENS, NUM_SEQS
from rayllm.errors import ConfigError


@pytest.mark.parametrize("kind", [EngineConfig, ServerConfig])
def test_every_option_is_described(kind):
    for name, field in kind.model_fields.items():
        assert field.description, name
        assert not field.description.endswith("."), name


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (EngineConfig, {"block_size": 0}, "block_size: input should be greater than or equal to 1, not 0"),
        (EngineConfig, {"max_num_seq": 1}, r"unknown option 'max_num_seq' \(did you mean 'max_num_seqs'\?\)"),
        (ServerConfig, {"port": 70000, "queue_timeout": -1}, "port: .*; queue_timeout: "),
        (ServerConfig, {"request_timeout": float("inf")}, "request_timeout: input should be a finite number"),
        (EngineConfig, {"target_itl_ms": float("nan")}, "target_itl_ms: input should be a finite number"),
        (EngineConfig, {"model": ""}, "model: value error, must not be empty or have NUL in it, not ''"),
        (EngineConfig, {"model": "a\0"}, "model: value error, must not be empty or have NUL in it"),
        (EngineConfig, {"max_num_seqs": 10**9, "swap_space": 1e300}, "swap_space: .*1048576.*max_num_seqs: .*1048576"),
        (ServerConfig, {"host": ""}, "host: string should have at least 1 character"),  # it would be all addresses
        (ServerConfig, {"state_dir": ""}, "state_dir: value error, must not be empty"),
    ],
)
def test_errors_name_the_option_and_its_limit(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        make_config(kind, options)


def test_a_secret_is_not_in_an_error():
    with pytest.raises(ConfigError, match="api_key") as caught:
        make_config(ServerConfig, {"api_key": ["hunter2"]})
    assert "hunter2" not in str(caught.value)


def test_options_of_a_model_are_between_those_of_the_file_and_the_flags():
    file = check_names({"block_size": 8, "max_num_seqs": 1, "models": [{"model": "a", "max_num_seqs": 2}]})
    (model,), server = make_models(file, {"seed": 5, "port": 9})
    assert (model.engine.block_size, model.engine.max_num_seqs, model.engine.seed) == (8, 2, 5)
    assert server.port == model.server.port == 9


def test_the_name_of_a_model_is_that_of_its_folder_or_its_own():
    (model,), _ = make_models(check_names({"model": "some/folder/"}))
    assert model.name == "folder"
    (model,), _ = make_models(check_names({"model": "some/folder/", "served_model_name": "m"}))
    assert model.name == "m"
    (model,), _ = make_models(check_names({"model": "x" * 5000}))  # no file's name may be so long
    assert model.name == "x" * 5000


def test_replicas_have_an_order():
    with pytest.raises(ConfigError, match=r"max_replicas: must be at least num_replicas \(3\), not 2"):
        make_models({"num_replicas": 3, "max_replicas": 2})
    with pytest.raises(ConfigError, match=r"models\[1\]: max_replicas: must be at least num_replicas \(3\)"):
        make_models({"max_replicas": 2, "models": [{}, {"num_replicas": 3, "served_model_name": "m"}]})


def test_a_key_needs_its_certificate():
    with pytest.raises(ConfigError, match="ssl_keyfile: needs ssl_certfile"):
        make_models({"ssl_keyfile": "key.pem"})


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("max_num_seqs", [number for numbers in NUM_SEQS.values() for number in numbers]),
        ("max_num_batched_tokens", [*BATCHED_TOKENS.values(), OFFLINE_BATCHED_TOKENS]),
    ],
)
def test_defaults_that_depend_on_the_device_are_in_the_description(name, defaults):
    found = re.findall(r"\d+", EngineConfig.model_fields[name].description)
    assert sorted(map(int, found)) == sorted(defaults)

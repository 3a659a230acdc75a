"""Models by name, from a stand-in of the hub: what is downloaded when, what the cache is for, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.hub import HubStandIn, Repository

from rayllm import LLM, SamplingParams, hub
from rayllm.config.options import BUNDLED_MODEL, EngineConfig, ModelConfig, ServerConfig, check_names, make_models
from rayllm.errors import ConfigError, ModelError
from rayllm.hub import Hub, local_adapter, local_engine, local_model, needs_hub, text_files, weight_files
from rayllm.serve.cluster.download import local_models

TEXTS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def tiny(folder: Path, *, shards: bool = False, **config: object) -> Path:
    """A copy of the bundled model, with changes of its config.json, and with its weights in two files if wanted."""
    shutil.copytree(BUNDLED_MODEL, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    if shards:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names, index = sorted(weights), {}
        for file, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
            save_file({name: weights[name] for name in part}, folder / file)
            index |= dict.fromkeys(part, file)
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A hub that has org/tiny, and an environment that names it."""
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", False
    )  # which the library reads when it is imported
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubStandIn({"org/tiny": Repository({"main": tiny(tmp_path / "repository")})}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def options(tmp_path):
    """Makes the options of a model by its name, with a cache of the test's own."""

    def make(model: str = "org/tiny", **others: object) -> EngineConfig:
        return EngineConfig(**{"model": model, "download_dir": str(tmp_path / "cache"), "device": "cpu"} | others)

    return make


def test_a_model_is_served_by_its_name_and_downloaded_once(stand_in, options):
    with LLM(**options().model_dump()) as llm:
        (output,) = llm.generate("def f(", GREEDY, use_tqdm=False)
        assert Path(llm.config.model).name == Repository.commit(stand_in.repositories["org/tiny"].revisions["main"])
    with LLM(device="cpu") as bundled:
        assert output.outputs[0].text == bundled.generate("def f(", GREEDY, use_tqdm=False)[0].outputs[0].text
    assert sorted(stand_in.downloads()) == sorted([*TEXTS, "model.safetensors"])
    local_engine(options())
    assert [request.path for request in stand_in.requests] == ["/api/models/org/tiny"], "whether it has changed"


def test_a_folder_is_not_asked_for(stand_in, tmp_path, monkeypatch):
    folder = tiny(tmp_path / "work" / "org" / "tiny")
    monkeypatch.chdir(tmp_path / "work")
    for model in (str(folder), "org/tiny", BUNDLED_MODEL):
        engine = EngineConfig(model=model)
        assert local_engine(engine) is engine
    assert stand_in.requests == []
    with pytest.raises(ConfigError, match=r"revision: needs a model's name on the hub, and org/tiny is a folder's"):
        local_engine(EngineConfig(model="org/tiny", revision="main"))
    with pytest.raises(ModelError, match=r"model folder .*absent does not exist"):
        LLM(str(tmp_path / "absent"), skip_tokenizer_init=True)


def test_only_what_serving_needs(stand_in, options, tmp_path):
    repository = tiny(tmp_path / "much", shards=True)
    others = "pytorch_model.bin tf.h5 a.gguf README.md original/params.json onnx/config.json consolidated.safetensors"
    wanted = "chat_template.jinja additional_chat_templates/rag.jinja merges.txt tokenizer.model x.tiktoken"
    for name in [*others.split(), *wanted.split(), "pytorch_model.bin.index.json"]:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(json.dumps(name))
    stand_in.repositories["org/much"] = Repository({"main": repository})
    folder = Path(local_engine(options("org/much")).model)
    assert sorted(stand_in.downloads()) == sorted([*TEXTS, *SHARDS, INDEX, *wanted.split()])
    assert (folder / "additional_chat_templates" / "rag.jinja").is_file()
    dummy = local_engine(options("org/much", load_format="dummy", download_dir=str(tmp_path / "other")))
    assert not list(Path(dummy.model).glob("*.safetensors")), "random weights need none"


@pytest.mark.parametrize(
    ("names", "files"),
    [
        ("model.safetensors consolidated.safetensors", "model.safetensors"),
        ("model.safetensors model.fp16.safetensors", "model.safetensors"),
        ("consolidated.safetensors params.json", "consolidated.safetensors"),
        ("a.safetensors b.safetensors consolidated-1.safetensors", "a.safetensors b.safetensors"),
        ("original/model.safetensors x.safetensors", "x.safetensors"),
    ],
)
def test_one_copy_of_the_weights(names, files, tmp_path):
    assert weight_files(names.split(), tmp_path) == files.split()
    assert text_files(names.split()) == [name for name in names.split() if name == "params.json"]


def test_an_index_whose_files_are_missing_is_refused_before_the_weights(stand_in, options, tmp_path):
    repository = tiny(tmp_path / "torn", shards=True)
    (repository / SHARDS[1]).unlink()
    stand_in.repositories["org/torn"] = Repository({"main": repository})
    with pytest.raises(ModelError, match=rf"model org/torn: {INDEX} names the file {SHARDS[1]}, which is not there"):
        local_engine(options("org/torn"))
    assert not {*SHARDS} & {*stand_in.downloads()}


def test_without_a_network_the_cache_serves(stand_in, options, monkeypatch, tmp_path, caplog):
    folder = local_engine(options()).model
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert local_engine(options()).model == folder
    assert "Could not reach the Hub" in caplog.text
    lacks = rf"no whole copy of it is in the cache {tmp_path / 'no'}; http://127\.0\.0\.1:9 does not answer"
    with pytest.raises(ModelError, match=lacks):
        local_engine(options(download_dir=str(tmp_path / "no")))


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_is_asked_too_much_or_is_down_leaves_it_to_the_cache(stand_in, options, status, tmp_path):
    folder = local_engine(options()).model
    stand_in.status = status
    assert local_engine(options()).model == folder
    says = f"{stand_in.url} answers with status 429 for model org/tiny" if status == 429 else "does not answer"
    with pytest.raises(ModelError, match=says):
        local_engine(options(download_dir=str(tmp_path / "no")))
    (Path(folder) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"{stand_in.url} answers with status 429|no whole copy"):
        local_engine(options())


def test_offline_mode(stand_in, options, monkeypatch, tmp_path):
    folder = local_engine(options()).model
    stand_in.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert local_engine(options()).model == folder
    for engine in (options(download_dir=str(tmp_path / "no")), options(revision="v2")):
        with pytest.raises(ModelError, match=r"org/tiny.* is no folder here, and no whole copy.*; HF_HUB_OFF"):
            local_engine(engine)
    (Path(folder) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no whole copy"):
        local_engine(options())
    assert stand_in.requests == []


def test_a_cache_that_other_tools_have_filled(stand_in, options, tmp_path):
    """Such a snapshot has no list of the commit's files beside it, and perhaps only some of them."""
    folder = Path(local_engine(options()).model)
    shutil.copytree(tmp_path / "cache", other := tmp_path / "other", symlinks=True)
    folder = other / folder.relative_to(tmp_path / "cache")
    shutil.rmtree(folder.parents[1] / "trees")
    alone = Hub(endpoint="http://127.0.0.1:9", cache_dir=str(other), offline=True)
    assert alone.fetch("org/tiny", check=str) == str(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model org/tiny: it has no weights.*as far as the cache .* has it"):
        alone.fetch("org/tiny", check=str)


def test_revisions_are_commits_from_the_start_on(stand_in, options, tmp_path):
    first, second = stand_in.repositories["org/tiny"].revisions["main"], tiny(tmp_path / "second")
    stand_in.repositories["org/tiny"].revisions |= {"v2": second}
    for revision, repository in [(None, first), ("main", first), ("v2", second), (Repository.commit(second), second)]:
        engine = local_engine(options(revision=revision))
        assert (Path(engine.model).name, engine.revision) == (Repository.commit(repository), None)
    stand_in.repositories["org/tiny"].revisions["main"] = second
    assert Path(local_engine(options()).model).name == Repository.commit(second), "the branch has moved"
    for revision in ("v3", "0" * 40):
        with pytest.raises(ModelError, match=f"model org/tiny has no revision {revision} on {stand_in.url}"):
            local_engine(options(revision=revision))


def test_gated_models_name_the_page_and_the_token(stand_in, options, monkeypatch):
    stand_in.repositories["org/tiny"].token = "right"
    says = rf"model org/tiny is gated: accept its licence on {stand_in.url}/org/tiny, and set HF_TOKEN"
    for token in (None, "wrong"):
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ModelError, match=says):
            local_engine(options())
    monkeypatch.setenv("HF_TOKEN", "right")
    assert Path(local_engine(options()).model).is_dir()


@pytest.mark.parametrize("name", ["org/tyni", "tyni"])
def test_names_that_the_hub_has_not(name, stand_in, options):
    with pytest.raises(ModelError, match=f"model {name} is no folder here, and {stand_in.url} has none of that name"):
        local_engine(options(name))


@pytest.mark.parametrize("name", ["a--b", "org/tiny.git", "org/a..b"])
def test_names_that_no_hub_can_have(name, stand_in, options):
    with pytest.raises(ModelError, match=f"model {name} is no folder here, and no name that a hub could have"):
        local_engine(options(name))


def test_what_cannot_be_served_costs_no_weights(stand_in, options, tmp_path):
    for number, (change, says, others) in enumerate(
        [
            (
                {"architectures": ["MambaForCausalLM"]},
                "model org/x: architectures: MambaForCausalLM is not supported",
                {},
            ),
            ({"logit_scale": 2.0}, 'model org/x: .*"logit_scale" is not understood', {}),
            ({}, "max_model_len 1000000 exceeds the model's limit", {"max_model_len": 1_000_000}),
        ]
    ):
        stand_in.repositories["org/x"] = Repository({"main": tiny(tmp_path / f"x{number}", **change)})
        with pytest.raises(ConfigError, match=says):
            local_engine(options("org/x", **others))
    bare = tiny(tmp_path / "bare")
    (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
    stand_in.repositories["org/bare"] = Repository({"main": bare})
    with pytest.raises(
        ModelError, match=r"org/bare: it has no weights in \*\.safetensors files, only pytorch_model\.bin"
    ):
        local_engine(options("org/bare"))
    (bare / "config.json").unlink()
    stand_in.repositories["org/bare"].revisions["main"] = bare.rename(tmp_path / "barer")
    with pytest.raises(ModelError, match=r"model org/bare has no config\.json on "):
        local_engine(options("org/bare"))
    assert {*stand_in.downloads()} <= {"config.json", "generation_config.json"}


def test_a_disk_without_room_is_refused_with_both_sizes(stand_in, options, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "free_bytes", lambda _path: 10**5)
    needed = sum((Path(BUNDLED_MODEL) / name).stat().st_size for name in ["model.safetensors", *TEXTS[2:]])
    says = rf"model org/tiny needs {needed / 1e9:.1f} GB more in {tmp_path / 'cache'}, where 0\.0 GB are free"
    with pytest.raises(ModelError, match=says):
        local_engine(options())
    assert {*stand_in.downloads()} <= {"config.json", "generation_config.json"}


def test_a_connection_that_breaks_goes_on_where_it_was(stand_in, options, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # so much of a file is small here
    stand_in.breaks["model.safetensors"] = [70_000]
    folder = Path(local_engine(options()).model)
    assert (folder / "model.safetensors").read_bytes() == (Path(BUNDLED_MODEL) / "model.safetensors").read_bytes()
    starts = [request.start for request in stand_in.requests if request.file == "model.safetensors"]
    assert starts == [0, 70_000]


def test_a_download_that_ended_early_goes_on_with_the_files_that_lack(stand_in, options, tmp_path):
    stand_in.repositories["org/two"] = Repository({"main": tiny(tmp_path / "two", shards=True)})
    stand_in.failing.add(SHARDS[1])
    with pytest.raises(ModelError, match=rf"{stand_in.url} answers with status 500 for model org/two"):
        local_engine(options("org/two"))
    stand_in.failing.clear()
    stand_in.requests.clear()
    folder = Path(local_engine(options("org/two")).model)
    assert stand_in.downloads() == [SHARDS[1]]
    assert all((folder / name).is_file() for name in SHARDS)


def test_what_the_model_is_called(stand_in, options):
    model = local_model(ModelConfig(options(), ServerConfig()))
    assert (model.name, Path(model.engine.model).parent.name) == ("org/tiny", "snapshots")
    assert local_model(ModelConfig(options(), ServerConfig(served_model_name="m"))).name == "m"
    (first, second), _ = make_models(
        check_names({"models": [{"model": "org/a"}, {"model": "other/a", "revision": "b"}]})
    )
    assert (first.name, second.name, second.engine.revision) == ("org/a", "other/a", "b")
    with pytest.raises(ConfigError, match="revision belongs to each of models"):
        check_names({"revision": "b", "models": [{}]})


def test_adapters_have_names_too(stand_in, options, tmp_path):
    wanted = ["adapter_config.json", "adapter_model.safetensors"]
    for name in (*wanted, "README.md", "optimizer.pt"):
        (tmp_path / "sql").mkdir(exist_ok=True)
        (tmp_path / "sql" / name).write_text(name)
    stand_in.repositories["org/sql"] = Repository({"main": tmp_path / "sql"})
    modules = {"sql": "org/sql", "law": str(tmp_path / "sql")}
    named = options(str(tmp_path / "repository"), enable_lora=True, lora_modules=modules)
    assert needs_hub(named)
    adapters = local_engine(named).adapters
    assert sorted(stand_in.downloads()) == wanted
    assert sorted(path.name for path in Path(adapters["sql"]).iterdir()) == wanted
    assert adapters["law"] == modules["law"]
    assert local_adapter("org/sql", named.download_dir) == adapters["sql"]
    assert stand_in.downloads() == []
    for name, reason in (
        ("org/none", "adapter org/none is no folder here, and"),
        ("org/tiny", r"adapter org/tiny has no adapter_config\.json on"),
    ):
        with pytest.raises(ModelError, match=reason):
            local_adapter(name, named.download_dir)


def test_a_server_downloads_in_a_process_that_can_be_stopped(stand_in, options, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (model,) = local_models([ModelConfig(options(), ServerConfig())])
    assert (model.name, Path(model.engine.model).is_dir()) == ("org/tiny", True)
    assert model.engine == options(model=model.engine.model)
    with pytest.raises(ModelError, match="model tyni is no folder here"):
        local_models([ModelConfig(options("tyni"), ServerConfig())])
    with pytest.raises(Exception, match="the download of a model was stopped"):
        local_models([ModelConfig(options("org/tiny"), ServerConfig())], lambda: False, 0.01)
    assert os.environ["HF_ENDPOINT"] == stand_in.url

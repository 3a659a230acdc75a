"""Models and adapters by name: what serving needs of a name on the Hugging Face Hub, in the cache that others share.

A name is resolved to a commit once. config.json comes first and is checked, so that a model that cannot be served costs
one small file; then it is known which files are missing, whether there is room for them, and they are downloaded.
Nothing is asked of the hub for files that the cache has. Without a network the cache alone serves.

The library huggingface_hub keeps the cache, and reads HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from rayllm.config import lora
from rayllm.config.model_folder import WEIGHTS, WEIGHTS_INDEX, indexed_weights
from rayllm.config.options import EngineConfig, ModelConfig, is_hub_name
from rayllm.config.resolved import MAX_GPUS, resolve
from rayllm.errors import ConfigError, ModelError, RayllmError

CONFIG = "config.json"
FIRST_FILES = (CONFIG, "generation_config.json", WEIGHTS_INDEX)  # what the model is, and which files its weights are
ADAPTER_FILES = (lora.CONFIG_FILE, lora.WEIGHTS_FILE)
# Tokenizers, chat templates and configs. Indexes are of weights, and the one that counts is among the first files.
TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")
GB = 10**9
TOO_MANY_REQUESTS = 429

logger = logging.getLogger(__name__)


def local_model(model: ModelConfig) -> ModelConfig:
    """The model with a folder in place of a name on the hub, and that name as its name in the API.

    Raises as `local_engine` does.
    """
    return with_engine(model, local_engine(model.engine))


def with_engine(model: ModelConfig, engine: EngineConfig) -> ModelConfig:
    """The model with other options of its engine, under the name that it had."""
    if engine is model.engine:
        return model
    return ModelConfig(engine, model.server.model_copy(update={"served_model_name": model.name}))


def local_engine(options: EngineConfig) -> EngineConfig:
    """The options with folders in place of names on the hub, which are downloaded if need be; a folder stays.

    All that is known before the weights are read is checked before they are downloaded. Raises ConfigError, and
    ModelError in one sentence for a name that the hub or the cache has not, or has no weights of that can be served.
    """
    if options.revision is not None and not is_hub_name(options.model):
        raise ConfigError(f"revision: needs a model's name on the hub, and {options.model} is a folder's")
    if not needs_hub(options):
        return options

    def in_folder(folder: str) -> EngineConfig:
        return options.model_copy(update={"model": folder, "revision": None})

    if is_hub_name(options.model):
        folder = Hub(cache_dir=options.download_dir).fetch(
            options.model,
            options.revision,
            check=lambda folder: resolve(in_folder(folder), MAX_GPUS),
            weights=options.load_format != "dummy",
        )
        options = in_folder(folder)
    modules = [f"{name}={local_adapter(path, options.download_dir)}" for name, path in options.adapters.items()]
    return options.model_copy(update={"lora_modules": modules})


def needs_hub(options: EngineConfig) -> bool:
    """Whether the model or an adapter is a name on the hub."""
    return any(is_hub_name(each) for each in (options.model, *options.adapters.values()))


def local_adapter(path: str, cache_dir: str | None) -> str:
    """The folder of an adapter that a path is, or a name on the hub, which is downloaded if need be. Raises ModelError.

    cache_dir: the option download_dir.
    """
    return Hub(cache_dir=cache_dir).fetch_adapter(path) if is_hub_name(path) else path


class Hub:
    """A hub and its cache on this host. What is not given is as the library has it from the environment.

    offline: ask nobody; the cache has to do.
    """

    def __init__(self, *, endpoint: str | None = None, cache_dir: str | None = None, offline: bool | None = None):
        from huggingface_hub import constants, is_offline_mode

        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self._cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
        self._offline = is_offline_mode() if offline is None else offline

    def fetch(
        self, name: str, revision: str | None = None, *, check: Callable[[str], object], weights: bool = True
    ) -> str:
        """The folder of a model at a commit, with all that serving needs.

        revision: a branch, a tag or a commit; None is the main branch. check: is handed the folder once config.json is
        in it, and raises what speaks against a download of the rest. weights: those too. Raises ModelError.
        """
        with self._explained(name, revision):
            pinned = self._pin(name, revision)
            folder = self._download(name, pinned, FIRST_FILES)
            listed = self._list(name, pinned)
        if not (folder / CONFIG).is_file():
            raise ModelError(f"model {name} has no {CONFIG} on {self._endpoint}, so it is none that can be served")
        there = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        repository = there if listed is None else listed
        try:
            check(str(folder))
            needed = text_files(repository) + (weight_files(repository, folder) if weights else [])
        except ModelError as error:
            seen = f" (as far as the cache {self._cache} has it, for the hub does not answer)" if listed is None else ""
            raise ModelError(f"model {name}: {error}{seen}") from None
        if missing := [file for file in needed if not (folder / file).is_file()]:
            with self._explained(name, revision):
                self._check_room(name, pinned, missing)
                self._download(name, pinned, missing, show=True)
            if left := [file for file in missing if not (folder / file).is_file()]:
                raise ModelError(f"model {name} at revision {pinned.resolved} lacks the file {left[0]}")
        logger.info("model %s at revision %s is commit %s, in %s", name, pinned, pinned.resolved, folder)
        return str(folder)

    def fetch_adapter(self, name: str) -> str:
        """The folder of an adapter in PEFT's form, as the main branch has it now. Raises ModelError."""
        with self._explained(name, None, "adapter"):
            pinned = self._pin(name, None)
            folder = self._download(name, pinned, ADAPTER_FILES, show=True)
        for file in ADAPTER_FILES:
            if not (folder / file).is_file():
                raise ModelError(f"adapter {name} has no {file} on {self._endpoint}, so it is none that can be served")
        logger.info("adapter %s is commit %s, in %s", name, pinned.resolved, folder)
        return str(folder)

    def _pin(self, name: str, revision: str | None) -> Any:
        """A revision as the library takes it, with its commit. If the hub does not answer, the last one known."""
        from huggingface_hub import HfApi, errors

        api = HfApi(endpoint=self._endpoint)
        find = partial(api.resolve_revision, name, revision=revision, cache_dir=str(self._cache))
        try:
            return find(local_files_only=self._offline)
        except errors.HfHubHTTPError as error:
            if error.response.status_code != TOO_MANY_REQUESTS:
                raise
            # Hosts that share an address and start at once meet this limit. For 500 and up the library does the same.
            try:
                return find(local_files_only=True)
            except errors.RevisionResolutionError:
                raise error from None

    def _list(self, name: str, pinned: Any) -> list[str] | None:
        """The files that a commit has on the hub; None if the cache does not know, and the hub could not be asked."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return [each.path for each in get_cached_repo_tree(name, revision=pinned, cache_dir=str(self._cache))]
        except CachedRepoTreeNotFoundError:
            return None

    def _check_room(self, name: str, pinned: Any, files: list[str]) -> None:
        """Raise ModelError if the disk has no room for files that are to be downloaded."""
        if self._offline:
            return
        plan = self._call(name, pinned, files, show=False, dry_run=True)
        needed, free = sum(each.file_size or 0 for each in plan if each.will_download), free_bytes(self._cache)
        if needed > free:
            raise ModelError(
                f"model {name} needs {needed / GB:.1f} GB more in {self._cache}, where {free / GB:.1f} GB are free; "
                "download_dir or HF_HUB_CACHE can name another place"
            )

    def _download(self, name: str, pinned: Any, files: tuple[str, ...] | list[str], *, show: bool = False) -> Path:
        return Path(self._call(name, pinned, files, show=show, local_files_only=self._offline))

    def _call(self, name: str, pinned: Any, files: tuple[str, ...] | list[str], *, show: bool, **options: Any) -> Any:
        """The library's download. show: a progress bar, if standard error is a terminal."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **(kwargs | {"disable": None if show else True}))

        return snapshot_download(
            name,
            revision=pinned,
            endpoint=self._endpoint,
            cache_dir=str(self._cache),
            allow_patterns=[escape(file) for file in files],
            tqdm_class=Bar,
            **options,
        )

    @contextmanager
    def _explained(self, name: str, revision: str | None, kind: str = "model") -> Iterator[None]:
        """Errors of the library as ModelErrors."""
        from huggingface_hub import errors

        what = f"{kind} {name}"
        exact = what if revision is None else f"{what} at revision {revision}"
        try:
            yield
        except RayllmError:
            raise
        except errors.GatedRepoError:
            raise ModelError(
                f"{what} is gated: accept its licence on {self._endpoint}/{name}, and set HF_TOKEN to a token of "
                "the account that did"
            ) from None
        except errors.RepositoryNotFoundError:
            raise ModelError(
                f"{what} is no folder here, and {self._endpoint} has none of that name (or a private one, for "
                "which HF_TOKEN has to be set)"
            ) from None
        except errors.RevisionNotFoundError:
            raise ModelError(f"{what} has no revision {revision or 'main'} on {self._endpoint}") from None
        except errors.HFValidationError:
            raise ModelError(f"{what} is no folder here, and no name that a hub could have") from None
        except (errors.RevisionResolutionError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            lack = f"{exact} is no folder here, and no whole copy of it is in the cache {self._cache}"
            if self._offline:
                raise ModelError(f"{lack}; HF_HUB_OFFLINE keeps it from being downloaded") from None
            cause = error.__cause__ or error
            raise ModelError(f"{lack}; {self._endpoint} does not answer ({_one_line(cause)})") from None
        except errors.HfHubHTTPError as error:
            if error.response.status_code == 401:
                raise ModelError(f"{self._endpoint} refuses the token in HF_TOKEN for {what}") from None
            status, told = error.response.status_code, error.server_message
            raise ModelError(
                f"{self._endpoint} answers with status {status} for {exact}" + (f": {told}" if told else "")
            ) from None
        except Exception as error:  # of the libraries below that one: connections, disks
            raise ModelError(
                f"the download of {exact} has ended early ({_one_line(error)}); files that are whole are kept, "
                "and the next start gets the others"
            ) from None


def text_files(names: list[str]) -> list[str]:
    """Those files of a repository that are neither weights nor of another framework: configs, tokenizers, templates."""
    plain = [name for name in names if "/" not in name and not name.endswith(".index.json")]
    nested = [name for name in names if name.count("/") == 1]
    return [name for name in (*plain, *nested) if any(_matches(name, pattern) for pattern in TEXT_FILES)]


def weight_files(names: list[str], folder: Path) -> list[str]:
    """Those files of a repository that its weights are read from: what the index says, if there is one.

    Of two copies in different layouts, as in consolidated.safetensors beside model.safetensors, the one that the
    loader reads. Raises ModelError.
    """
    if WEIGHTS in names:
        return [WEIGHTS]
    if (index := indexed_weights(folder)) is not None:
        files = sorted(set(index.values()))
        if gone := [file for file in files if file not in names]:
            raise ModelError(f"{WEIGHTS_INDEX} names the file {gone[0]}, which is not there")
        return files
    found = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    if not found:
        others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
        told = f", only {others[0]}" if others else ""
        raise ModelError(f"it has no weights in *.safetensors files{told}; no others are loaded")
    return [name for name in found if not name.startswith("consolidated")] or found


def free_bytes(path: Path) -> int:
    """That the file system has free at a path, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

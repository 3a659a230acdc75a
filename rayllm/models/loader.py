"""Weights: from safetensors files (`Checkpoint`) or from a seed (`DummyCheckpoint`) into one rank's model."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from rayllm.config.json_fields import about_damage
from rayllm.config.model_folder import WEIGHTS, indexed_weights
from rayllm.config.model_spec import ModelSpec
from rayllm.config.quantization import FP8_BY_CHANNEL
from rayllm.config.resolved import ResolvedConfig
from rayllm.errors import ModelError
from rayllm.layers.layer import BuildContext
from rayllm.layers.linear import Linear
from rayllm.layers.lora import AdapterState
from rayllm.layers.matrices.plain import PlainMatrix
from rayllm.layers.weights import WeightSource
from rayllm.models.base import CausalLM
from rayllm.models.quantised import KEYS, Index, QuantisedCheckpoint, QuantisingSource, Stored, StoredTensors
from rayllm.models.registry import model_class
from rayllm.models.text_only import split_text
from rayllm.parallel.shared_weights import SharedWeights
from rayllm.parallel.tp_group import TPGroup

logger = logging.getLogger(__name__)

# Buffers that old checkpoints hold and that the model derives from its config.
DERIVED_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# Of a layer that has keys and values of its own.
KV_MODULES = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
# Endings of names of weights that are around 1 in any model.
ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "ln_f.weight", "layer_scalar", "router.scale", "expert_scale")
FLOAT_STORAGE = ("F64", "F32", "F16", "BF16")
NAMES_IN_ERRORS = 5


class Checkpoint(StoredTensors):
    """The *.safetensors files of a model folder, mapped lazily: a slice is read from the file when it is asked for.

    text_only: it holds towers beside a text model, whose weights alone are read, by the names of a text model alone.
    left_out: beginnings of names of weights that nobody reads, as of layers that guess further tokens.
    Raises ModelError if the folder has no safetensors weights, or files that are missing or damaged.
    """

    def __init__(self, path: str, *, text_only: bool = False, left_out: tuple[str, ...] = ()):
        super().__init__()
        self._folder = Path(path)
        self._open: dict[str, Any] = {}
        # Weights of towers, and weights of `left_out`.
        self.num_left_out = self.num_unused = 0
        self._file_of = self._find_weights()
        # Name in a text model alone -> stored name, where they may differ.
        self._text: dict[str, str] = {}
        names = {name: name for name in self._file_of}
        if text_only:
            self._text, towers = split_text(self._file_of)
            self.num_left_out, names = len(towers), self._text
        read = {stored: self._file_of[stored] for name, stored in names.items() if not name.startswith(left_out)}
        self.num_unused = len(names) - len(read)
        self._file_of = read
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._others: set[str] = set()  # modules of other ranks
        # Shown on terminals only, so not by the ranks of a cluster.
        self._bar = tqdm(total=len(self._file_of), desc="Loading weights", unit="tensor", disable=None, leave=False)

    def slice(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> torch.Tensor:
        stored = self.part(name, shape, (slice(None),) * dim + (slice(start, stop),))
        return torch.zeros(()).expand(*shape[:dim], stop - start, *shape[dim + 1 :]) if stored is None else stored

    def part(
        self, name: str, shape: tuple[int, ...], index: Index, dtypes: tuple[str, ...] = FLOAT_STORAGE
    ) -> torch.Tensor | None:
        view = self._view(name, shape, dtypes)
        return None if view is None else view[index]

    def optional(self, name: str) -> torch.Tensor | None:
        view = self._view(name, None) if self._stored(name) in self._file_of else None
        return None if view is None else view[...]

    def choose(self, *names: str) -> str:
        return next((name for name in names if self._stored(name) in self._file_of), names[0])

    def leave(self, module: str) -> None:
        self._others.add(module)

    def check_found(self) -> None:
        if self._missing:
            raise ModelError(f"model folder {self._folder} lacks {_some(self._missing, 'weight')}")

    def finish(self) -> None:
        self._bar.close()
        self.check_found()
        unused = [name for name in self._file_of if name not in self._used and not name.endswith(DERIVED_BUFFERS)]
        unused = self._without_others(unused)
        if unused:
            raise ModelError(
                f"model folder {self._folder} has {_some(unused, 'weight')} that its config.json has no place for"
            )
        self._open.clear()

    def _without_others(self, stored: list[str]) -> list[str]:
        """Those of these names that are not of a module that was left to other ranks."""
        if not self._others:
            return stored
        others = self._others | {module.partition(".")[2] for module in self._others}  # of a model's body alone
        own = {name: text for text, name in self._text.items()}

        def is_left(name: str) -> bool:
            parts = own.get(name, name).split(".")
            return any(".".join(parts[:end]) in others for end in range(1, len(parts)))

        return [name for name in stored if not is_left(name)]

    def find(self, name: str) -> Stored | None:
        name = self._stored(name)
        try:
            view = self._handle(self._file_of[name]).get_slice(name) if name in self._file_of else None
        except SafetensorError:  # the index names a file that lacks the tensor
            view = None
        return None if view is None else Stored(name, view.get_dtype(), tuple(view.get_shape()))

    def _stored(self, name: str) -> str:
        """The name as it is stored: the checkpoint of a model's body alone lacks the first part of its names."""
        name = self._text.get(name, name)
        of_body = name.partition(".")[2]
        return of_body if of_body in self._file_of and name not in self._file_of else name

    def _view(self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...] = FLOAT_STORAGE) -> Any:
        """A lazy slice of the stored tensor, None if there is none. shape: None takes any."""
        name = self._stored(name)
        if name not in self._file_of:
            self._missing.append(name)
            return None
        if name not in self._used:
            self._used.add(name)
            self._bar.update()
        file = self._file_of[name]
        try:
            view = self._handle(file).get_slice(name)
        except SafetensorError:
            # The index names a file that lacks the tensor.
            self._missing.append(name)
            return None
        stored = tuple(view.get_shape())
        if shape is not None and stored != shape:
            raise ModelError(f"{file}: weight {name} has shape {list(stored)}, but config.json asks for {list(shape)}")
        if view.get_dtype() not in dtypes:
            raise ModelError(f"{file}: weight {name} is stored as {view.get_dtype()}, which is not supported")
        return view

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            try:
                self._open[file] = safe_open(path, framework="pt", device="cpu")
            except OSError:
                raise ModelError(f"model folder {self._folder} lacks the weights file {file}") from None
            except SafetensorError as error:
                raise ModelError(f"weights file {path} is damaged: {error}{about_damage(path)}") from None
        return self._open[file]

    def _find_weights(self) -> dict[str, str]:
        """Name of each weight -> name of its file. model.safetensors wins over an index, which a checkpoint in several
        files may have left behind, and that over other files: as in transformers."""
        is_one = (self._folder / WEIGHTS).is_file()
        if not is_one and (indexed := indexed_weights(self._folder)) is not None:
            return indexed
        found = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not found:
            raise ModelError(self._no_weights())
        file_of: dict[str, str] = {}
        for file in [WEIGHTS] if is_one else found:
            for name in self._handle(file).keys():  # noqa: SIM118 (the handle is no mapping)
                if name in file_of:
                    raise ModelError(f"weight {name} is in both {file_of[name]} and {file} of {self._folder}")
                file_of[name] = file
        return file_of

    def _no_weights(self) -> str:
        others = sorted(p.name for p in self._folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        if others:
            return f"model folder {self._folder} has weights only as {others[0]}; only *.safetensors files are loaded"
        return f"model folder {self._folder} has no weights (*.safetensors)"


class DummyCheckpoint(WeightSource):
    """Random weights for any model, each a function of (seed, name): norms around 1, the others of std 0.02.

    The whole tensor is generated on `device` and then sliced, so any number of ranks gets the same model.
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self._seed, self._device, self._dtype = seed, device, dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        noise = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype).mul_(0.02)
        return noise.add_(1.0) if name.endswith(ONES) else noise

    def slice(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> torch.Tensor:
        return self.tensor(name, shape).narrow(dim, start, stop - start)


def load_model(
    config: ResolvedConfig, tp: TPGroup, device: torch.device, weights: SharedWeights | None = None
) -> CausalLM:
    """This rank's part of the model in the folder config.options.model, on `device`.

    With load_format "dummy" the weights come from the seed. weights: where they are to be, or are already; None keeps
    them for this process alone. Raises ModelError if the checkpoint does not fit the spec.
    """
    spec, options, dtype = _tied(config), config.options, getattr(torch, config.dtype)
    make = model_class(spec.architecture)
    adapters = AdapterState(options.max_loras, options.max_lora_rank) if options.enable_lora else None
    filled = weights is not None and weights.is_filled
    source = _weight_source(config, tp, device, filled=filled)
    context = BuildContext(
        tp,
        device,
        dtype,
        config.max_model_len,
        options.deterministic,
        memory=weights,
        adapters=adapters,
        formats=source.format_of,
        expert_parallel=options.enable_expert_parallel,
    )
    if filled:
        return make(context, spec).eval()
    if weights is not None:
        make(replace(context, device=torch.device("meta")), spec)
        weights.allocate()
    with torch.no_grad():
        model = make(context, spec)
        model.load(source)
    source.finish()
    if unwritten := source.unwritten(model):
        raise RuntimeError(f"parameters left unfilled after loading: {', '.join(unwritten)}")
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    if kept := sum(not isinstance(linear.matrix, PlainMatrix) for linear in linears):
        logger.info("rank %d: %d of %d linear layers keep weights in fewer bits", tp.rank, kept, len(linears))
    if device.type == "cuda":
        # Whole dummy tensors and staging copies would otherwise count as used when the KV cache is sized.
        torch.cuda.empty_cache()
    return model.eval()


def _tied(config: ResolvedConfig) -> ModelSpec:
    """The spec, and where config.json does not say it, whether the output matrix is the embedding."""
    spec, options = config.spec, config.options
    if spec.tie_word_embeddings is not None:
        return spec
    has_head = options.load_format == "dummy"
    if not has_head:
        checkpoint = Checkpoint(options.model, text_only=spec.text_only)
        has_head = any(checkpoint.find(f"lm_head.{key}") for key in set(KEYS.values()))
    return replace(spec, tie_word_embeddings=not has_head)


def _left_out(spec: ModelSpec) -> tuple[str, ...]:
    """Beginnings of names of weights that the model has no use for, whether a checkpoint holds them or not."""
    drafts = [f"model.layers.{spec.num_layers + i}." for i in range(spec.draft_layers)]
    readers = [layer for layer in range(spec.num_layers) if spec.kv_layer(layer) != layer]
    keys = [f"model.layers.{layer}.self_attn.{name}" for layer in readers for name in KV_MODULES]
    drafts += [] if spec.draft_prefix is None else [spec.draft_prefix]
    return (*drafts, *keys)


def _weight_source(config: ResolvedConfig, tp: TPGroup, device: torch.device, *, filled: bool) -> WeightSource:
    """Where the model's weights come from, in the formats that they are to have.

    filled: they are there already, and only formats are asked for, for which the names of the tensors on disk are
    looked at where some layers may be in fewer bits.
    """
    spec, options = config.spec, config.options
    stored, keep = spec.quantization, options.quantization != "none"
    has_formats = options.quantization == "fp8" or (stored is not None and keep)
    if options.load_format == "dummy" or (filled and not has_formats):
        dummy = DummyCheckpoint(options.seed or 0, device, getattr(torch, config.dtype))
        if stored is not None and keep:
            return QuantisingSource(dummy, stored.made_up, device)
        if options.quantization == "fp8":
            return QuantisingSource(dummy, lambda _module: FP8_BY_CHANNEL, device)
        return dummy
    checkpoint = Checkpoint(options.model, text_only=spec.text_only, left_out=_left_out(spec))
    if checkpoint.num_left_out and tp.rank == 0:
        logger.info("%s is served for text alone: %d weights are left out", options.model, checkpoint.num_left_out)
    if checkpoint.num_unused and tp.rank == 0:
        logger.info(
            "%d weights of which the model has no use are left out, as those that guess further tokens",
            checkpoint.num_unused,
        )
    if stored is not None:
        return QuantisedCheckpoint(checkpoint, stored, device, keep=keep)
    if options.quantization == "fp8":
        return QuantisingSource(
            checkpoint, lambda module: FP8_BY_CHANNEL if checkpoint.find(module + ".weight") else None, device
        )
    return checkpoint


def _some(names: list[str], what: str) -> str:
    """ "2 weights (a, b)", with at most a few of the names."""
    shown = ", ".join(names[:NAMES_IN_ERRORS]) + (", ..." if len(names) > NAMES_IN_ERRORS else "")
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({shown})"

"""Weights in fewer bits: as a checkpoint stores them (`QuantisedCheckpoint`), or made from others (`QuantisingSource`).

A layer that computes with fewer bits asks for the `numbers` of its part. All others ask for their slice of `x.weight`
as ever, and get it as float32. Either way the part of the packed tensors that holds it is read, out to the next borders
of blocks and of packed words.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from types import EllipsisType
from typing import NamedTuple

import torch

from rayllm.config.quantization import MXFP4_GROUP, QuantizationSpec, WeightFormat
from rayllm.errors import ModelError
from rayllm.layers.weights import Span, WeightSource
from rayllm_kernels.quantised import formats
from rayllm_kernels.quantised.formats import Numbers

# As what safetensors may have scales and zero points of whole numbers.
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
ZEROS = ("I8", "F8_E4M3", *SCALES)
# As what other tensors are stored, and in torch.
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8}
Index = tuple[slice | EllipsisType, ...]
WORD = 32  # bits
# How the weight of a module is called that is stored so, and how all experts' weights.
KEYS = {"fp8": "weight", "int8": "weight", "packed": "weight_packed", "gptq": "qweight", "awq": "qweight"}
EXPERTS_KEY = "_blocks"
# Of activations: scales, which count where products are in fp8, and what says that there is nothing else.
ACTIVATION_SCALES = ("input_scale", "activation_scale")
ACTIVATIONS = (*ACTIVATION_SCALES, "input_zero_point")
NO_EXPONENT = 255  # NaN in E8M0
MADE_UP_SCALE = 1 / 64  # of activations, of which the largest is then 7


class Stored(NamedTuple):
    """A tensor as the files have it: its name there, and its dtype as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class StoredTensors(WeightSource):
    """Tensors of whatever dtype."""

    @abstractmethod
    def find(self, name: str) -> Stored | None:
        """What there is of this name; None if it is missing."""

    @abstractmethod
    def part(self, name: str, shape: tuple[int, ...], index: Index, dtypes: tuple[str, ...]) -> torch.Tensor | None:
        """The numbers at `index`, one slice a dimension or fewer; None if `name` is missing, which is noted.

        dtypes: those that it may have. Raises ModelError for any other, and for another shape than `shape`.
        """


class QuantisedCheckpoint(WeightSource):
    """`checkpoint`, its quantised weights as numbers or float32 on `device`, where they are turned into these.

    keep: layers are told of what is quantised, and may keep it so.
    """

    def __init__(
        self, checkpoint: StoredTensors, quantization: QuantizationSpec, device: torch.device, *, keep: bool = True
    ):
        super().__init__()
        self._checkpoint, self._quantization, self._device, self._keep = checkpoint, quantization, device, keep
        self._plain: set[str] = set()  # names that were asked for, of what is stored as it is
        self._gptq_modules: set[str] = set()  # modules

    def slice(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> torch.Tensor:
        found = self._format(name, len(shape))
        if found is None:
            self._plain.add(name)
            return self._checkpoint.slice(name, shape, dim, start, stop)
        spans = [Span(0, size, size) for size in shape]
        spans[dim] = Span(start, stop, shape[dim])
        if found.storage == "mxfp4":
            return self._experts(name, *spans)
        return self._numbers(name.removesuffix(".weight"), found, *spans).dequantised()

    def format_of(self, module: str) -> WeightFormat | None:
        return (self._format(module + ".weight", 2) or self._format(module, 3)) if self._keep else None

    def numbers(self, module: str, rows: Span, columns: Span) -> Numbers:
        found = self._format(module + ".weight", 2)
        if found is None:
            raise ModelError(f"weight {module}.weight is missing or not quantised, unlike those it is computed with")
        return self._numbers(module, found, rows, columns)

    def expert_codes(self, name: str, experts: Span, outputs: Span, inputs: Span) -> tuple[torch.Tensor, torch.Tensor]:
        groups, half = inputs.blocks(MXFP4_GROUP), MXFP4_GROUP // 2
        blocks = self._read(name + EXPERTS_KEY, ("U8",), experts, outputs, groups, Span(0, half, half))
        return formats.e2m1_codes(blocks), self._exponents(name, experts, outputs, groups)

    def activation_scale(self, module: str) -> torch.Tensor:
        name = self._checkpoint.choose(*(f"{module}.{scale}" for scale in ACTIVATION_SCALES))
        stored = self._checkpoint.find(name)
        shape = () if stored is not None and not stored.shape else (1,)
        one = self._checkpoint.part(name, shape, (...,), SCALES)
        if one is None:
            return torch.ones(1)
        if not 0 < one.item() < math.inf:
            raise ModelError(f"weight {name} must be a positive number, not {one.item():g}")
        return one.reshape(1).float()

    def choose(self, *names: str) -> str:
        return next((name for name in names if self._is_there(name)), names[0])

    def optional(self, name: str) -> torch.Tensor | None:
        return self._checkpoint.optional(name)

    def check_found(self) -> None:
        self._checkpoint.check_found()

    def leave(self, module: str) -> None:
        self._checkpoint.leave(module)

    def finish(self) -> None:
        # AutoGPTQ writes biases of zeros for projections that have none.
        for bias in sorted(module + ".bias" for module in self._gptq_modules):
            stored = None if bias in self._plain else self._checkpoint.optional(bias)
            if stored is not None and bool(stored.any()):
                raise ModelError(f"weight {bias} is not zero, but config.json has no place for it")
        self._checkpoint.finish()

    def _is_there(self, name: str) -> bool:
        names = (name, name + EXPERTS_KEY, *(_of(name, key) for key in KEYS.values()))
        return any(self._checkpoint.find(each) for each in names)

    def _format(self, name: str, num_dims: int) -> WeightFormat | None:
        """How the tensor `name` is quantised; None if it is stored as it is, or missing."""
        module, is_weight = name.removesuffix(".weight"), name.endswith(".weight")
        for key in KEYS.values() if is_weight else (EXPERTS_KEY,):
            stored = self._checkpoint.find(f"{module}.{key}" if is_weight else name + key)
            if stored is None:
                continue
            found = self._quantization.format_of(module, stored.name.removesuffix(key).removesuffix("."))
            if found is None or KEYS.get(found.storage, EXPERTS_KEY) != key:
                continue
            if found.storage == "mxfp4" and num_dims == 3:
                return found
            if num_dims == 2 and (key != "weight" or stored.dtype in DTYPES):
                return found
        return None

    def _numbers(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> Numbers:
        per_word, group = WORD // found.bits, found.block[1] or 1
        for scale in ACTIVATIONS:
            if stored := self._checkpoint.find(f"{module}.{scale}"):
                self._checkpoint.part(stored.name, stored.shape, (...,), (stored.dtype,))
        if found.storage in ("fp8", "int8"):
            outer = rows.aligned(found.block[0] or 1), columns.aligned(group)
            numbers = self._blocks(module, found, *outer)
        elif found.storage == "packed":
            outer = rows.aligned(1 if found.symmetric else per_word), columns.aligned(math.lcm(per_word, group))
            numbers = self._packed(module, found, *outer)
        elif found.storage == "gptq":
            outer = rows.aligned(per_word), columns.aligned(math.lcm(per_word, group))
            numbers = self._gptq(module, found, *outer)
        else:
            outer = rows.aligned(per_word), columns.aligned(group)
            numbers = self._awq(module, found, *outer)
        return numbers.part(rows.within(outer[0]), columns.within(outer[1]))

    def _blocks(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> Numbers:
        dtype = "F8_E4M3" if found.storage == "fp8" else "I8"
        values = self._read(f"{module}.weight", (dtype,), rows, columns)
        scale = self._checkpoint.choose(f"{module}.weight_scale_inv", f"{module}.weight_scale")
        zero = f"{module}.weight_zero_point"
        zeros = None
        if not found.symmetric:
            zeros = self._of_blocks(zero, ZEROS, found, rows, columns)
        elif self._checkpoint.find(zero) and bool(self._of_blocks(zero, ZEROS, found, rows, columns).float().any()):
            raise ModelError(f"weight {zero} is not zero, but config.json says symmetric")
        scales = self._of_blocks(scale, SCALES, found, rows, columns)
        return formats.block_numbers(values, scales, found.block, zeros)

    def _of_blocks(
        self, name: str, dtypes: tuple[str, ...], found: WeightFormat, rows: Span, columns: Span
    ) -> torch.Tensor:
        """One number a block, as [blocks of rows, blocks of columns]."""
        stored = self._checkpoint.find(name)
        if found.block == (None, None) and stored is not None and math.prod(stored.shape) == 1:
            one = self._checkpoint.part(name, stored.shape, (...,), dtypes)
            if one is not None:
                if dtypes == SCALES:
                    _check_numbers(name, one.float().isfinite())
                return one.reshape(1, 1).to(self._device)
        return self._read(name, dtypes, rows.blocks(found.block[0]), columns.blocks(found.block[1]))

    def _packed(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> Numbers:
        per_word, shape = WORD // found.bits, f"{module}.weight_shape"
        if self._checkpoint.find(shape):
            told = self._read(shape, ("I64", "I32"), Span(0, 2, 2)).tolist()
            if told != [rows.size, columns.size]:
                raise ModelError(f"weight {shape} is {told}, but config.json asks for {[rows.size, columns.size]}")
        packed = self._read(f"{module}.weight_packed", ("I32",), rows, columns.blocks(per_word))
        groups, their = self._groups(f"{module}.weight_g_idx", found, columns)
        scales = self._read(f"{module}.weight_scale", SCALES, rows, their)
        zeros = None
        if not found.symmetric:
            zeros = self._read(f"{module}.weight_zero_point", ("I32",), rows.blocks(per_word), their)
        return formats.packed_numbers(packed, scales, groups, found.bits, zeros)

    def _gptq(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> Numbers:
        self._gptq_modules.add(module)
        per_word = WORD // found.bits
        _check_words(module, per_word, rows, columns)
        qweight = self._read(f"{module}.qweight", ("I32",), columns.blocks(per_word), rows)
        groups, their = self._groups(f"{module}.g_idx", found, columns)
        qzeros = self._read(f"{module}.qzeros", ("I32",), their, rows.blocks(per_word))
        scales = self._read(f"{module}.scales", SCALES, their, rows)
        return formats.gptq_numbers(qweight, qzeros, scales, groups, found.bits, first_form=found.first_form)

    def _awq(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> Numbers:
        per_word = WORD // found.bits
        _check_words(module, per_word, rows)
        qweight = self._read(f"{module}.qweight", ("I32",), columns, rows.blocks(per_word))
        groups, their = self._groups("", found, columns)
        qzeros = self._read(f"{module}.qzeros", ("I32",), their, rows.blocks(per_word))
        scales = self._read(f"{module}.scales", SCALES, their, rows)
        return formats.awq_numbers(qweight, qzeros, scales, groups)

    def _groups(self, name: str, found: WeightFormat, columns: Span) -> tuple[torch.Tensor, Span]:
        """(the group of each of `columns`, int64, counted within those to be read, which groups these are).

        name: of the stored order; empty if the format has none.
        """
        size = found.block[1]
        every, plain = Span(0, columns.size, columns.size).blocks(size), columns.blocks(size)
        regular = torch.arange(columns.start, columns.stop, device=self._device) // (size or columns.size)
        if not found.ordered and not (name and self._checkpoint.find(name)):
            return regular - plain.start, plain
        stored = self._read(name, ("I32",), columns).long()
        if not found.ordered:
            if not torch.equal(stored, regular):
                raise ModelError(f"weight {name} is in another order than that of the inputs, but config.json has none")
            return regular - plain.start, plain
        if bool(((stored < 0) | (stored >= every.size)).any()):
            raise ModelError(f"weight {name} has groups outside 0 to {every.size - 1}")
        return stored, every

    def _experts(self, name: str, experts: Span, inputs: Span, outputs: Span) -> torch.Tensor:
        """[experts, inputs, outputs], as experts are stored that are not quantised; in fewer bits, outputs go first."""
        if inputs.size % MXFP4_GROUP:
            raise ModelError(f"weight {name} has {inputs.size} inputs, no multiple of the {MXFP4_GROUP} of a scale")
        outer = inputs.aligned(MXFP4_GROUP)
        groups, half = outer.blocks(MXFP4_GROUP), MXFP4_GROUP // 2
        blocks = self._read(name + EXPERTS_KEY, ("U8",), experts, outputs, groups, Span(0, half, half))
        scales = self._exponents(name, experts, outputs, groups)
        return formats.dequantise_mxfp4(blocks, scales).transpose(1, 2)[:, inputs.within(outer)]

    def _exponents(self, name: str, *spans: Span) -> torch.Tensor:
        stored = self._read(name + "_scales", ("U8",), *spans)
        _check_numbers(name + "_scales", stored != NO_EXPONENT)
        return stored

    def _read(self, name: str, dtypes: tuple[str, ...], *spans: Span) -> torch.Tensor:
        """The part of a tensor, on the device; zeros if it is missing, which `finish` tells."""
        index = tuple(slice(span.start, span.stop) for span in spans)
        stored = self._checkpoint.part(name, tuple(span.size for span in spans), index, dtypes)
        if stored is None:
            sizes = [span.stop - span.start for span in spans]
            stored = torch.zeros(sizes, dtype=DTYPES.get(dtypes[0], torch.float32))
        if dtypes == SCALES:
            _check_numbers(name, stored.float().isfinite())
        return stored.to(self._device)


class QuantisingSource(WeightSource):
    """Weights of `source`, those of modules that have a format rounded to it as they are read: by the largest of each
    block or group that shares a scale. A rank rounds its own part.
    """

    def __init__(self, source: WeightSource, format_of: Callable[[str], WeightFormat | None], device: torch.device):
        super().__init__()
        self._source, self._format_of, self._device = source, format_of, device

    def slice(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> torch.Tensor:
        return self._source.slice(name, shape, dim, start, stop)

    def choose(self, *names: str) -> str:
        return self._source.choose(*names)

    def optional(self, name: str) -> torch.Tensor | None:
        return self._source.optional(name)

    def leave(self, module: str) -> None:
        self._source.leave(module)

    def finish(self) -> None:
        self._source.finish()

    def format_of(self, module: str) -> WeightFormat | None:
        return self._format_of(module)

    def numbers(self, module: str, rows: Span, columns: Span) -> Numbers:
        found = self._format_of(module)
        assert found is not None, "layers ask for the numbers of what is quantised"
        weight = self._source.rectangle(module + ".weight", rows, columns).to(self._device)
        if found.storage == "fp8":
            return formats.e4m3_numbers(weight, found.block)
        return formats.int4_numbers(weight, found.block[1], symmetric=found.symmetric)

    def expert_codes(self, name: str, experts: Span, outputs: Span, inputs: Span) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (experts.size, inputs.size, outputs.size)  # as they are where they are not quantised
        weight = self._source.slice(name, shape, 0, experts.start, experts.stop).to(self._device)
        own = weight[:, inputs.start : inputs.stop, outputs.start : outputs.stop].transpose(1, 2)
        return formats.e2m1_numbers(own)

    def activation_scale(self, module: str) -> torch.Tensor:  # noqa: ARG002
        return torch.full((1,), MADE_UP_SCALE)


def _of(name: str, key: str) -> str:
    """The weight `name` as it is called if it is stored as `key`."""
    return name.removesuffix("weight") + key if name.endswith(".weight") else name


def _check_numbers(name: str, valid: torch.Tensor) -> None:
    """Raise ModelError unless all scales of a tensor are valid."""
    if not bool(valid.all()):
        raise ModelError(f"weight {name} has scales that are not numbers; the file is damaged or was badly made")


def _check_words(module: str, per_word: int, *spans: Span) -> None:
    for span in spans:
        if span.size % per_word:
            raise ModelError(f"weight {module}.qweight packs {per_word} numbers a word, no divisor of {span.size}")

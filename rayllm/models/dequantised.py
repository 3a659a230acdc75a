"""`DequantisedCheckpoint`: a checkpoint whose weights are stored in fewer bits, read as if they were not.

A layer asks for its slice of `x.weight` as ever. Where the checkpoint has it in fewer bits, the part of the packed
tensors that holds the slice is read, out to the next borders of blocks and of packed words, and turned into float32.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from types import EllipsisType
from typing import NamedTuple, Self

import torch

from rayllm.config.quantization import MXFP4_GROUP, QuantizationSpec, WeightFormat
from rayllm.errors import ModelError
from rayllm.layers.weights import WeightSource
from rayllm_kernels.quantised import formats

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
# Of activations, which stay in the model's dtype.
ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_zero_point")


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


class Span(NamedTuple):
    """[start, stop) of a dimension of `size`."""

    start: int
    stop: int
    size: int

    def blocks(self, step: int | None) -> Self:
        """The blocks of `step` that hold it, counted in blocks; None is one block of all."""
        if step is None:
            return self._replace(start=0, stop=1, size=1)
        return self._replace(start=self.start // step, stop=-(-self.stop // step), size=-(-self.size // step))

    def aligned(self, step: int) -> Self:
        """Out to multiples of `step`, or to the end of the dimension."""
        return self._replace(start=self.start // step * step, stop=min(-(-self.stop // step) * step, self.size))

    def within(self, outer: Span) -> slice:
        """Where it is in a tensor that holds `outer`."""
        return slice(self.start - outer.start, self.stop - outer.start)


class DequantisedCheckpoint(WeightSource):
    """`checkpoint`, its quantised weights as float32 on `device`, where they are turned into it."""

    def __init__(self, checkpoint: StoredTensors, quantization: QuantizationSpec, device: torch.device):
        super().__init__()
        self._checkpoint, self._quantization, self._device = checkpoint, quantization, device
        self._plain: set[str] = set()  # names that were asked for, of what is stored as it is
        self._gptq_modules: set[str] = set()  # modules

    def slice(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> torch.Tensor:
        found = self._format(name, len(shape))
        if found is None:
            self._plain.add(name)
            return self._checkpoint.slice(name, shape, dim, start, stop)
        spans = [Span(0, size, size) for size in shape]
        spans[dim] = Span(start, stop, shape[dim])
        return self._experts(name, *spans) if found.storage == "mxfp4" else self._weight(name, found, *spans)

    def choose(self, *names: str) -> str:
        return next((name for name in names if self._is_there(name)), names[0])

    def optional(self, name: str) -> torch.Tensor | None:
        return self._checkpoint.optional(name)

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

    def _weight(self, name: str, found: WeightFormat, rows: Span, columns: Span) -> torch.Tensor:
        module, per_word, group = name.removesuffix(".weight"), WORD // found.bits, found.block[1] or 1
        for scale in ACTIVATION_SCALES:
            if stored := self._checkpoint.find(f"{module}.{scale}"):
                self._checkpoint.part(stored.name, stored.shape, (...,), (stored.dtype,))
        if found.storage in ("fp8", "int8"):
            outer = rows.aligned(found.block[0] or 1), columns.aligned(group)
            weight = self._blocks(module, found, *outer)
        elif found.storage == "packed":
            outer = rows.aligned(1 if found.symmetric else per_word), columns.aligned(math.lcm(per_word, group))
            weight = self._packed(module, found, *outer)
        elif found.storage == "gptq":
            outer = rows.aligned(per_word), columns.aligned(math.lcm(per_word, group))
            weight = self._gptq_weight(module, found, *outer)
        else:
            outer = rows.aligned(per_word), columns.aligned(group)
            weight = self._awq(module, found, *outer)
        return weight[rows.within(outer[0]), columns.within(outer[1])]

    def _blocks(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> torch.Tensor:
        dtype = "F8_E4M3" if found.storage == "fp8" else "I8"
        numbers = self._read(f"{module}.weight", (dtype,), rows, columns)
        scale = self._checkpoint.choose(f"{module}.weight_scale_inv", f"{module}.weight_scale")
        zero = f"{module}.weight_zero_point"
        zeros = None
        if not found.symmetric:
            zeros = self._of_blocks(zero, ZEROS, found, rows, columns)
        elif self._checkpoint.find(zero) and bool(self._of_blocks(zero, ZEROS, found, rows, columns).float().any()):
            raise ModelError(f"weight {zero} is not zero, but config.json says symmetric")
        scales = self._of_blocks(scale, SCALES, found, rows, columns)
        return formats.dequantise_blocks(numbers, scales, found.block, zeros)

    def _of_blocks(
        self, name: str, dtypes: tuple[str, ...], found: WeightFormat, rows: Span, columns: Span
    ) -> torch.Tensor:
        """One number a block, as [blocks of rows, blocks of columns]."""
        stored = self._checkpoint.find(name)
        if found.block == (None, None) and stored is not None and math.prod(stored.shape) == 1:
            one = self._checkpoint.part(name, stored.shape, (...,), dtypes)
            if one is not None:
                return one.reshape(1, 1).to(self._device)
        return self._read(name, dtypes, rows.blocks(found.block[0]), columns.blocks(found.block[1]))

    def _packed(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> torch.Tensor:
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
        return formats.dequantise_packed(packed, scales, groups, found.bits, zeros)

    def _gptq_weight(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> torch.Tensor:
        self._gptq_modules.add(module)
        per_word = WORD // found.bits
        _check_words(module, per_word, rows, columns)
        qweight = self._read(f"{module}.qweight", ("I32",), columns.blocks(per_word), rows)
        groups, their = self._groups(f"{module}.g_idx", found, columns)
        qzeros = self._read(f"{module}.qzeros", ("I32",), their, rows.blocks(per_word))
        scales = self._read(f"{module}.scales", SCALES, their, rows)
        return formats.dequantise_gptq(qweight, qzeros, scales, groups, found.bits, first_form=found.first_form)

    def _awq(self, module: str, found: WeightFormat, rows: Span, columns: Span) -> torch.Tensor:
        per_word = WORD // found.bits
        _check_words(module, per_word, rows)
        qweight = self._read(f"{module}.qweight", ("I32",), columns, rows.blocks(per_word))
        groups, their = self._groups("", found, columns)
        qzeros = self._read(f"{module}.qzeros", ("I32",), their, rows.blocks(per_word))
        scales = self._read(f"{module}.scales", SCALES, their, rows)
        return formats.dequantise_awq(qweight, qzeros, scales, groups)

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
        scales = self._read(name + "_scales", ("U8",), experts, outputs, groups)
        return formats.dequantise_mxfp4(blocks, scales).transpose(1, 2)[:, inputs.within(outer)]

    def _read(self, name: str, dtypes: tuple[str, ...], *spans: Span) -> torch.Tensor:
        """The part of a tensor, on the device; zeros if it is missing, which `finish` tells."""
        index = tuple(slice(span.start, span.stop) for span in spans)
        stored = self._checkpoint.part(name, tuple(span.size for span in spans), index, dtypes)
        if stored is None:
            sizes = [span.stop - span.start for span in spans]
            stored = torch.zeros(sizes, dtype=DTYPES.get(dtypes[0], torch.float32))
        return stored.to(self._device)


def _of(name: str, key: str) -> str:
    """The weight `name` as it is called if it is stored as `key`."""
    return name.removesuffix("weight") + key if name.endswith(".weight") else name


def _check_words(module: str, per_word: int, *spans: Span) -> None:
    for span in spans:
        if span.size % per_word:
            raise ModelError(f"weight {module}.qweight packs {per_word} numbers a word, no divisor of {span.size}")

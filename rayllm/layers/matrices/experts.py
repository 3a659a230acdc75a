"""`QuantisedExperts`: the weights of a mixture's experts that stay in fewer bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from rayllm.config.quantization import MXFP4_GROUP, WeightFormat
from rayllm.layers.layer import BuildContext
from rayllm.layers.matrices.fp8 import Granule, granule_of
from rayllm.layers.matrices.matrix import Piece
from rayllm.layers.weights import Span, WeightSource
from rayllm_kernels import ops
from rayllm_kernels.device import hardware
from rayllm_kernels.quantised.experts import GROUPS, Kind
from rayllm_kernels.quantised.formats import Numbers
from rayllm_kernels.quantised.int4 import half_of, pack_int4

KINDS: dict[str, Kind] = {"fp8": "fp8", "packed": "int4", "gptq": "int4", "awq": "int4", "mxfp4": "mxfp4"}


class ExpertShapes(NamedTuple):
    """What `Experts` has: sizes of the whole model, the names that the experts may go by, and an expert's projections.

    turns: all experts are two tensors, in which rows of gate and up take turns; else each has its three.
    """

    hidden_size: int
    num_experts: int
    inner_size: int
    names: tuple[str, ...]
    projections: tuple[str, str, str]
    turns: bool


class ExpertPart(NamedTuple):
    """What a rank has: which experts, and of each which inner width, all of one or of the other."""

    experts: Span
    inner: Span

    @classmethod
    def of(cls, context: BuildContext, num_experts: int, inner_size: int) -> ExpertPart:
        """Raises ValueError if the ranks cannot share the width evenly, where they share that."""
        rank, size = context.tp.rank, context.tp.size
        if context.expert_parallel:
            first, end = (num_experts * each // size for each in (rank, rank + 1))
            return cls(Span(first, end, num_experts), Span(0, inner_size, inner_size))
        shard = context.shard(inner_size, "an expert's intermediate size")
        return cls(Span(0, num_experts, num_experts), Span(rank * shard, (rank + 1) * shard, inner_size))

    @property
    def num_here(self) -> int:
        """Experts that the rank has."""
        return self.experts.stop - self.experts.start

    @property
    def owned(self) -> ops.ExpertRange | None:
        """As the products take it: None if all experts are here."""
        first, _, total = self.experts
        return None if self.num_here == total else ops.ExpertRange(first, total)

    def leave_others(self, source: WeightSource, prefix: str) -> None:
        """Other ranks' experts, whose modules are called so and by their numbers, are not for this one to read."""
        for number in range(self.experts.size):
            if not self.experts.start <= number < self.experts.stop:
                source.leave(f"{prefix}{number}")


class QuantisedExperts:
    """gate_up [E, 2 * I, H] and down [E, H, I] of the rank's part, an expert's rows of gate before those of up.

    parameters: by name, for the layer to register. fp8_tokens: as for `ops.experts_quantised`; where the checkpoint
    says that activations are rounded, and the GPU multiplies fp8, or a CPU.
    """

    def __init__(self, context: BuildContext, shapes: ExpertShapes, part: ExpertPart, prefix: str, found: WeightFormat):
        self.shapes, self.part, self.prefix, self.found = shapes, part, prefix, found
        self.inner, self.shard = part.inner, part.inner.stop - part.inner.start
        self.fp8_tokens = found.storage == "fp8" and found.activations is not None and hardware(context.device).has_e4m3
        self.parameters: dict[str, nn.Parameter] = {}
        hidden, granules = shapes.hidden_size, _granules(shapes, self.inner, found)
        assert granules is not None
        self.gate_up = self._weight(context, "gate_up", 2 * self.shard, hidden, granules[0])
        self.down = self._weight(context, "down", hidden, self.shard, granules[1])

    @classmethod
    def make(cls, context: BuildContext, shapes: ExpertShapes, part: ExpertPart) -> QuantisedExperts | None:
        """None if the experts are not quantised, or no product is there for their format and the rank's part."""
        for name in shapes.names:
            prefix = f"{context.prefix}{name}."
            modules = ["gate_up_proj", "down_proj"] if shapes.turns else [f"0.{each}" for each in shapes.projections]
            formats = [context.format_of(prefix + module) for module in modules]
            found = formats[0]
            if found is None or any(each != found for each in formats):
                continue
            return None if _granules(shapes, part.inner, found) is None else cls(context, shapes, part, prefix, found)
        return None

    def load(self, source: WeightSource) -> None:
        """Fill the parameters, expert by expert."""
        hidden, experts = self.shapes.hidden_size, self.part.experts
        whole = Span(0, hidden, hidden)
        for own, number in enumerate(range(experts.start, experts.stop)):
            if self.shapes.turns:
                one = Span(number, number + 1, experts.size)
                both = Span(*(2 * border for border in self.inner))
                codes, scales = source.expert_codes(f"{self.prefix}gate_up_proj", one, both, whole)
                for half in range(2):
                    rows = codes[0, half::2], scales[0, half::2]
                    self._write_codes(source, self.gate_up, own, half * self.shard, *rows)
                codes, scales = source.expert_codes(f"{self.prefix}down_proj", one, whole, self.inner)
                self._write_codes(source, self.down, own, 0, codes[0], scales[0])
                continue
            *gate_and_up, down = (f"{self.prefix}{number}.{name}" for name in self.shapes.projections)
            for half, module in enumerate(gate_and_up):
                self._write(source, self.gate_up, own, half * self.shard, source.numbers(module, self.inner, whole))
            self._write(source, self.down, own, 0, source.numbers(down, whole, self.inner))
        if not self.shapes.turns:
            self.part.leave_others(source, self.prefix)

    def _weight(self, context: BuildContext, name: str, rows: int, columns: int, granule: Granule) -> ops.ExpertWeight:
        kind, count = KINDS[self.found.storage], self.part.num_here
        num_bytes = columns if kind == "fp8" else half_of(columns, granule.group)
        groups = 1 if granule.group is None else -(-columns // granule.group)
        scales = (count, -(-rows // granule.rows), groups)
        own = {
            "codes": context.parameter(count, rows, num_bytes, dtype=torch.uint8),
            "scale": context.parameter(*scales, dtype=torch.uint8 if kind == "mxfp4" else torch.float32),
        }
        if kind == "int4" and not self.found.symmetric:
            own["zero"] = context.parameter(*scales, dtype=torch.uint8)
        self.parameters |= {f"{name}_{part}": parameter for part, parameter in own.items()}
        return ops.ExpertWeight(kind, own["codes"], own["scale"], own.get("zero"), columns, granule.group, granule.rows)

    def _write(self, source: WeightSource, weight: ops.ExpertWeight, expert: int, at: int, numbers: Numbers) -> None:
        rows = slice(at, at + numbers.values.shape[0])
        if weight.kind == "fp8":
            source.write(weight.codes[expert, rows], numbers.values.view(torch.uint8))
            scales = numbers.scales.float()[:: weight.rows][:, numbers.groups[:: weight.group or len(numbers.groups)]]
            first = at // weight.rows
            source.write(weight.scales[expert, first : first + len(scales)], scales)
            return
        codes, scales, zeros = pack_int4(numbers, weight.group)
        source.write(weight.codes[expert, rows], codes)
        source.write(weight.scales[expert, rows], scales)
        if weight.zeros is not None:
            source.write(weight.zeros[expert, rows], zeros)

    def _write_codes(
        self,
        source: WeightSource,
        weight: ops.ExpertWeight,
        expert: int,
        at: int,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        rows, half = slice(at, at + codes.shape[0]), weight.codes.shape[2]
        codes = nn.functional.pad(codes, (0, 2 * half - codes.shape[1]))
        source.write(weight.codes[expert, rows], codes[:, :half] | codes[:, half:] << 4)
        source.write(weight.scales[expert, rows], scales)


def _granules(shapes: ExpertShapes, inner: Span, found: WeightFormat) -> tuple[Granule, Granule] | None:
    """What shares a scale in the rank's part of gate and up, and of down; None if no product has scales for it."""
    (rows, group), shard, hidden = found.block, inner.stop - inner.start, shapes.hidden_size
    if found.storage not in KINDS or shapes.turns != (found.storage == "mxfp4"):
        return None
    if found.storage == "fp8":
        whole = Span(0, hidden, hidden)
        gate_up = granule_of(found, [Piece("", inner, whole, half * shard) for half in range(2)])
        down = granule_of(found, [Piece("", whole, inner, 0)])
        return None if gate_up is None or down is None else (gate_up, down)
    if found.storage == "mxfp4":
        return None if _cuts(MXFP4_GROUP, (hidden, shard)) else (Granule(1, MXFP4_GROUP), Granule(1, MXFP4_GROUP))
    if found.bits != 4 or found.ordered or rows != 1:
        return None
    if group is not None and (group not in GROUPS or (shard < shapes.inner_size and _cuts(group, (shard,)))):
        return None
    return Granule(1, group), Granule(1, group)


def _cuts(group: int, sizes: Iterable[int]) -> bool:
    """Whether one of the sizes ends within a group."""
    return any(size % group for size in sizes)

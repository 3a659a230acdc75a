"""Projections of one step's tokens, by the kernel that suits their number.

Few tokens leave the time to the weights, which must be read once whatever the number: `linear_rows` reads them fastest
for a vector or a few, `linear_hopper` (on Hopper GPUs, by `linear_hopper_plan`) or `linear_tiles` for some dozens. More
tokens go to the vendor's matrix product, followed by the unfused kernels, or, gated and by `linear_gated_plan`, to
`linear_gated_hopper`. The choice depends on shapes, layout, dtype and device alone, so a captured graph and an eager
call agree.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_gated, check_linear, check_norm_linear
from .linear_gated_plan import plan_gated
from .linear_hopper_plan import hopper_takes, plan_hopper
from .linear_rows import linear_rows
from .linear_tiles import Tiles, linear_tiles
from .reference import linear_into
from .rms_norm import fused_add_rms_norm, rms_norm
from .silu_and_mul import silu_and_mul

LONG = 4096  # inputs from which the tensor cores win for two tokens, and many small programs for one
MAX_NORM_INPUTS = 2048  # for two tokens: every program repeats the norm, and its reads must stay few beside the weights
MAX_TILES_TOKENS = 64
MIN_SHARED_MEMORY = 200 << 10  # bytes a program may take, for the deepest pipelines of `choose_tiles`


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _has_room_for_tiles(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    # torch's stubs lack the name.
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return int(room) >= MIN_SHARED_MEMORY


@cache
def _hopper_kernels(device: torch.device, name: str) -> ModuleType | None:
    """The named module of kernels for this device's generation, or None; imported only where they can run."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    return import_module(f".{name}", __package__)


def prepare(device: torch.device) -> None:
    """See `ops.prepare`."""
    device = torch.empty(0, device=device).device  # with its index, as tensors name it
    hopper = _hopper_kernels(device, "linear_hopper")
    if hopper is not None:
        hopper.flags(device)


def choose_rows(tokens: int, inputs: int, gated: bool, norm: bool) -> tuple[int, int]:
    """Outputs and warps of a program of `linear_rows`, from sweeps on H200; not measured as a set.

    Where a few tiles span K, they should be large, because the first ones are read before the previous kernel ends. The
    more is computed besides the products (tokens, two halves, the norm), the fewer rows a thread's registers hold.
    """
    if gated and tokens > 1:
        return 4, 4
    if norm or inputs < 2048:
        return 8, 4
    return (2, 4) if inputs >= LONG and tokens == 1 else (4, 8)


def choose_tiles(tokens: int, outputs: int, gated: bool, multiprocessors: int) -> Tiles:
    """Tiles of `linear_tiles`, from sweeps on H200: as wide as leaves no multiprocessor idle, deep where narrow."""
    if tokens <= 32 and outputs <= 16 * multiprocessors:
        return Tiles(8, 512, 4, 4, 4 if tokens <= 16 else 3, False)
    if tokens <= 16 and not gated:
        return Tiles(32, 256, 1, 4, 4, False)
    if 16 < tokens <= 32:
        return Tiles(64, 128, 1, 4, 4 if gated else 6, True)
    return Tiles(64, 128, 1, 4, 4, True) if outputs > 40 * multiprocessors else Tiles(32, 128, 1, 4, 5, False)


def _rows_fit(x: Tensor) -> bool:
    return 0 < x.shape[0] <= (2 if x.shape[1] < LONG else 1) and x.shape[1] > 0


def _norm_fits(x: Tensor, weight: Tensor) -> bool:
    return _rows_fit(x) and (x.shape[0] == 1 or x.shape[1] <= MAX_NORM_INPUTS) and weight.shape[0] > 0


def _few(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, out: Tensor | None = None) -> Tensor | None:
    """The projection by one of this package's kernels, None where those are not the fastest."""
    tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if outputs == 0:
        return None
    if _rows_fit(x):
        rows, warps = choose_rows(tokens, inputs, gated, norm=False)
        return linear_rows(x, weight, rows=rows, num_warps=warps, bias=bias, gated=gated, out=out)[0]
    hopper = _hopper_kernels(x.device, "linear_hopper")
    if hopper is not None and hopper_takes(x, weight, gated):
        plan = plan_hopper(tokens, weight.shape[0], inputs, gated, _multiprocessors(x.device))
        if plan is not None:
            y: Tensor = hopper.linear_hopper(x, weight, *plan, bias=bias, gated=gated, out=out)
            return y
    fits = 0 < tokens <= MAX_TILES_TOKENS and inputs > 0 and x.dtype != torch.float32
    if fits and _has_room_for_tiles(x.device):
        tiles = choose_tiles(tokens, outputs, gated, _multiprocessors(x.device))
        return linear_tiles(x, weight, tiles, bias=bias, gated=gated, out=out)
    return None


def _many_gated(x: Tensor, weight: Tensor) -> Tensor | None:
    """silu(gate) * up of x W^T in one kernel, None where two are faster."""
    hopper = _hopper_kernels(x.device, "linear_gated_hopper")
    if hopper is None or not hopper_takes(x, weight, gated=True):
        return None
    multiprocessors = _multiprocessors(x.device)
    consumers = plan_gated(x.shape[0], weight.shape[0], x.shape[1], multiprocessors)
    if consumers is None:
        return None
    y: Tensor = hopper.linear_gated_hopper(x, weight, consumers, multiprocessors)
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x W^T + bias; see `ops.linear` for the contract."""
    check_linear(x, weight, bias, out)
    y = _few(x, weight, bias, False, out)
    return linear_into(x, weight, bias, out) if y is None else y


def linear_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of x W^T; see `ops.linear_silu_mul` for the contract."""
    check_linear(x, weight, None)
    check_gated(weight)
    y = _few(x, weight, None, True)
    y = _many_gated(x, weight) if y is None else y
    return silu_and_mul(F.linear(x, weight)) if y is None else y


def _norm_rows(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    rows, warps = choose_rows(x.shape[0], x.shape[1], gated, norm=True)
    return linear_rows(
        x,
        weight,
        rows=rows,
        num_warps=warps,
        bias=bias,
        residual=residual,
        norm_weight=norm_weight,
        eps=eps,
        gated=gated,
    )


def _norm(x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if residual is None:
        return rms_norm(x, norm_weight, eps), x
    return fused_add_rms_norm(x, residual, norm_weight, eps)


def add_rms_norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) W^T + bias, x + residual); see `ops.add_rms_norm_linear` for the contract."""
    check_linear(x, weight, bias)
    check_norm_linear(x, residual, norm_weight)
    if _norm_fits(x, weight):
        return _norm_rows(x, residual, norm_weight, eps, weight, bias, False)
    y, total = _norm(x, residual, norm_weight, eps)
    return linear(y, weight, bias), total


def add_rms_norm_linear_silu_mul(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_linear` and silu(gate) * up; see `ops.add_rms_norm_linear_silu_mul` for the contract."""
    check_linear(x, weight, None)
    check_gated(weight)
    check_norm_linear(x, residual, norm_weight)
    if _norm_fits(x, weight):
        return _norm_rows(x, residual, norm_weight, eps, weight, None, True)
    y, total = _norm(x, residual, norm_weight, eps)
    return linear_silu_mul(y, weight), total

"""Checks of arguments that several ops share.

Each raises ValueError whose message begins with the name of the offending argument. None of them reads tensor
contents, so none synchronises with a device. They run before every launch: messages are built only on failure.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fail(argument: str, rule: str, got: object) -> NoReturn:
    """Raise ValueError "<argument> <rule>, got <got>"; shapes and strides print as tuples."""
    raise ValueError(f"{argument} {rule}, got {tuple(got) if isinstance(got, tuple) else got}")


def check_like(tensor: Tensor, argument: str, other: Tensor, other_argument: str) -> None:
    """`tensor` must share dtype and device with `other`."""
    if tensor.dtype != other.dtype:
        fail(argument, f"must have the dtype of {other_argument}, {other.dtype}", tensor.dtype)
    if tensor.device != other.device:
        fail(argument, f"must be on the device of {other_argument}, {other.device}", tensor.device)


def check_float(tensor: Tensor, argument: str) -> None:
    """`tensor` must be fp32, fp16 or bf16."""
    if tensor.dtype not in FLOAT_DTYPES:
        fail(argument, "must be float32, float16 or bfloat16", tensor.dtype)


def check_last_dim(tensor: Tensor, argument: str) -> None:
    """The last dimension of `tensor` must be contiguous; the others may have any stride."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        fail(argument, "must have stride 1 in its last dimension", tensor.stride())


def check_vectors(length: int, dtype: torch.dtype, device: torch.device, **vectors: Tensor) -> None:
    """Each of `vectors` must be a contiguous [length] tensor of this dtype and device."""
    for argument, tensor in vectors.items():
        if tensor.dim() != 1 or tensor.shape[0] != length:
            fail(argument, f"must have shape ({length},)", tensor.shape)
        if tensor.dtype != dtype:
            fail(argument, f"must be {dtype}", tensor.dtype)
        if tensor.device != device:
            fail(argument, f"must be on {device}", tensor.device)
        if not tensor.is_contiguous():
            fail(argument, "must be contiguous", tensor.stride())


def check_table(table: Tensor, argument: str, device: torch.device) -> None:
    """`table` must be [rows, entries] int32 on this device, its last dimension contiguous."""
    if table.dim() != 2 or table.dtype != torch.int32:
        fail(argument, "must be a 2-dimensional int32 tensor", (table.dtype, *table.shape))
    if table.device != device:
        fail(argument, f"must be on {device}", table.device)
    check_last_dim(table, argument)


def check_tables(tables: Tensor, argument: str, device: torch.device) -> None:
    """`tables` must be [groups, rows, entries] int32 on this device, its last dimension contiguous."""
    if tables.dim() != 3 or tables.dtype != torch.int32:
        fail(argument, "must be a 3-dimensional int32 tensor", (tables.dtype, *tables.shape))
    if tables.device != device:
        fail(argument, f"must be on {device}", tables.device)
    check_last_dim(tables, argument)


def check_slots(slots: Tensor, groups: int, length: int, device: torch.device) -> None:
    """`slots` must be [groups, length] int64 on this device, its last dimension contiguous."""
    if slots.shape != (groups, length) or slots.dtype != torch.int64:
        fail("slots", f"must be an int64 tensor of shape ({groups}, {length})", (slots.dtype, *slots.shape))
    if slots.device != device:
        fail("slots", f"must be on {device}", slots.device)
    check_last_dim(slots, "slots")


def check_rows(x: Tensor, argument: str) -> None:
    """`x` must be a floating tensor of 1 to 3 dimensions (more if contiguous), its last dimension contiguous."""
    check_float(x, argument)
    if x.dim() == 0:
        fail(argument, "must have at least one dimension", x.shape)
    if x.dim() > 3 and not x.is_contiguous():
        fail(argument, "of more than 3 dimensions must be contiguous", x.stride())
    check_last_dim(x, argument)


def check_norm_weight(weight: Tensor, argument: str, size: int, x: Tensor) -> None:
    """`weight` must be a contiguous [size] tensor on the device of `x`, in its dtype or in fp32."""
    dtype = torch.float32 if weight.dtype == torch.float32 else x.dtype
    check_vectors(size, dtype, x.device, **{argument: weight})


def check_residual(residual: Tensor, x: Tensor) -> None:
    """`residual` must be rows as `check_rows` wants them, of the shape, dtype and device of `x`."""
    if residual.shape != x.shape:
        fail("residual", f"must have the shape of x, {tuple(x.shape)}", residual.shape)
    check_like(residual, "residual", x, "x")
    check_rows(residual, "residual")


def check_out(out: Tensor | None, shape: torch.Size, like: Tensor, argument: str) -> None:
    """`out`, if given, must have this shape, the dtype and device of `like`, and a contiguous last dimension."""
    if out is None:
        return
    if out.shape != shape:
        fail("out", f"must have shape {tuple(shape)}", out.shape)
    check_like(out, "out", like, argument)
    check_last_dim(out, "out")

"""Numbers of weights in e4m3, as Triton kernels have them on every GPU: those before 8.9 cannot convert it."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

SIGN_AND_NUMBER = tl.constexpr(0x87F00000 - (1 << 32))  # of a code whose sign was spread over the bits above it


@triton.jit
def decode_e4m3(codes, DTYPE: tl.constexpr):
    """Integer codes of e4m3 as exactly these numbers; codes of NaN are 480, which no weight has.

    The bits are those of a fp32 number that is 2^120 times too small, subnormal ones too.
    """
    bits = (codes.to(tl.int8).to(tl.int32) << 20) & SIGN_AND_NUMBER
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)


@triton.jit
def widen(values):
    """Floats as fp32; uint8 are codes of e4m3."""
    if values.dtype == tl.uint8:
        return decode_e4m3(values, tl.float32)
    else:
        return values.to(tl.float32)

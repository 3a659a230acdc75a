"""Triton helpers of kernels that write the KV cache or read it, whatever its format (`kv_cache.py`)."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def encode_fp8(x, scale, E5M2: tl.constexpr):
    """The nearest fp8 number to x / scale, saturated, as its 8 bits in a uint8; NaN is NaN.

    On the bits of fp32, a few integer operations an element: e4m3 has no conversion instruction before compute
    capability 8.9, and Triton's interpreter drops carries when it converts. Kernels that write the cache are bound by
    memory; those that round all of a prompt's activations take the instruction (`quantised/fp8_rows_kernel.py`).
    """
    MANTISSA: tl.constexpr = 2 if E5M2 else 3
    BIAS: tl.constexpr = 15 if E5M2 else 7
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    DROPPED: tl.constexpr = 23 - MANTISSA
    # The power of two above whose binade fp32 has the steps of fp8's subnormal numbers, and its exponent field.
    STEP_EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
    wide = x.to(tl.float32) / scale
    size = tl.minimum(tl.abs(wide), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # Half a step less one bit, and one more where the last kept bit is set: ties go to even, carries to the exponent.
    rounded = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = (rounded - ((127 - BIAS) << 23)) >> DROPPED
    subnormal = (size + 2.0**STEP_EXPONENT).to(tl.int32, bitcast=True) - ((127 + STEP_EXPONENT) << 23)
    code = tl.where(size < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(wide == wide, code, 0x7F)
    sign = (wide.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def store_rows(pointers, rows, scale, mask):
    """Store rows [heads, dims] at `pointers` in a cache's own format; scale [heads, 1] counts only if that is fp8."""
    FORMAT: tl.constexpr = pointers.dtype.element_ty
    if FORMAT.primitive_bitwidth == 8:
        rows = encode_fp8(rows, scale, FORMAT.fp_mantissa_width == 2).to(FORMAT, bitcast=True)
    tl.store(pointers, rows, mask=mask)


@triton.jit
def widen_queries(q, FP8: tl.constexpr):
    """Queries in the dtype in which products with the cache are computed.

    For an fp8 cache that is fp16, in which all fp8 numbers are exact, and to which one instruction converts two of
    them; bf16 would take five. Queries of bf16 beyond fp16's range saturate, those of fp32 stay.
    """
    if FP8 and q.dtype == tl.bfloat16:
        return tl.clamp(q.to(tl.float32), -FP16_MAX, FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    else:
        return q


@triton.jit
def split_pairs(pairs, E5M2: tl.constexpr):
    """The first and the second of two neighbouring fp8 numbers in each int16, as fp16.

    A product needs its second factor with the summed dimension along registers. For values that is the keys, so they
    have to be transposed on the way from shared memory, and before compute capability 10 hardware does that for
    elements of 16 bits only: single bytes would be loaded one by one.
    """
    if E5M2:  # the upper half of a fp16 number
        first = (pairs << 8).to(tl.float16, bitcast=True)
        second = (pairs & -256).to(tl.float16, bitcast=True)
    else:
        first = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second

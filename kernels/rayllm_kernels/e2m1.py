"""Numbers of weights in e2m1, those of MXFP4, as Triton kernels have them."""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e2m1(numbers, DTYPE: tl.constexpr):
    """int32 codes of e2m1, a sign, two bits of exponent and one of mantissa, as exactly these numbers.

    The bits are those of a fp32 number that is 2^126 times too small, subnormal ones too.
    """
    bits = ((numbers & 7) << 22) | ((numbers & 8) << 28)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)


@triton.jit
def decode_exponents(exponents):
    """Exponents of 2 with 127 added, as a group's scale has them, as fp32."""
    # The least one is that of a subnormal number.
    bits = exponents.to(tl.int32)
    return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)

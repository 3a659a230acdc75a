"""How far a kernel's result may be from what it must be: every element, and every row, has a bound of its own.

One norm over a whole tensor hides a few wrong elements among many right ones. The bounds follow from how numbers are
rounded (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapters 3 and 4). With u the unit roundoff of
the result's dtype, and s the root mean square of the element's row (its last dimension), an element e may be off by

    ROUNDINGS * u * |e|        both sides round the result, and some also what it is made of
    + SPREAD * u * s           where it is a sum of terms that were rounded, such as weights of attention
    + GROWTH * 2^-24 * sqrt(terms) * s    where fp32 adds up so many terms, whose errors do not all have one sign
    + 4 * 2^-24 * exponent * s    where terms are weighted by exponentials: what is off in an exponent is a factor

and the errors of a row have a root mean square of at most ROW of that, with s in place of |e|.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

ROUNDINGS = 6.0  # two that fall to the other side are two units in the last place, each up to 2 u
SPREAD = 4.0
GROWTH = 16.0
ROW = 0.5
FP32 = 2.0**-24
# Approximations of exp2, rsqrt and the like are good to a few units in the last place of fp32, also in fp32 results.
UNIT = {torch.float32: 4 * FP32, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def unit_of(dtype: torch.dtype) -> float:
    """Unit roundoff; twice as much for bf16 in Triton's interpreter, which truncates where a GPU rounds to nearest."""
    return UNIT[dtype] * (2 if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1" else 1)


def check_close(actual: Tensor, expected: Tensor, *, terms: int = 0, exponent: float = 0.0, slack: float = 1.0) -> None:
    """Assert that `actual` is `expected` up to rounding; their shapes and dtypes must be equal.

    expected: by another way to compute it, rounded to the dtype at the end. terms: how many products each element
    is the sum of, the longest sum counting; 0 if every element is a function of a few numbers. exponent: the largest
    there is, if it is large. slack: a factor of the unit roundoff, for what many operations in sequence yield. NaN is
    never close.
    """
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if not expected.numel():
        return
    unit = slack * unit_of(actual.dtype)
    wide = expected.double()
    error = (actual.double() - wide).abs()
    spread = wide.square().mean(-1, keepdim=True).sqrt() if wide.dim() else wide.abs()
    absolute = SPREAD * unit + FP32 * (GROWTH * terms**0.5 + 4 * exponent) if terms else 0.0
    floor = 2 * ROUNDINGS * unit * torch.finfo(actual.dtype).smallest_normal  # where numbers are no longer normal
    bound = ROUNDINGS * unit * wide.abs() + absolute * spread + floor
    wrong = ~(error <= bound)
    if wrong.any():
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the first is {place}: {float(actual[place])} "
            f"instead of {float(expected[place])}, which may be off by {float(bound[place]):.3g}"
        )
    rows = error.square().mean(-1, keepdim=True).sqrt() if wide.dim() else error
    allowed = ROW * (ROUNDINGS * unit + absolute) * spread + floor
    assert (rows <= allowed).all(), "a row is off as a whole"

"""Arrays of float32 values as bytes, little-endian whatever the machine, and back."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence


def float32_bytes(values: Sequence[float]) -> bytes:
    """Four bytes a value, rounded to float32."""
    return _little_endian(array("f", values)).tobytes()


def float32_values(data: bytes) -> array[float]:
    """The reverse of `float32_bytes`: a sequence of floats that takes four bytes a value."""
    return _little_endian(array("f", data))


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values

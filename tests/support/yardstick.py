"""How far a model's logits in float32 may be from those of transformers: about as far as roundings take its own.

transformers computes the model in float32 and in float64. The difference is what roundings come to in this model, whose
sharp attention, recurrent states and logits in the hundreds make more of them than others do. Another order of the same
sums is off by about as much, on any CPU. So no tolerance is guessed, and none has to grow with a model.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# By which the largest error of all logits may exceed that of transformers.
FACTOR = 8.0
# Of the largest logit: what is off in any case, because transformers computes parts in float32 whatever the dtype.
FLOOR = 32 * 2.0**-24
# Of the logits' spread: where transformers' own error is more, there is nothing to compare with.
STEADY = 1e-3


class Yardstick:
    """transformers' model of a folder in float32, and `exact`, in float64."""

    def __init__(self, folder: str | Path):
        self.model = transformers_model(folder)
        self.exact = in_float64(deepcopy(self.model))

    @torch.inference_mode()
    def check(self, logits: Tensor, tokens: list[int]) -> Tensor:
        """Assert that `logits` [tokens, vocab] are those of `tokens`, but for roundings. Returns transformers' own."""
        expected, exact = (model(torch.tensor([tokens])).logits[0] for model in (self.model, self.exact))
        share = share_of_roundings(logits, expected, exact)
        print(f"{share:.2f} of what roundings may come to")
        assert share <= 1, f"off by {float((logits - expected).abs().max()):.2g}"
        return expected


def share_of_roundings(logits: Tensor, expected: Tensor, exact: Tensor) -> float:
    """How far `logits` are off, over how far they may be, for transformers' logits in float32 and in float64."""
    assert logits.shape == expected.shape == exact.shape
    assert logits.dtype == expected.dtype == torch.float32
    own, error = (float((each.double() - exact.double()).abs().max()) for each in (expected, logits))
    assert own < STEADY * float(exact.std()), f"transformers itself is off by {own:.2g}"
    return error / (FACTOR * own + FLOOR * float(exact.abs().max()))


def in_float64(model: Any) -> Any:
    """A model of transformers, turned into one that computes in float64."""
    model.double().set_experts_implementation("eager")  # others have no float64
    return model


def transformers_model(folder: str | Path) -> Any:
    """Of the class that config.json names, in float32."""
    import transformers

    name = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(str(folder), dtype=torch.float32).eval()

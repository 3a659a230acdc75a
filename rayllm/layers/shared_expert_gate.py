"""`SharedExpertGate`: how much of the shared expert's output a token gets."""

from __future__ import annotations

import torch

from rayllm.layers.layer import BuildContext, Layer
from rayllm_kernels import ops


class SharedExpertGate(Layer):
    """sigmoid(W x) * shared, where W has one row, as Qwen2-MoE has it. Every rank has it whole."""

    def __init__(self, context: BuildContext, hidden_size: int):
        super().__init__(context)
        self.weight = context.parameter(1, hidden_size)
        self.deterministic = context.deterministic

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden_size], the block's input. shared: the rank's summand of the shared expert's output, as large,
        and so is the result."""
        return ops.token_gate(x, self.weight[0], shared, deterministic=self.deterministic)

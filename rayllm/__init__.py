"""rayllm: distributed LLM serving on Ray. `LLM` is imported on first use, so that servers start without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayllm.api.sampling_params import SamplingParams, StructuredOutputs
from rayllm.version import __version__

if TYPE_CHECKING:
    from rayllm.llm import LLM

__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from rayllm.llm import LLM

        return LLM
    raise AttributeError(f"module 'rayllm' has no attribute {name!r}")

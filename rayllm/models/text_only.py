"""Names of weights in checkpoints that hold a text model beside towers for images, video or sound.

Today's checkpoints say `model.language_model.layers...` and `lm_head`, older ones `language_model.model.layers...` and
`language_model.lm_head`, or, as Qwen2.5-VL did, `model.layers...` as a text model alone does.
"""

from __future__ import annotations

from collections.abc import Iterable

# What is not the text model's, below `model.` or not.
TOWERS = (
    *("vision_tower.", "vision_model.", "vision_embedder.", "visual.", "audio_tower.", "multi_modal_projector."),
    *("embed_vision.", "embed_audio."),
)


def text_name(stored: str) -> str | None:
    """What a weight or a module is called in a checkpoint of the text model alone; None if it is of a tower."""
    if stored.removeprefix("model.").startswith(TOWERS):
        return None
    if stored.startswith("model.language_model."):
        return "model." + stored.removeprefix("model.language_model.")
    return stored.removeprefix("language_model.")


def split_text(stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """(name of each weight in a checkpoint of the text model alone -> its name here, names of the others)."""
    text, others = {}, []
    for name in stored:
        own = text_name(name)
        if own is None:
            others.append(name)
        else:
            text[own] = name
    return text, others

"""The table of what is served, from `ARCHITECTURES`."""

from __future__ import annotations

from rayllm.config.architectures import ARCHITECTURES


def markdown_table() -> str:
    """Rows in the order of `ARCHITECTURES`: names that people know, that in config.json, and what is left out."""
    rows = ["| models | `architectures` in config.json | remarks |", "|---|---|---|"]
    for name, architecture in ARCHITECTURES.items():
        remarks = "text only; images are refused" if architecture.text_types else ""
        rows.append(f"| {architecture.models} | `{name}` | {remarks} |")
    return "\n".join(rows) + "\n"

"""The commands of docs/cluster.md, as a test runs them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "cluster.md"
FIRST = "# A cluster, from empty machines to a served model"


def scripts(section: str) -> list[str]:
    """The code blocks of a section of the guide, each a script for bash. section: its heading, with the #."""
    text = "\n" + GUIDE.read_text()
    body = re.split(r"\n##? ", text.split(f"\n{section}\n")[1])[0]
    blocks = re.findall(r"(?:^    .*\n)(?:^(?:    .*)?\n)*", body, re.MULTILINE)
    # An empty line ends a script; a line that is indented further goes on with it.
    return [textwrap.dedent(each).strip() for block in blocks for each in re.split(r"\n\n(?=    \S)", block)]


def substituted(script: str, substitutions: dict[str, str]) -> str:
    """A script with texts replaced. Those that a script does not have do nothing there."""
    for text, other in substitutions.items():
        script = script.replace(text, other)
    return script

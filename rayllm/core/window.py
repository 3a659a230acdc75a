"""`KVWindow`: where a sequence's block table may begin, if no layer looks farther back than a window.

Position p attends to positions p - window < j <= p in every layer, so once all tokens before p are computed, blocks
that end at or before p - window are never read again, whatever comes. If a single layer sees everything, nothing is.
"""

from __future__ import annotations

import sys
from typing import NamedTuple


class KVWindow(NamedTuple):
    """tokens: what a token sees at most, itself included, in the layer that sees most; None for everything."""

    tokens: int | None
    block_size: int

    def first_block(self, position: int) -> int:
        """The first block that tokens from `position` on can see: blocks before it need not be kept."""
        if self.tokens is None:
            return 0
        return max(0, position - self.tokens + 1) // self.block_size

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks without which a sequence cannot grow to num_tokens tokens, one token after the other."""
        whole = -(-num_tokens // self.block_size)
        if self.tokens is None:
            return whole
        return min(whole, (self.tokens + self.block_size - 2) // self.block_size + 1)

    def longest(self, num_blocks: int) -> int:
        """Tokens that a sequence can grow to in a pool of num_blocks blocks."""
        if self.most_blocks(sys.maxsize) <= num_blocks:
            return sys.maxsize
        return num_blocks * self.block_size

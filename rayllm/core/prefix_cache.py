"""`PrefixCache`: finds blocks that already hold the KV of a prompt's beginning.

A full block is identified by a chained hash: sha256 over the parent block's hash and its token ids. The chain starts at
a root made of a per-process secret, the tenant's salt and the adapter, so that equal prompts of different tenants or
adapters never meet and nobody can aim at a collision. Where a model's layers are in several groups, a block holds the
part of one of them, and the group belongs to its identity (`group_key`). The cache only maps hashes to blocks; who may
reuse a block is the block manager's business.
"""

from __future__ import annotations

import hashlib
import os
from array import array


def group_key(digest: bytes, group: int) -> bytes:
    """What identifies a group's part of the content that a hash of the chain stands for."""
    return digest + group.to_bytes(2, "little") if group else digest


def group_keys(digests: list[bytes], group: int) -> list[bytes]:
    """The same for several hashes."""
    return [group_key(digest, group) for digest in digests] if group else digests


class PrefixCache:
    """Hash <-> block maps. All operations are O(1) a block."""

    def __init__(self, block_size: int, secret: bytes | None = None):
        self.block_size = block_size
        self._secret = os.urandom(32) if secret is None else secret
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    def root(self, salt: str, adapter: int | None = None) -> bytes:
        """The hash that all chains of this salt and adapter start from: with another adapter, KV is another."""
        start = b"" if adapter is None else b"adapter" + adapter.to_bytes(8, "little")
        return hashlib.sha256(start + self._secret + salt.encode()).digest()

    def extend(self, hashes: list[bytes], root: bytes, token_ids: list[int], num_blocks: int) -> None:
        """Append to `hashes`, the chain of token_ids' leading blocks, until it covers num_blocks full blocks."""
        size = self.block_size
        parent = hashes[-1] if hashes else root
        for i in range(len(hashes), num_blocks):
            parent = hashlib.sha256(parent + array("q", token_ids[i * size : (i + 1) * size]).tobytes()).digest()
            hashes.append(parent)

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content, if any."""
        return self._block_of.get(digest)

    def digest_of(self, block: int) -> bytes | None:
        """What `block` is cached under, if it is."""
        return self._hash_of.get(block)

    def match(self, hashes: list[bytes]) -> list[int]:
        """Blocks that hold the longest cached beginning of the chain."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, digest: bytes, block: int) -> None:
        """Make `block` findable under `digest`. The first block with a content stays; equal ones are not registered."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def evict(self, block: int) -> bytes | None:
        """Forget `block`, whose content is about to be overwritten; returns its hash, None if it is not cached."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        return digest

    def clear(self) -> None:
        """Forget all blocks; roots stay."""
        self._block_of.clear()
        self._hash_of.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two maps are each other's inverse."""
        assert len(self._block_of) == len(self._hash_of), "prefix cache maps differ in size"
        for digest, block in self._block_of.items():
            assert self._hash_of.get(block) == digest, f"block {block} is cached under another hash"

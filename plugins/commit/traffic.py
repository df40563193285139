"""Bytes that publishing a commit must move at least: what roofline and tests hold the kernel to."""

from __future__ import annotations

from dataclasses import dataclass

from plugins.layout import ELEMENT_BYTES, SCALE_BYTES, BlockLayout


@dataclass(frozen=True)
class CommitTraffic:
    """What one commit handles, added up over all rows (layer, KV head). "Coded": entries of dissolved blocks.

    compared_*: entries below the line whose key is held against the kept ones; none where the gate is off. absorbed_*:
    of them, those that a kept entry takes in. merged_old: entries of blocks that stay and take others in.
    searched_blocks: blocks that stay with an entry above the line, where something is compared; searched_keys: their
    filled entries.
    """

    kept_tokens: int
    kept_coded: int = 0
    compared_tokens: int = 0
    compared_coded: int = 0
    absorbed_tokens: int = 0
    absorbed_coded: int = 0
    merged_old: int = 0
    dissolved_blocks: int = 0
    searched_keys: int = 0
    searched_blocks: int = 0
    new_blocks: int = 0

    def read_bytes(self, block: BlockLayout) -> int:
        """K and V, codes and key scales, each once. Scores, tables and the two bytes of a bias are not counted."""
        token = block.head_dim * ELEMENT_BYTES
        tokens = 2 * self.kept_tokens + self.compared_tokens + self.absorbed_tokens
        coded_keys = self.kept_coded + self.compared_coded + self.searched_keys
        coded_values = self.kept_coded + self.absorbed_coded + self.merged_old
        scales = 2 * SCALE_BYTES * block.head_dim * (self.dissolved_blocks + self.searched_blocks)
        return (
            tokens * token
            + coded_keys * block.k_row_bytes
            + coded_values * block.v_row_bytes
            + (scales if block.quantized else 0)
        )

    def candidate_key_bytes(self, block: BlockLayout) -> int:
        """Keys that every further slab of keys below the line is held against again."""
        scales = 2 * SCALE_BYTES * block.head_dim * self.searched_blocks if block.quantized else 0
        coded = self.kept_coded + self.searched_keys
        return self.kept_tokens * block.head_dim * ELEMENT_BYTES + coded * block.k_row_bytes + scales

    def written_bytes(self, block: BlockLayout) -> int:
        """New blocks with their scores. Rewritten entries, a few bytes each, are not counted."""
        return self.new_blocks * block.stored_bytes

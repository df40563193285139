"""Geometry of active pages and committed blocks: the only home of it.

Page arena, one per layer:   [num_pages, kv_heads, 2 (K, V), page_tokens, head_dim] kv_dtype
Seen arena, one per layer:   [num_pages, kv_heads, page_tokens] fp16
Block arena, one per format: [num_blocks, block_bytes] uint8; a block belongs to ONE (layer, KV head)
Score arena, one per format: [num_blocks, block_entries] fp16. Scores lie beside the blocks, not in them,
because attention updates scores and never writes a block.

Inside a block (each run 16-byte aligned, E = block_entries, D = head_dim):
    k_codes  [E, D] codes      v_codes  [E, D] codes       K and V may have different widths (k8v4)
    k_scale  [D] fp16          k_min    [D] fp16       per channel over the block   (quantized formats)
    v_scale  [E] fp16          v_min    [E] fp16       per entry                    (quantized formats)
    bias     [E] fp16          log-mass, added to the entry's logit
Codes: 8 bits -> one unsigned byte, 4 bits -> byte i of a row holds channel i in its low nibble and channel
i + D/2 in its high nibble, bf16/fp16/fp32 -> the values themselves. x = min + scale * code.

Formats by bits of K and V: int4 4/4, int8 8/8, k8v4 8/4. An error of a key moves the weights of all values, and a
channel's range over a block is wide, so keys need more bits: on SmolLM2-135M (2,100 tokens) 4-bit values alone raise
the Kullback-Leibler divergence of next-token distributions to the full cache by 0.001, 4-bit keys alone by 0.057.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BlockFormat = Literal["int4", "k8v4", "int8", "bf16", "fp16", "fp32"]

# Bits of a channel in K and in V.
CODE_BITS: dict[BlockFormat, tuple[int, int]] = {
    "int4": (4, 4),
    "k8v4": (8, 4),
    "int8": (8, 8),
    "bf16": (16, 16),
    "fp16": (16, 16),
    "fp32": (32, 32),
}
QUANTIZED: tuple[BlockFormat, ...] = ("int4", "k8v4", "int8")
ALIGNMENT_BYTES = 16
SCALE_BYTES = 2
SCORE_BYTES = 2


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class PageLayout:
    """One page of one layer holds `page_tokens` tokens of every KV head."""

    num_layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    element_bytes: int

    @property
    def layer_bytes(self) -> int:
        """K and V bytes of one page in one layer."""
        return self.kv_heads * 2 * self.page_tokens * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes one page takes over all layers, its `seen` scores included."""
        return self.num_layers * (self.layer_bytes + self.kv_heads * self.page_tokens * SCORE_BYTES)


@dataclass(frozen=True)
class BlockLayout:
    """Byte offsets inside one committed block."""

    format: BlockFormat
    block_entries: int
    head_dim: int

    @property
    def quantized(self) -> bool:
        return self.format in QUANTIZED

    @property
    def k_bits(self) -> int:
        return CODE_BITS[self.format][0]

    @property
    def v_bits(self) -> int:
        return CODE_BITS[self.format][1]

    @property
    def k_row_bytes(self) -> int:
        """Bytes of one entry's K codes."""
        return self.head_dim * self.k_bits // 8

    @property
    def v_row_bytes(self) -> int:
        """Bytes of one entry's V codes."""
        return self.head_dim * self.v_bits // 8

    @property
    def k_codes(self) -> int:
        return 0

    @property
    def v_codes(self) -> int:
        return _aligned(self.block_entries * self.k_row_bytes)

    @property
    def k_scale(self) -> int:
        return self.v_codes + _aligned(self.block_entries * self.v_row_bytes)

    @property
    def k_min(self) -> int:
        return self.k_scale + (_aligned(self.head_dim * SCALE_BYTES) if self.quantized else 0)

    @property
    def v_scale(self) -> int:
        return self.k_min + (_aligned(self.head_dim * SCALE_BYTES) if self.quantized else 0)

    @property
    def v_min(self) -> int:
        return self.v_scale + (_aligned(self.block_entries * SCALE_BYTES) if self.quantized else 0)

    @property
    def bias(self) -> int:
        return self.v_min + (_aligned(self.block_entries * SCALE_BYTES) if self.quantized else 0)

    @property
    def block_bytes(self) -> int:
        """Bytes one bulk copy brings on chip."""
        return self.bias + _aligned(self.block_entries * SCALE_BYTES)

    @property
    def stored_bytes(self) -> int:
        """Bytes one block takes in memory, its scores included."""
        return self.block_bytes + self.block_entries * SCORE_BYTES

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
    slots    [E] uint8         where each entry's K codes lie   (mixed formats)
Codes: 8 bits -> one unsigned byte, 4 bits -> byte i of a row holds channel i in its low nibble and channel
i + D/2 in its high nibble, bf16/fp16/fp32 -> the values themselves. x = min + scale * code.

Formats by bits of K and V: int4 4/4, int8 8/8, k8v4 8/4. An error of a key moves the weights of all values, and a
channel's range over a block is wide, so keys need more bits: on SmolLM2-135M (1,201 tokens, python -m perf.code_bits)
rounding to k8v4 alone raises the Kullback-Leibler divergence of next-token distributions to the full cache by 0.011,
to int4 by 0.096.

Mixed formats spend key bits by score. In k84v4 the E / 4 entries of a block with the largest scores have 8-bit keys and
the others 4-bit ones, values have 4 bits. k_codes then holds E / 4 rows of D bytes and after them the rest in rows of
D / 2; an entry's row is its slot, so that entries keep their order everywhere else. Both widths share k_scale and
k_min: a narrow code counts for 17 wide ones, since 255 = 17 * 15. Only the torch forms read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

BlockFormat = Literal["int4", "k8v4", "int8", "bf16", "fp16", "fp32", "k84v4"]

# Bits of a channel in K and in V; of mixed formats, of the wide keys.
CODE_BITS: dict[BlockFormat, tuple[int, int]] = {
    "int4": (4, 4),
    "k8v4": (8, 4),
    "int8": (8, 8),
    "bf16": (16, 16),
    "fp16": (16, 16),
    "fp32": (32, 32),
}
QUANTIZED: tuple[BlockFormat, ...] = ("int4", "k8v4", "int8")
MIXED: dict[BlockFormat, tuple[int, int]] = {"k84v4": (8, 4)}
STORABLE: tuple[BlockFormat, ...] = (*QUANTIZED, *MIXED)
"""What a policy may choose besides unquantized blocks; kernels and native forms have QUANTIZED."""
WIDE_SHARE = 4
"""One of so many entries of a block in a mixed format has wide keys."""
Element = Literal["fp16", "bf16"]
ELEMENTS: tuple[Element, ...] = ("fp16", "bf16")  # types of active pages that kernels have; order of their ELEMENT
ELEMENT_BYTES = 2
# Kernels read pages and blocks in pieces of 16 bytes and K and V rows in tiles of 8.
KERNEL_HEAD_DIMS = (64, 128)
KERNEL_ROWS = 8
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

    @cached_property  # asked in every step
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
        return self.format in STORABLE

    @property
    def mixed(self) -> bool:
        """Whether entries of one block have keys of two widths."""
        return self.format in MIXED

    @property
    def wide_entries(self) -> int:
        """Entries of a full block whose keys have all `k_bits`."""
        return self.block_entries // WIDE_SHARE if self.mixed else self.block_entries

    @property
    def k_bits(self) -> int:
        return (MIXED if self.mixed else CODE_BITS)[self.format][0]

    @property
    def v_bits(self) -> int:
        return (MIXED if self.mixed else CODE_BITS)[self.format][1]

    @property
    def k_row_bytes(self) -> int:
        """Bytes of one entry's K codes, a wide one's in a mixed format."""
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
        narrow = self.block_entries - self.wide_entries
        return _aligned(self.wide_entries * self.k_row_bytes + narrow * self.k_row_bytes // 2)

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
    def slots(self) -> int:
        return self.bias + _aligned(self.block_entries * SCALE_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes one bulk copy brings on chip."""
        return self.slots + (_aligned(self.block_entries) if self.mixed else 0)

    @cached_property  # asked in every step
    def stored_bytes(self) -> int:
        """Bytes one block takes in memory, its scores included."""
        return self.block_bytes + self.block_entries * SCORE_BYTES


def geometry_defines(page: PageLayout, block: BlockLayout, element: Element) -> tuple[tuple[str, int], ...]:
    """What a kernel is told of the geometry at compile time, as -D names and values.

    Raises ValueError for geometry that kernels do not have: other head sizes, page or block lengths that are no
    multiple of 8, unquantized blocks of another type than the pages.
    """
    _check_geometry(page, block, element)
    return (
        ("HEAD_DIM", page.head_dim),
        ("PAGE_TOKENS", page.page_tokens),
        ("BLOCK_ENTRIES", block.block_entries),
        ("K_BITS", block.k_bits),
        ("V_BITS", block.v_bits),
        ("QUANTIZED", int(block.quantized)),
        ("K_CODES", block.k_codes),
        ("V_CODES", block.v_codes),
        ("K_SCALE", block.k_scale),
        ("K_MIN", block.k_min),
        ("V_SCALE", block.v_scale),
        ("V_MIN", block.v_min),
        ("BIAS", block.bias),
        ("BLOCK_BYTES", block.block_bytes),
        ("ELEMENT", ELEMENTS.index(element)),
    )


def _check_geometry(page: PageLayout, block: BlockLayout, element: Element) -> None:
    if element not in ELEMENTS:
        raise ValueError(f"element: got {element!r}, expected fp16 or bf16: GPU kernels have no other page type")
    if page.element_bytes != ELEMENT_BYTES:
        raise ValueError(f"page.element_bytes: got {page.element_bytes}, expected {ELEMENT_BYTES} for {element}")
    if page.head_dim not in KERNEL_HEAD_DIMS or block.head_dim != page.head_dim:
        raise ValueError(
            f"head_dim: got {page.head_dim} in pages and {block.head_dim} in blocks, expected 64 or 128 in both"
        )
    for name, rows in (("page_tokens", page.page_tokens), ("block_entries", block.block_entries)):
        if rows < KERNEL_ROWS or rows % KERNEL_ROWS:
            raise ValueError(f"{name}: got {rows}, expected a multiple of {KERNEL_ROWS}")
    if block.mixed or (not block.quantized and block.format != element):
        raise ValueError(
            f"block format: got {block.format} with {element} pages, expected {element} or a quantized format "
            f"({', '.join(QUANTIZED)})"
        )

"""Shapes that the kernels are measured at, and the least they can cost: arithmetic only.

A conversation of a shape stores `tokens` entries per KV head; `committed_ratio` of them lie in committed blocks, the
rest in pages. Decode reads all of them once for one query row. Every figure is for ONE layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugins.layout import BlockFormat, BlockLayout

ELEMENT_BYTES = 2  # fp16 or bf16; kernels know no other
HALF_BYTES = 2
CHUNK_ROWS = 64  # query rows of a tile, query heads counted


@dataclass(frozen=True)
class Heads:
    """Attention of one model.   group_size: query heads per KV head."""

    name: str
    num_layers: int
    kv_heads: int
    group_size: int
    head_dim: int


HEADS = (
    Heads("SmolLM2-135M", 30, 3, 3, 64),
    Heads("Llama-3.1-8B", 32, 8, 4, 128),
    Heads("Qwen2.5-7B", 28, 4, 7, 128),
)


@dataclass(frozen=True)
class KernelShape:
    """`batch` conversations of `tokens` entries each.   format: of committed blocks.   rows: query rows of each."""

    heads: Heads
    batch: int
    tokens: int
    committed_ratio: float = 0.0
    format: BlockFormat = "k8v4"
    rows: int = 1
    page_tokens: int = 16
    block_entries: int = 64

    @property
    def block(self) -> BlockLayout:
        return BlockLayout(self.format, self.block_entries, self.heads.head_dim)

    @property
    def num_blocks(self) -> int:
        """Full blocks of one conversation and KV head."""
        return round(self.tokens * self.committed_ratio) // self.block_entries

    @property
    def active_tokens(self) -> int:
        """Tokens of one conversation in pages."""
        return self.tokens - self.num_blocks * self.block_entries

    @property
    def num_pages(self) -> int:
        """Pages of one conversation."""
        return -(-self.active_tokens // self.page_tokens)

    @property
    def page_bytes(self) -> int:
        """K and V of all active tokens."""
        heads = self.heads
        return self.batch * self.active_tokens * heads.kv_heads * 2 * heads.head_dim * ELEMENT_BYTES

    @property
    def block_bytes(self) -> int:
        """All committed blocks, scales and biases included."""
        return self.batch * self.heads.kv_heads * self.num_blocks * self.block.block_bytes

    @property
    def kv_bytes(self) -> int:
        """The least that attention reads: every live byte of K and V once, for chunks once per tile of query rows."""
        if self.rows == 1:
            return self.page_bytes + self.block_bytes
        return sum(self._seen_bytes(last) for last in self._last_rows())

    @property
    def key_bytes(self) -> int:
        """The least that scoring the rows of a chunk reads: every live byte of K once per tile of query rows."""
        layout = self.block
        whole = self.block_bytes // layout.block_bytes if self.num_blocks else 0
        scales = 2 * HALF_BYTES * layout.head_dim if layout.quantized else 0
        block = layout.block_entries * (layout.k_row_bytes + HALF_BYTES) + scales
        pages = sum(self._seen_bytes(last) - self.block_bytes for last in self._last_rows()) // 2
        return pages + len(self._last_rows()) * whole * block

    def _last_rows(self) -> list[int]:
        """The last row of each tile of a chunk."""
        step = CHUNK_ROWS // self.heads.group_size
        return [min(first + step, self.rows) - 1 for first in range(0, self.rows, step)]

    def _seen_bytes(self, row: int) -> int:
        """K and V that row `row` of every conversation sees."""
        return self.page_bytes * (self.active_tokens - (self.rows - 1 - row)) // self.active_tokens + self.block_bytes

    @property
    def seen_bytes(self) -> int:
        """The least that recording moves: one fp16 weight read and written per entry."""
        return self.batch * self.heads.kv_heads * self.tokens * 2 * HALF_BYTES

    @property
    def query_bytes(self) -> int:
        """q read, out written."""
        heads = self.heads
        return 2 * self.batch * self.rows * heads.kv_heads * heads.group_size * heads.head_dim * ELEMENT_BYTES

    @property
    def flops(self) -> int:
        """Multiply-adds of q.k and p.v, two operations each; the causal triangle of a chunk is counted as read."""
        heads = self.heads
        return 4 * self.batch * self.rows * heads.kv_heads * heads.group_size * heads.head_dim * self.tokens

    @property
    def label(self) -> str:
        share = f"{self.committed_ratio:.0%} {self.format}" if self.committed_ratio else "pages"
        return f"{self.heads.name}, batch {self.batch}, {self.tokens} tokens, {share}"


@dataclass(frozen=True)
class CommitShape:
    """One conversation's commit of `staged` tokens of which `keep_ratio` stay; nothing is dissolved.

    gate: of absorption; None drops what falls below the line, whose keys then need not be read.
    """

    heads: Heads
    staged: int
    keep_ratio: float = 0.35
    format: BlockFormat = "k8v4"
    gate: float | None = 0.35
    page_tokens: int = 16
    block_entries: int = 64

    @property
    def block(self) -> BlockLayout:
        return BlockLayout(self.format, self.block_entries, self.heads.head_dim)

    @property
    def kept(self) -> int:
        """Entries that each KV head keeps."""
        return round(self.staged * self.keep_ratio)

    @property
    def num_blocks(self) -> int:
        """Blocks written per KV head."""
        return -(-self.kept // self.block_entries)

    @property
    def read_bytes(self) -> int:
        """The least, where nothing is near enough to be absorbed: keys that are compared once, values kept once."""
        keys = self.kept if self.gate is None else self.staged
        return (keys + self.kept) * self.heads.kv_heads * self.heads.head_dim * ELEMENT_BYTES

    @property
    def written_bytes(self) -> int:
        """The least: every new block once."""
        return self.heads.kv_heads * self.num_blocks * self.block.block_bytes

    @property
    def kv_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def label(self) -> str:
        return f"{self.heads.name}, {self.staged} staged, {self.keep_ratio:.0%} kept as {self.format}"


CONTEXTS = (4096, 16384, 65536, 131072)
BATCHES = (1, 8, 64)
RATIOS = (0.0, 0.5, 0.9)
MOST_TOKENS = 1 << 20
"""Entries of all conversations of one measured shape: what a card's memory holds at once with room to spare."""


def attend_shapes(heads: Heads, format_: BlockFormat = "k8v4") -> tuple[KernelShape, ...]:
    """Contexts of 4k to 128k, batches of 1 to 64, from all active to 90 % committed; the largest together left out."""
    return tuple(
        KernelShape(heads, batch, tokens, ratio, format_)
        for tokens in CONTEXTS
        for batch in BATCHES
        for ratio in RATIOS
        if batch * tokens <= MOST_TOKENS
    )


def commit_shapes(heads: Heads, format_: BlockFormat = "k8v4") -> tuple[CommitShape, ...]:
    """Spans of one turn and of a long document."""
    return tuple(CommitShape(heads, staged, format=format_) for staged in (512, 4096, 32768))

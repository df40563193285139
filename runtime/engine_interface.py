"""Inputs and outputs of a TensorRT engine: one table, used by the builder, the plugins' insertion and the executor.

One execution runs one step: R rows of S sequences. L layers, G KV heads, Q query heads, D head size, T = page_tokens,
E = block_entries, W = vocabulary. Sizes that change from step to step have a letter of their own and a range.

    input           shape                  dtype   meaning
    token_ids       [R]                    int32
    positions       [R]                    int32   logical positions, for the rotary angles
    slots           [R]                    int32   page * T + offset where K and V go; -1: a row that pads
    logit_rows      [N]                    int32   rows whose logits are wanted
    row_starts      [S + 1]                int32   rows of sequence s are [row_starts[s], row_starts[s + 1])
    page_starts     [S + 1]                int32   into page_ids, page_lens
    page_ids        [P]                    int32   -1: skipped
    page_lens       [P]                    int32   tokens filled per page, this step's included
    record          [R]                    bool    row raises seen and score
    record_skip     [S]                    int32   newest page tokens up to and including a row, not recorded for it
    block_starts    [L, S * G + 1]         int32   list s * G + g of a layer is [starts, next start) of that layer's row
    block_ids       [L, B]                 int32   -1: skipped.   Each layer fills its row from the left
    block_lens      [L, B]                 int32   entries filled per block
    tiles           [L, X]                 int32   tile lists as the attend plugin packs them; native: unread
    pages_<i>       [pages, G, 2, T, D]    kv      K and V of layer i
    seen_<i>        [pages, G, T]          fp16    largest weight per token of layer i
    blocks          [blocks, block_words]  int32   bytes of committed blocks, four to a word (layers take no bytes)
    score           [blocks, E]            fp16    largest weight per entry

    output          shape                  dtype   meaning
    logits          [N, W]                 fp32
    pages_<i>_out   as pages_<i>           kv      plugin form: the same memory (aliased); native form: a changed copy
    seen_<i>_out    as seen_<i>            fp16    likewise
    score_out       as score               fp16    likewise

Rows, sequences, pages and blocks that pad: slots -1 and record false; empty ranges in the starts; ids -1. Every size is
at least 1, so a step without blocks (or without wanted logits) passes one that pads (row 0, and drops its logits).
Meanings are those of `plugins.append.params` and `plugins.attend.params`, where the tables are those of one layer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from plugins.layout import BlockFormat, BlockLayout
from runtime.config import EngineLimits, ModelSpec
from runtime.errors import ConfigError

BindingDType = Literal["int32", "bool", "fp16", "bf16", "fp32"]

# Both TensorRT's tensors and our int32 tables count elements in 31 bits.
MAX_ELEMENTS = (1 << 31) - 1
WORD_BYTES = 4
# A block is dissolved once less than this share of it is alive, so that many times the fewest blocks may be held.
BLOCK_SLACK = 4 / 3


@dataclass(frozen=True)
class Dim:
    """One size that changes from step to step: least, typical and largest value of the optimization profile."""

    name: str
    least: int
    typical: int
    most: int


@dataclass(frozen=True)
class Binding:
    """One input or output.   shape: sizes, or names of `Dim`s.   aliases: the input whose memory an output shares."""

    name: str
    dtype: BindingDType
    shape: tuple[int | str, ...]
    aliases: str | None = None


@dataclass(frozen=True)
class StepLimits:
    """What a TensorRT engine fixes on top of `EngineLimits`.

    max_step_tokens: rows of one step over all sequences.   block_format: of all committed blocks.
    max_tile_words: int32 words of one layer's tile lists.
    """

    max_step_tokens: int
    block_format: BlockFormat
    max_tile_words: int


@dataclass(frozen=True)
class EngineInterface:
    """The table above for one engine."""

    dims: tuple[Dim, ...]
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]

    def dim(self, name: str) -> Dim:
        """The size called `name`."""
        return next(dim for dim in self.dims if dim.name == name)

    def network_shape(self, binding: Binding) -> tuple[int, ...]:
        """Shape with -1 for sizes that change."""
        return tuple(-1 if isinstance(size, str) else size for size in binding.shape)

    def profile(self, binding: Binding) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Least, typical and largest shape."""
        by_name = {dim.name: (dim.least, dim.typical, dim.most) for dim in self.dims}
        ranges = [by_name[size] if isinstance(size, str) else (size, size, size) for size in binding.shape]
        least, typical, most = (tuple(r[i] for r in ranges) for i in range(3))
        return least, typical, most

    def sha256(self) -> str:
        """Hash over names, types, shapes and ranges: an engine and an executor that agree on it fit together."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()


def make_interface(spec: ModelSpec, limits: EngineLimits, step: StepLimits) -> EngineInterface:
    """Raises ConfigError where a limit makes a table or an arena too large to be counted in 31 bits."""
    layout = BlockLayout(step.block_format, limits.block_entries, spec.head_dim)
    block_words = layout.block_bytes // WORD_BYTES
    dims = _dims(spec, limits, step, block_words)
    by_name = {dim.name: dim for dim in dims}
    layers, heads, tokens = spec.num_layers, spec.num_kv_heads, limits.page_tokens
    kv: BindingDType = limits.kv_dtype
    pages = ("pages", heads, 2, tokens, spec.head_dim)
    seen = ("pages", heads, tokens)
    inputs = [
        Binding("token_ids", "int32", ("R",)),
        Binding("positions", "int32", ("R",)),
        Binding("slots", "int32", ("R",)),
        Binding("logit_rows", "int32", ("N",)),
        Binding("row_starts", "int32", ("S+1",)),
        Binding("page_starts", "int32", ("S+1",)),
        Binding("page_ids", "int32", ("P",)),
        Binding("page_lens", "int32", ("P",)),
        Binding("record", "bool", ("R",)),
        Binding("record_skip", "int32", ("S",)),
        Binding("block_starts", "int32", (layers, "S*G+1")),
        Binding("block_ids", "int32", (layers, "B")),
        Binding("block_lens", "int32", (layers, "B")),
        Binding("tiles", "int32", (layers, "X")),
        *(Binding(f"pages_{i}", kv, pages) for i in range(layers)),
        *(Binding(f"seen_{i}", "fp16", seen) for i in range(layers)),
        Binding("blocks", "int32", ("blocks", block_words)),
        Binding("score", "fp16", ("blocks", limits.block_entries)),
    ]
    outputs = [
        Binding("logits", "fp32", ("N", spec.vocab_size)),
        *(Binding(f"pages_{i}_out", kv, pages, f"pages_{i}") for i in range(layers)),
        *(Binding(f"seen_{i}_out", "fp16", seen, f"seen_{i}") for i in range(layers)),
        Binding("score_out", "fp16", ("blocks", limits.block_entries), "score"),
    ]
    for binding in (*inputs, *outputs):
        _check_volume(binding, by_name)
    return EngineInterface(dims, tuple(inputs), tuple(outputs))


def _dims(spec: ModelSpec, limits: EngineLimits, step: StepLimits, block_words: int) -> tuple[Dim, ...]:
    """Ranges from the limits. A typical step decodes a full batch, each sequence an eighth of its longest."""
    batch, heads = limits.max_batch_size, spec.num_kv_heads
    if step.max_step_tokens < batch:
        raise ConfigError(
            f"max_step_tokens: got {step.max_step_tokens}, expected at least max_batch_size ({batch}), one row for "
            f"every sequence; raise --max-step-tokens or lower --max-batch-size"
        )
    # One page more than full ones for the protected tokens, one for the newest; a probe adds scratch pages.
    pages = _ceil(limits.max_seq_len, limits.page_tokens) + _ceil(step.max_step_tokens, limits.page_tokens) + 2
    blocks = _ceil(BLOCK_SLACK * limits.max_seq_len, limits.block_entries) + 1
    page_elements = heads * 2 * limits.page_tokens * spec.head_dim
    # Slots (page * T + offset) and arenas are counted in 31 bits.
    most_pages = MAX_ELEMENTS // max(page_elements, limits.page_tokens)
    most_blocks = MAX_ELEMENTS // max(block_words, limits.block_entries)
    lists = batch * heads
    return (
        Dim("R", 1, batch, step.max_step_tokens),
        Dim("N", 1, batch, batch),
        Dim("S", 1, batch, batch),
        Dim("S+1", 2, batch + 1, batch + 1),
        Dim("S*G+1", heads + 1, lists + 1, lists + 1),
        Dim("P", 1, _ceil(batch * pages, 8), batch * pages),
        Dim("B", 1, _ceil(lists * blocks, 8), lists * blocks),
        Dim("X", 1, step.max_tile_words, step.max_tile_words),
        Dim("pages", 1, min(_ceil(batch * pages, 8), most_pages), most_pages),
        Dim("blocks", 1, min(_ceil(lists * blocks * spec.num_layers, 8), most_blocks), most_blocks),
    )


def _ceil(value: float, unit: int) -> int:
    return int(-(-value // unit))


def _check_volume(binding: Binding, dims: dict[str, Dim]) -> None:
    volume = 1
    for size in binding.shape:
        volume *= dims[size].most if isinstance(size, str) else size
    if volume > MAX_ELEMENTS:
        raise ConfigError(
            f"limits: input {binding.name} may take {volume:,} elements, expected at most {MAX_ELEMENTS:,} (31 bits); "
            f"lower --max-batch-size or --max-seq-len"
        )

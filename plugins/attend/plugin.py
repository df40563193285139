"""TensorRT plugin of `attend`: attention of one layer, which raises the layer's `seen` and the blocks' `score`.

Tables come for all layers of a step; the plugin of layer i finds its row in them. `tiles` as packed by `tile_words`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plugins.attend.cuda import AttendArgs, launch_attend
from plugins.attend.tile_words import MAX_MULTIPROCESSORS, Section, StepKernels, TileLayout, TileWords
from plugins.errors import PluginError
from plugins.kernel import Kernel
from plugins.kv_tiles import STEP_KEYS, KvArgs, KvShape
from plugins.score.cuda import ScoreArgs, launch_score
from plugins.trt_fields import CompileCubin, PluginFields
from plugins.trt_plugin import Call, PluginSpec, PluginTensor, TrtPlugin

INT32_BYTES = FP32_BYTES = 4
WORKSPACE_ALIGNMENT = 256

QUERIES = ("R", "q_heads", "head_dim")
SEEN, SCORE = ("pages", "kv_heads", "page_tokens"), ("blocks", "block_entries")
TABLES = (
    PluginTensor("row_starts", "int32", ("S+1",)),
    PluginTensor("page_starts", "int32", ("S+1",)),
    PluginTensor("page_ids", "int32", ("P",)),
    PluginTensor("page_lens", "int32", ("P",)),
    PluginTensor("record", "bool", ("R",)),
    PluginTensor("record_skip", "int32", ("S",)),
    PluginTensor("block_starts", "int32", ("num_layers", "S*G+1")),
    PluginTensor("block_ids", "int32", ("num_layers", "B")),
    PluginTensor("block_lens", "int32", ("num_layers", "B")),
    PluginTensor("tiles", "int32", ("num_layers", "X")),
)
ARENAS = (
    PluginTensor("pages", "element", ("pages", "kv_heads", "2", "page_tokens", "head_dim")),
    PluginTensor("seen", "fp16", SEEN),
    PluginTensor("blocks", "int32", ("blocks", "block_bytes/4")),
    PluginTensor("score", "fp16", SCORE),
)
RAISED = (PluginTensor("seen_out", "fp16", SEEN, alias="seen"), PluginTensor("score_out", "fp16", SCORE, alias="score"))

SPEC = PluginSpec(
    name="CommitKVAttend",
    inputs=(PluginTensor("q", "element", QUERIES), *TABLES, *ARENAS),
    outputs=(PluginTensor("out", "element", QUERIES), *RAISED),
)


@dataclass(frozen=True)
class LayerFields(PluginFields):
    """layer: which row of the tables is this plugin's.   scale: of the logits."""

    num_layers: int
    layer: int
    scale: float

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "num_layers": self.num_layers}


@dataclass(frozen=True)
class AttendFields(LayerFields):
    """Cubins of `kernels`, for `sm`. Raises UnsupportedShapeError where a page or block does not fit shared memory."""

    decode_cubin: bytes = field(repr=False)
    chunk_cubin: bytes = field(repr=False)
    score_cubin: bytes = field(repr=False)

    @cached_property
    def kernels(self) -> StepKernels:
        return StepKernels.of(kv_shape(self), self.sm)


def kv_shape(fields: PluginFields) -> KvShape:
    """Raises UnsupportedShapeError."""
    return KvShape(fields.page, fields.block, fields.element_type, fields.q_heads // fields.kv_heads)


def attend_fields(base: PluginFields, num_layers: int, scale: float, compile_cubin: CompileCubin) -> AttendFields:
    """Attributes of the plugin of layer 0, its kernels compiled. Raises UnsupportedShapeError and compile errors."""
    kernels = StepKernels.of(kv_shape(base), base.sm)
    for kernel in kernels.all:
        assert kernel.residency.blocks > 0  # raises where nothing fits
    decode, chunk, score = (compile_cubin(kernel.kernel, base.sm) for kernel in kernels.all)
    return AttendFields.extend(
        base, num_layers=num_layers, layer=0, scale=scale, decode_cubin=decode, chunk_cubin=chunk, score_cubin=score
    )


class AttendPlugin(TrtPlugin[AttendFields]):
    """See `plugins.attend.params` for what it computes."""

    spec = SPEC
    fields_type = AttendFields

    def cubins(self) -> Mapping[Kernel, bytes]:
        fields, kernels = self.fields, self.fields.kernels
        bytes_of = (fields.decode_cubin, fields.chunk_cubin, fields.score_cubin)
        return {kernel.kernel: cubin for kernel, cubin in zip(kernels.all, bytes_of, strict=True)}

    def workspace_bytes(self, size: Mapping[str, int]) -> int:
        words = TileWords(self.fields.kernels.all, self.fields.kv_heads, MAX_MULTIPROCESSORS)
        return self._workspace(size, words.layout(size["S"], size["R"], decodes=False), 0)["end"]

    def launch(self, call: Call) -> None:
        size, at, kernels = call.size, call.address, self.fields.kernels
        layout = tile_layout(self.fields, kernels, call)
        workspace = self._workspace(size, layout, call.workspace)
        kv = kv_args(self.fields, call)
        args = AttendArgs(
            kv=kv,
            scale=self.fields.scale,
            **{name: at[name] for name in ("q", "out", "seen", "score", "record", "record_skip")},
            **{name: workspace[name] for name in ("lse", "parts", "part_sums", "logits")},
        )
        lists = at["tiles"] + INT32_BYTES * self.fields.layer * size["X"]
        for kernel, section in zip((kernels.decode, kernels.chunk), layout.sections, strict=False):
            args.tiles, args.block_tiles = tile_addresses(lists, section)
            launch_attend(call.runner, kernel, args, call.stream)
        for section in layout.sections[2:]:
            scored = ScoreArgs(
                kv=kv,
                scale=self.fields.scale,
                lse=args.lse,
                score_rows=lists + INT32_BYTES * section.rows,
                **{name: at[name] for name in ("q", "seen", "score", "record_skip")},
            )
            scored.tiles, scored.block_tiles = tile_addresses(lists, section)
            launch_score(call.runner, kernels.score, scored, call.stream)

    def _workspace(self, size: Mapping[str, int], layout: TileLayout, start: int) -> dict[str, int]:
        """Where each part lies from `start` on, and the `end`. Both tile heights use the same parts, in turn."""
        kernels = self.fields.kernels
        pairs = zip((kernels.decode, kernels.chunk), layout.sections, strict=False)
        parts = [kernel.part_bytes(section.max_tiles) for kernel, section in pairs]
        lengths = {
            "parts": max(length for length, _ in parts),
            "part_sums": max(length for _, length in parts),
            "logits": FP32_BYTES * self.num_logits(self.fields, size, decodes=len(layout.sections) == 1),
            "lse": FP32_BYTES * size["R"] * size["q_heads"],
        }
        places = {}
        for name, length in lengths.items():
            places[name] = start
            start += -(-length // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        return {**places, "end": start}

    @staticmethod
    def num_logits(fields: AttendFields, size: Mapping[str, int], decodes: bool) -> int:
        """Logits that the decode kernel keeps, at most: query rows of a tile times the keys of all units listed."""
        shape = fields.kernels.decode.shape
        query_rows = shape.group if decodes else STEP_KEYS // shape.group * shape.group
        page_units = size["kv_heads"] * (size["P"] // shape.unit_pages + size["S"])
        return query_rows * shape.unit_keys * (page_units + size["B"])


def tile_layout(fields: LayerFields, kernels: StepKernels, call: Call) -> TileLayout:
    """Where the tile lists of a step begin. Raises PluginError where sizes of the tables do not belong together."""
    size = call.size
    words = TileWords(kernels.all, fields.kv_heads, call.runner.num_multiprocessors)
    layout = words.layout(size["S"], size["R"], decodes=size["R"] == size["S"])
    check_table_sizes(size, layout.words)
    return layout


def check_table_sizes(size: Mapping[str, int], num_words: int) -> None:
    """Raises PluginError where sizes of the tables do not belong together."""
    for name, expected in (("S+1", size["S"] + 1), ("S*G+1", size["S"] * size["kv_heads"] + 1)):
        if size[name] != expected:
            raise PluginError(f"tables: got {size[name]} for {name}, expected {expected} for {size['S']} sequences")
    if size["X"] < num_words:
        raise PluginError(
            f"tiles: got {size['X']} words a layer, expected at least {num_words}; pack them for this device with "
            f"plugins.attend.tile_words"
        )


def kv_args(fields: LayerFields, call: Call) -> KvArgs:
    """What attend and score share: addresses of the layer's part of the tables."""
    size, at, layer = call.size, call.address, fields.layer
    names = ("pages", "blocks", "row_starts", "page_starts", "page_ids", "page_lens")
    return KvArgs(
        **{name: at[name] for name in names},
        block_starts=at["block_starts"] + INT32_BYTES * layer * size["S*G+1"],
        block_ids=at["block_ids"] + INT32_BYTES * layer * size["B"],
        block_lens=at["block_lens"] + INT32_BYTES * layer * size["B"],
        num_pages=size["pages"], num_blocks=size["blocks"], kv_heads=fields.kv_heads,
        group=fields.q_heads // fields.kv_heads,
    )  # fmt: skip


def tile_addresses(lists: int, section: Section) -> tuple[int, int]:
    """Of `tiles` and `block_tiles` in a layer's row of words."""
    return lists + INT32_BYTES * section.tiles, lists + INT32_BYTES * section.block_tiles

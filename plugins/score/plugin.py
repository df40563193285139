"""TensorRT plugin of `score`: the largest weights that recorded rows give, when their log-sum-exp is known.

Not part of the step network, whose `attend` scores its own chunks. For networks that ask what a span's rows read
without storing them, or read it with another form of attention. `tiles`: by `plugins.attend.tile_words.pack_score`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plugins.attend.plugin import (
    ARENAS,
    INT32_BYTES,
    QUERIES,
    RAISED,
    TABLES,
    LayerFields,
    check_table_sizes,
    kv_args,
    kv_shape,
    tile_addresses,
)
from plugins.attend.tile_words import TileWords
from plugins.kernel import Kernel
from plugins.score.cuda import ScoreArgs, ScoreKernel, launch_score
from plugins.trt_fields import CompileCubin, PluginFields
from plugins.trt_plugin import Call, PluginSpec, PluginTensor, TrtPlugin

SPEC = PluginSpec(
    name="CommitKVScore",
    inputs=(PluginTensor("q", "element", QUERIES), PluginTensor("lse", "fp32", QUERIES[:2]), *TABLES, *ARENAS),
    outputs=RAISED,
)


@dataclass(frozen=True)
class ScoreFields(LayerFields):
    """score_cubin: of `kernel`, for `sm`."""

    score_cubin: bytes = field(repr=False)

    @cached_property
    def kernel(self) -> ScoreKernel:
        return ScoreKernel(kv_shape(self), self.sm)


def score_fields(base: PluginFields, num_layers: int, scale: float, compile_cubin: CompileCubin) -> ScoreFields:
    """Attributes of the plugin of layer 0, its kernel compiled. Raises UnsupportedShapeError and compile errors."""
    kernel = ScoreKernel(kv_shape(base), base.sm)
    assert kernel.residency.blocks > 0  # raises where nothing fits
    cubin = compile_cubin(kernel.kernel, base.sm)
    return ScoreFields.extend(base, num_layers=num_layers, layer=0, scale=scale, score_cubin=cubin)


class ScorePlugin(TrtPlugin[ScoreFields]):
    """See `plugins.score.params` for what it computes."""

    spec = SPEC
    fields_type = ScoreFields

    def cubins(self) -> Mapping[Kernel, bytes]:
        return {self.fields.kernel.kernel: self.fields.score_cubin}

    def workspace_bytes(self, size: Mapping[str, int]) -> int:
        return 0

    def launch(self, call: Call) -> None:
        size, at, fields = call.size, call.address, self.fields
        words = TileWords((fields.kernel,), fields.kv_heads, call.runner.num_multiprocessors)
        layout = words.layout(size["S"], size["R"], decodes=False)
        check_table_sizes(size, layout.words)
        (section,) = layout.sections
        lists = at["tiles"] + INT32_BYTES * fields.layer * size["X"]
        args = ScoreArgs(
            kv=kv_args(fields, call), scale=fields.scale, score_rows=lists + INT32_BYTES * section.rows,
            **{name: at[name] for name in ("q", "lse", "seen", "score", "record_skip")},
        )  # fmt: skip
        args.tiles, args.block_tiles = tile_addresses(lists, section)
        launch_score(call.runner, fields.kernel, args, call.stream)

"""TensorRT plugin of `commit`: publishes a commit of one conversation, in a network of its own (see plugins/README.md).

Pages are reached through tables of addresses, one per layer, as commit.cu takes them: TensorRT sees `pages` of one
layer, for the arena's size. Blocks, scores and the two counts are edited in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plugins.commit.cuda import (
    SHARED_BYTES,
    CommitPlan,
    CommitSizes,
    CudaCommitParams,
    commit_kernel,
    launch_commit,
    plan_commit,
)
from plugins.kernel import Kernel
from plugins.trt_fields import CompileCubin, PluginFields
from plugins.trt_plugin import Call, PluginSpec, PluginTensor, TrtPlugin

BLOCKS, SCORE = ("blocks", "block_bytes/4"), ("blocks", "block_entries")
NO_GATE = -1.0

SPEC = PluginSpec(
    name="CommitKVCommit",
    inputs=(
        PluginTensor("layer_pages", "int64", ("num_layers",)),
        PluginTensor("layer_seen", "int64", ("num_layers",)),
        PluginTensor("pages", "element", ("pages", "kv_heads", "2", "page_tokens", "head_dim")),
        PluginTensor("staged", "int32", ("staged",)),
        PluginTensor("old_starts", "int32", ("kv_rows+1",)),
        PluginTensor("old_ids", "int32", ("old",)),
        PluginTensor("old_lens", "int32", ("old",)),
        PluginTensor("dissolve", "bool", ("old",)),
        PluginTensor("alive", "bool", ("old", "block_entries")),
        PluginTensor("new_starts", "int32", ("kv_rows+1",)),
        PluginTensor("new_ids", "int32", ("new",)),
        PluginTensor("new_lens", "int32", ("new",)),
        PluginTensor("is_new", "bool", ("new",)),
        PluginTensor("marks", "bool", ("kv_rows", "staged")),  # nothing is exact here: 0 or 1
        PluginTensor("staged_score", "fp32", ("kv_rows", "staged")),
        PluginTensor("move_from", "int32", ("moves",)),
        PluginTensor("move_to", "int32", ("moves",)),
        PluginTensor("blocks", "int32", BLOCKS),
        PluginTensor("score", "fp16", SCORE),
        PluginTensor("counts", "int32", ("2",)),
    ),
    outputs=(
        PluginTensor("blocks_out", "int32", BLOCKS, alias="blocks"),
        PluginTensor("score_out", "fp16", SCORE, alias="score"),
        PluginTensor("counts_out", "int32", ("2",), alias="counts"),
    ),
)


@dataclass(frozen=True)
class CommitFields(PluginFields):
    """max_row_blocks: blocks that one (layer, KV head) may have before a commit.   commit_cubin: of `kernel`, for `sm`.

    gate: as in `PublishParams.absorb_gate`; NO_GATE drops what falls below the line.
    """

    num_layers: int
    max_row_blocks: int
    gate: float
    commit_cubin: bytes = field(repr=False)

    @cached_property
    def kernel(self) -> Kernel:
        return commit_kernel(self.page, self.block, self.element_type)

    def sizes(self) -> dict[str, int]:
        rows = self.num_layers * self.kv_heads
        return {**super().sizes(), "num_layers": self.num_layers, "kv_rows": rows, "kv_rows+1": rows + 1}

    def plan(self, num_staged: int, num_multiprocessors: int) -> CommitPlan:
        """For the most that a commit of so many staged tokens can meet. Raises UnsupportedShapeError."""
        moving = num_staged + self.max_row_blocks * self.block_entries
        rows = self.num_layers * self.kv_heads
        blocks = self.max_row_blocks
        sizes = CommitSizes(rows, moving, moving, blocks, blocks, SHARED_BYTES[self.sm])
        return plan_commit(self.block, sizes, num_multiprocessors)


def commit_fields(
    base: PluginFields, num_layers: int, max_row_blocks: int, gate: float | None, compile_cubin: CompileCubin
) -> CommitFields:
    """Attributes of the plugin, its kernel compiled. Raises UnsupportedShapeError and compile errors."""
    kernel = check_commit(base)
    return CommitFields.extend(
        base,
        num_layers=num_layers,
        max_row_blocks=max_row_blocks,
        gate=NO_GATE if gate is None else gate,
        commit_cubin=compile_cubin(kernel, base.sm),
    )


def check_commit(base: PluginFields) -> Kernel:
    """The kernel of commits. Raises UnsupportedShapeError for blocks that do not fit it or its shared memory."""
    kernel = commit_kernel(base.page, base.block, base.element_type)
    smallest = CommitSizes(1, 1, 1, 1, 1, SHARED_BYTES[base.sm])
    plan_commit(base.block, smallest, num_multiprocessors=1)
    return kernel


class CommitPlugin(TrtPlugin[CommitFields]):
    """See `plugins.commit.publish` for what it computes."""

    spec = SPEC
    fields_type = CommitFields

    def cubins(self) -> Mapping[Kernel, bytes]:
        return {self.fields.kernel: self.fields.commit_cubin}

    def workspace_bytes(self, size: Mapping[str, int]) -> int:
        # No card has a multiprocessor per row of more; the grid is never larger than that.
        return self.fields.plan(size["staged"], num_multiprocessors=size["kv_rows"]).workspace_bytes

    def launch(self, call: Call) -> None:
        size, fields = call.size, self.fields
        pointers = {tensor.name: call.address[tensor.name] for tensor in SPEC.inputs if tensor.name != "pages"}
        params = CudaCommitParams(
            **pointers, workspace=call.workspace, num_staged=size["staged"], num_moves=size["moves"],
            num_rows=size["kv_rows"], kv_heads=fields.kv_heads, num_slots=size["pages"] * fields.page_tokens,
            num_blocks=size["blocks"], absorb=int(fields.gate >= 0), gate=max(fields.gate, 0.0),
        )  # fmt: skip
        plan = fields.plan(size["staged"], call.runner.num_multiprocessors)
        launch_commit(call.runner, fields.kernel, plan, params, call.stream)

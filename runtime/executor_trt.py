"""The device half on TensorRT: one execution of the engine per step, over the same arenas as every other executor.

    down: the step's tables in one copy (block tables in a second one, only after a commit)
    run:  the engine on its own stream; decode steps replay a captured graph, so that no Python runs per layer
    up:   the sampled tokens in one copy

Commits, lines and probes' scores work on the arenas directly, through `PagedExecutor`. A probe is one execution too, so
it can give way before it starts and no more after that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from plugins.staging import TableStaging
from runtime.config import EngineLimits, ModelSpec
from runtime.engine_interface import WORD_BYTES, EngineInterface
from runtime.errors import ConfigError
from runtime.kv_storage import KvStorage
from runtime.paged_executor import CommitForms, PagedExecutor
from runtime.step_tables import StepRows
from runtime.table_checks import check_aligned
from runtime.trt_engine import StepBindings, bound_shape
from runtime.trt_tables import StepPacker


class StepEngine(Protocol):
    """What the executor asks of `runtime.trt_engine.TrtEngine`."""

    def run(self, bindings: StepBindings, replay: bool) -> torch.Tensor:
        """Logits [N, W] fp32 of one step. replay: a decode step, whose shape comes again."""
        ...


@dataclass(frozen=True, eq=False)
class TrtParts:
    """What makes an executor a TensorRT one.   block_format: of the blocks its engine reads."""

    engine: StepEngine
    interface: EngineInterface
    packer: StepPacker
    block_format: str


class TrtExecutor(PagedExecutor):
    """`runtime.step.Executor` over a TensorRT engine in its plugin form."""

    def __init__(
        self, spec: ModelSpec, limits: EngineLimits, storage: KvStorage, commit_forms: CommitForms, parts: TrtParts
    ) -> None:
        """Raises ConfigError or TableError where the arenas are no memory that the engine can take."""
        staging = TableStaging(storage.device)
        super().__init__(spec, limits, storage, commit_forms, staging)
        self._engine, self._packer, self._step_staging = parts.engine, parts.packer, staging
        self._block_staging = TableStaging(storage.device)
        arenas = arena_tensors(storage, parts.block_format)
        self._arena_sizes = check_arenas(parts.interface, arenas)
        self._arena_addresses = {name: arena.data_ptr() for name, arena in arenas.items()}
        self._uploaded: Mapping[str, torch.Tensor] | None = None  # block tables, on the host
        self._block_views: dict[str, torch.Tensor] = {}  # the same on the device

    def _forward(
        self, sequences: list[StepRows], logit_rows: array[int], interrupted: Callable[[], bool] | None
    ) -> torch.Tensor | None:
        if interrupted is not None and interrupted():
            return None
        for rows in sequences:
            self._checks.rows(rows)
        packed = self._packer.pack(sequences, logit_rows)
        views = _upload(self._step_staging, packed.step)
        if packed.blocks is not self._uploaded:
            self._block_views = _upload(self._block_staging, packed.blocks)
            self._uploaded = packed.blocks
        addresses = {name: view.data_ptr() for name, view in (*views.items(), *self._block_views.items())}
        bindings = StepBindings({**addresses, **self._arena_addresses}, {**packed.sizes, **self._arena_sizes})
        return self._engine.run(bindings, packed.decodes)[: packed.num_logits]


def _upload(staging: TableStaging, tables: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tables on the device, in one copy."""
    staging.begin()
    views = {name: staging.put(table) for name, table in tables.items()}
    staging.flush()
    return views


def arena_tensors(storage: KvStorage, block_format: str) -> dict[str, torch.Tensor]:
    """The arenas by input name; blocks as 32-bit words, since TensorRT's layers take no bytes."""
    blocks = storage.blocks(block_format)
    pages = {f"pages_{i}": arena for i, arena in enumerate(storage.pages)}
    seen = {f"seen_{i}": arena for i, arena in enumerate(storage.seen)}
    assert blocks.raw.shape[1] % WORD_BYTES == 0
    return {**pages, **seen, "blocks": blocks.raw.view(torch.int32), "score": blocks.score}


def check_arenas(interface: EngineInterface, arenas: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """What the interface's letters for arenas stand for.

    Raises ConfigError for an arena of another shape than the engine's or outside its range, TableError for one that
    bulk copies cannot read.
    """
    sizes: dict[str, int] = {}
    for binding in interface.inputs:
        if binding.name not in arenas:
            continue
        arena = arenas[binding.name]
        for size, got in zip(binding.shape, arena.shape, strict=True):
            if isinstance(size, str):
                sizes.setdefault(size, got)
        dims = {name: interface.dim(name) for name in sizes}
        for name, dim in dims.items():
            if not dim.least <= sizes[name] <= dim.most:
                raise ConfigError(
                    f"kv_memory_bytes: gives {sizes[name]:,} {name}, expected {dim.least:,} to {dim.most:,}, which the "
                    f"engine can count; choose another kv_memory_bytes"
                )
        if tuple(arena.shape) != bound_shape(binding, sizes):
            raise ConfigError(
                f"{binding.name}: got an arena of {list(arena.shape)}, expected {list(bound_shape(binding, sizes))} as "
                f"the engine was built; load the limits from its own manifest"
            )
        assert arena.is_contiguous(), binding.name
        check_aligned(binding.name, arena.data_ptr())
    return sizes

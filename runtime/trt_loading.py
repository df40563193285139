"""From an engine directory of target trt to its executor. What can be wrong is said before memory is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

import torch

from plugins.attend.params import StepTables
from plugins.attend.tile_words import StepKernels, TileWords
from plugins.attend.tiles import split_rows
from plugins.commit.cuda import SHARED_BYTES, CudaPublish
from plugins.commit.line import draw_line
from plugins.errors import KernelError
from plugins.kv_tiles import KvShape
from plugins.layout import ELEMENT_BYTES, BlockLayout, Element, PageLayout
from plugins.trt_operations import CudaRunners, Plugins, register
from plugins.trt_plugin import TensorRT
from runtime.config import EngineLimits, ModelSpec
from runtime.engine_interface import EngineInterface, StepLimits, make_interface
from runtime.errors import DeviceError, ManifestError
from runtime.executor_trt import TrtExecutor, TrtParts
from runtime.gpu import GpuKernels, check_room
from runtime.gpu_facts import read_gpu
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.manifest import REBUILD, Manifest, TrtFacts
from runtime.paged_executor import CommitForms
from runtime.trt_engine import TrtEngine, TrtModule, check_sm, import_tensorrt
from runtime.trt_tables import StepPacker


def trt_executor(plan_file: Path, manifest: Manifest, manager: KvManager, kernels: GpuKernels) -> TrtExecutor:
    """Loads the plan on the GPU that `kernels` run on.

    Raises DeviceError (no TensorRT, another GPU), ManifestError (a plan of other limits) or ConfigError (no room).
    """
    facts = check_facts(manifest)
    module, card = import_tensorrt(), read_gpu(kernels.runner.device.index or 0)
    check_sm(facts.sm, card.sm, card.name)
    spec, limits = manifest.model, manifest.limits
    interface = make_interface(spec, limits, facts.step)
    check_room(plan_file.stat().st_size + storage_bytes(manager, facts.step.block_format), kernels.runner.device)
    plugins = _register(module, kernels.runner.device)
    engine = TrtEngine(module, plan_file.read_bytes(), interface, kernels.runner.device, plugins)
    storage = KvStorage(spec, limits, manager.num_pages, manager.num_blocks, ArenaPlace(kernels.runner.device))
    parts = TrtParts(
        engine, interface, make_packer(spec, limits, facts.step, interface, kernels), facts.step.block_format
    )
    forms = CommitForms(draw_line, CudaPublish(kernels.runner, SHARED_BYTES[kernels.sm]))
    return TrtExecutor(spec, limits, storage, forms, parts)


def check_facts(manifest: Manifest) -> TrtFacts:
    """The manifest's record of TensorRT. Raises ManifestError for a plan without our kernels."""
    facts = manifest.trt
    if facts is None or facts.form != "plugin":
        raise ManifestError(
            f"engine: its operations are in {facts.form if facts else 'no'} form, expected plugin, whose arenas are "
            f"edited in place; {REBUILD} and --target trt"
        )
    return facts


def storage_bytes(manager: KvManager, block_format: str) -> int:
    """Bytes of the page arenas and of the one block arena."""
    blocks = manager.num_blocks[block_format] * manager.block_layouts[block_format].stored_bytes
    return manager.num_pages * manager.page_layout.page_bytes + blocks


def step_kernels(spec: ModelSpec, limits: EngineLimits, step: StepLimits, sm: str) -> StepKernels:
    """The attention kernels that the plan's plugins launch: tile lists are laid out for them."""
    page = PageLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, limits.page_tokens, ELEMENT_BYTES)
    element: Element = "fp16" if limits.kv_dtype == "fp16" else "bf16"
    block = BlockLayout(step.block_format, limits.block_entries, spec.head_dim)
    return StepKernels.of(KvShape(page, block, element, spec.group_size), sm)


def make_packer(
    spec: ModelSpec, limits: EngineLimits, step: StepLimits, interface: EngineInterface, kernels: GpuKernels
) -> StepPacker:
    """Packs steps for the engine, tile lists for as many multiprocessors as the GPU has."""
    attend = step_kernels(spec, limits, step, kernels.sm)
    words = TileWords(attend.all, spec.num_kv_heads, kernels.runner.num_multiprocessors)

    def tiles(tables: StepTables) -> torch.Tensor:
        return words.pack(tables, split_rows(tables, spec.group_size))

    return StepPacker(spec, interface, step.block_format, tiles)


class PluginModule(TensorRT, Protocol):
    """What registration uses besides."""

    def get_plugin_registry(self) -> Any: ...


def _register(module: TrtModule, device: torch.device) -> Plugins:
    """Raises DeviceError where this process has a TensorRT engine already."""
    named = cast(PluginModule, module)
    try:
        return register(named, named.get_plugin_registry(), CudaRunners(device))
    except KernelError as error:
        raise DeviceError(f"engine: {error}; a process runs one TensorRT engine") from error

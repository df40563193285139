"""Builds a TensorRT engine: limits checked, the network lowered, one optimization profile, and the plan as a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from builder.engine_writer import ContentWriter, read_weight, write_file
from builder.lower_torch import TORCH_DTYPE
from builder.lower_trt import EngineShape, PluginInsert, build_network
from builder.model import weight_recipes
from builder.trt_api import Builder, TrtModule
from builder.weights.checkpoint import Checkpoint
from plugins.layout import QUANTIZED, BlockFormat
from runtime.config import EngineLimits, ModelSpec
from runtime.engine_interface import MAX_ELEMENTS, EngineInterface, StepLimits
from runtime.errors import BuildError, ConfigError
from runtime.manifest import PLAN_FILE, EngineFile, TrtFacts
from runtime.memory_plan import block_layout
from runtime.policy.registry import get_policy

if TYPE_CHECKING:
    import tensorrt as trt

GPU_DTYPES = ("fp16", "bf16")


def check_limits(limits: EngineLimits) -> None:
    """Raises ConfigError for what no GPU form runs."""
    if limits.dtype not in GPU_DTYPES:
        raise ConfigError(
            f"dtype: got {limits.dtype}, expected {' or '.join(GPU_DTYPES)} on a GPU; pass --dtype bf16 or fp16"
        )
    if limits.kv_dtype != limits.dtype:
        raise ConfigError(
            f"kv_dtype: got {limits.kv_dtype} with dtype {limits.dtype}, expected the same on a GPU; "
            f"leave --kv-dtype out"
        )
    if limits.weight_dtype != "same":
        raise ConfigError(
            f"weight_dtype: got {limits.weight_dtype}, expected same: engines for a GPU keep weights in "
            f"{limits.dtype}; leave --weight-dtype out"
        )


def native_shape(spec: ModelSpec, limits: EngineLimits, max_step_tokens: int) -> EngineShape:
    """Of the native form, which reads no tiles.

    Raises ConfigError where a table, an arena or the form's logits would be too large to count.
    """
    shape = EngineShape(spec, limits, StepLimits(max_step_tokens, block_format_of(spec, limits), max_tile_words=1))
    _check_native_logits(spec, limits, shape.interface)
    return shape


def block_format_of(spec: ModelSpec, limits: EngineLimits) -> BlockFormat:
    """All blocks of an engine have the format of its policy. Raises ConfigError for one that no network reads."""
    layout = block_layout(spec, limits, get_policy(limits.policy).block_format)
    if layout.mixed:
        raise ConfigError(
            f"policy: {limits.policy} keeps {layout.format} blocks, whose keys have two widths, expected a policy with "
            f"blocks of one width ({', '.join(QUANTIZED)}); choose another, or build with --target cpu"
        )
    return layout.format


def _check_native_logits(spec: ModelSpec, limits: EngineLimits, interface: EngineInterface) -> None:
    """Its logits are whole tensors: rows of all query heads x everything listed."""
    rows, pages, blocks = (interface.dim(name).most for name in ("R", "P", "B"))
    for what, count in (
        ("page tokens", rows * spec.num_q_heads * pages * limits.page_tokens),
        ("block entries", rows * spec.num_q_heads * blocks * limits.block_entries),
    ):
        if count > MAX_ELEMENTS:
            raise ConfigError(
                f"limits: the native form takes {count:,} numbers for rows by {what}, expected at most "
                f"{MAX_ELEMENTS:,}; lower --max-step-tokens ({rows}), --max-batch-size ({limits.max_batch_size}) or "
                f"--max-seq-len ({limits.max_seq_len})"
            )


def trt_facts(builder: Builder, shape: EngineShape) -> TrtFacts:
    """What the manifest says of the engine."""
    return TrtFacts(
        sm=builder.sm,
        package=builder.package.module,
        version=builder.version,
        form="plugin" if builder.package.target == "trt" else "native",
        step=shape.step,
        interface_sha256=shape.interface.sha256(),
    )


def plan_writer(
    builder: Builder, shape: EngineShape, checkpoint: Checkpoint, make_insert: Callable[[], PluginInsert] | None = None
) -> ContentWriter:
    """make_insert: of what puts in the plugins, called when the plan is built; None builds the native form."""

    def write(directory: Path) -> EngineFile:
        insert = None if make_insert is None else make_insert()
        plan = build_plan(builder, shape, read_weights(checkpoint, shape.limits), insert)
        return write_file(directory / PLAN_FILE, memoryview(plan))

    return write


def read_weights(checkpoint: Checkpoint, limits: EngineLimits) -> dict[str, torch.Tensor]:
    """Engine weights by name, in the types the network takes; CheckpointError for what is not finite."""
    return {
        recipe.name: read_weight(
            recipe, checkpoint.tensors, torch.float32 if recipe.is_norm else TORCH_DTYPE[limits.dtype]
        )
        for recipe in weight_recipes(checkpoint.spec)
    }


def _make_log(api: TrtModule) -> tuple[trt.ILogger, list[str]]:
    """A logger and the errors it heard. Warnings (unread inputs, mostly) are dropped."""
    errors: list[str] = []
    serious = (api.ILogger.Severity.INTERNAL_ERROR, api.ILogger.Severity.ERROR)

    class Log(api.ILogger):  # type: ignore[name-defined, misc, unused-ignore]  # the class is known at run time only
        def __init__(self) -> None:
            api.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            if severity in serious:
                errors.append(msg)

    return Log(), errors


def build_plan(
    builder: Builder, shape: EngineShape, weights: Mapping[str, torch.Tensor], insert: PluginInsert | None = None
) -> trt.IHostMemory:
    """The serialized engine. Raises BuildError with what TensorRT said."""
    api = builder.api
    log, errors = _make_log(api)
    trt_builder = api.Builder(log)
    network = trt_builder.create_network(1 << int(api.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    layers = build_network(api, network, shape, weights, insert)
    config = trt_builder.create_builder_config()
    config.clear_flag(api.BuilderFlag.TF32)  # fp32 products are the oracle's
    builder.set_target(config)
    profile = trt_builder.create_optimization_profile()
    interface = shape.interface
    for binding in interface.inputs:
        profile.set_shape(binding.name, *interface.profile(binding))
    config.add_optimization_profile(profile)
    plan = trt_builder.build_serialized_network(network, config)
    layers.release()
    if plan is None:
        said = " ".join(errors) or "it gave no reason"
        raise BuildError(f"{builder.package.module} {builder.version} for SM {builder.sm}: built no engine: {said}")
    return plan

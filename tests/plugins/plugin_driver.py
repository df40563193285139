"""Calls TensorRT plugin objects as TensorRT does: shapes as descriptions, memory as addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from plugins.append.plugin import append_fields
from plugins.attend.plugin import attend_fields
from plugins.commit.plugin import commit_fields
from plugins.emulation.runner import EmulatedRunner
from plugins.kernel import Kernel
from plugins.score.plugin import score_fields
from plugins.trt_fields import PluginFields
from plugins.trt_operations import BODIES, Plugins, make_creators
from plugins.trt_plugin import PluginTensor, TensorRT, TrtPlugin

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
BASE = PluginFields("sm_90a", "fp16", "int4", q_heads=6, kv_heads=2, head_dim=64, page_tokens=8, block_entries=16)
CUBIN = b"\x7fELF\x00\xff\x80\x00\x00"  # every byte must come back, zeros at the end included
NUM_LAYERS = 3
OPERATIONS = tuple(BODIES)
GUARD = 64  # bytes behind the workspace that must stay as they are


def no_compiler(kernel: Kernel, sm: str) -> bytes:
    """Fields are about bytes; tests/builder compiles real kernels."""
    return CUBIN + kernel.op.encode() + sm.encode()


def fields_of(operation: str, base: PluginFields = BASE) -> PluginFields:
    scale = base.head_dim**-0.5
    return {
        "append": lambda: append_fields(base, no_compiler),
        "attend": lambda: replace(attend_fields(base, NUM_LAYERS, scale, no_compiler), layer=1),
        "score": lambda: replace(score_fields(base, NUM_LAYERS, scale, no_compiler), layer=1),
        "commit": lambda: commit_fields(base, 2, 5, 0.35, no_compiler),
    }[operation]()


def sizes_of(fields: PluginFields) -> dict[str, int]:
    """Some size for every name in the tables of tensors."""
    steps = {"R": 7, "S": 3, "S+1": 4, "S*G+1": 3 * fields.kv_heads + 1, "P": 9, "B": 11, "X": 1 << 16, "pages": 20,
             "blocks": 30, "staged": 12, "old": 5, "new": 4, "moves": 2}  # fmt: skip
    return {**steps, **fields.sizes()}


def shapes_of(plugin: Any) -> dict[str, tuple[int, ...]]:
    sizes = sizes_of(plugin.fields)
    return {tensor.name: tuple(sizes[name] for name in tensor.dims) for tensor in plugin.spec.tensors}


def make_plugins(module: TensorRT, runner: EmulatedRunner | None = None) -> Plugins:
    """Creators whose plugins launch on the emulation."""
    return make_creators(module, lambda sm, cubins: runner or EmulatedRunner())


def names_of(plugins: Plugins) -> dict[str, Any]:
    """Members of the module's enumerations, by the names that plugin tables use."""
    types = plugins.setup.trt.DataType
    return {
        "fp32": types.FLOAT, "fp16": types.HALF, "bf16": types.BF16, "int32": types.INT32, "int64": types.INT64,
        "bool": types.BOOL,
    }  # fmt: skip


def loaded(plugins: Plugins, operation: str, fields: PluginFields) -> TrtPlugin[Any]:
    """A plugin as an execution context has it: built, serialized, created again from its fields, attached."""
    creator = plugins.creators[operation]
    stored = creator.make(fields).get_fields_to_serialize()
    runtime = plugins.setup.trt.TensorRTPhase.RUNTIME
    plugin = creator.create_plugin("layer", stored, runtime)  # type: ignore[arg-type, unused-ignore]
    return plugin.attach_to_context(None)  # type: ignore[no-any-return, arg-type, unused-ignore]


def kind_of(tensor: PluginTensor, fields: PluginFields) -> str:
    return fields.element if tensor.kind == "element" else tensor.kind


def desc(module: TensorRT, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A PluginTensorDesc, linear."""
    made: Any = module.PluginTensorDesc()  # type: ignore[attr-defined]
    made.dims, made.type, made.format = shape, dtype, module.TensorFormat.LINEAR
    return made


def dynamic_desc(module: TensorRT, dtype: Any, least: tuple[int, ...], most: tuple[int, ...]) -> Any:
    """A DynamicPluginTensorDesc."""
    made: Any = module.DynamicPluginTensorDesc()  # type: ignore[attr-defined]
    made.desc, made.min, made.max = desc(module, dtype, most), least, most
    return made


def describe(plugins: Plugins, plugin: TrtPlugin[Any], shapes: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Descriptions of all inputs."""
    types = names_of(plugins)
    return [
        desc(plugins.setup.trt, types[kind_of(tensor, plugin.fields)], shapes[tensor.name])
        for tensor in plugin.spec.inputs
    ]


def run(plugins: Plugins, plugin: TrtPlugin[Any], inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One `enqueue` on CPU memory; gives the outputs that are no alias. Arenas change in place.

    The workspace is what the plugin asked for, filled with NaN, and nothing behind it may change.
    """
    spec, shapes = plugin.spec, {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    for tensor in spec.inputs:
        given = inputs[tensor.name]
        assert given.is_contiguous() and given.dtype == DTYPES[kind_of(tensor, plugin.fields)], tensor.name
    descs = describe(plugins, plugin, shapes)
    plugin.on_shape_change(descs, [])
    outputs = {
        tensor.name: torch.full([plugin.size[name] for name in tensor.dims], torch.nan, dtype=DTYPES[kind])
        for tensor in spec.outputs
        if tensor.alias is None and (kind := kind_of(tensor, plugin.fields))
    }
    num_bytes = plugin.get_workspace_size([_at_most(plugins, one) for one in descs], [])
    workspace = torch.full((num_bytes + GUARD,), 255, dtype=torch.uint8)
    addresses = [inputs[tensor.name].data_ptr() for tensor in spec.inputs]
    targets = [(inputs[t.alias] if t.alias else outputs[t.name]).data_ptr() for t in spec.outputs]
    plugin.enqueue(descs, [], addresses, targets, workspace.data_ptr(), 0)
    assert bool((workspace[num_bytes:] == 255).all()), "wrote behind the workspace"
    return outputs


def _at_most(plugins: Plugins, given: Any) -> Any:
    return dynamic_desc(plugins.setup.trt, given.type, tuple(given.dims), tuple(given.dims))

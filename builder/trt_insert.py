"""Puts our plugins into a TensorRT network: two forms of `builder.lower_trt.PluginInsert`.

`RegistryInsert` is TensorRT's own way, `add_plugin_v3`. `ParserInsert` is for TensorRT-RTX, whose network has no such
call, but whose ONNX parser takes plugin nodes: one small graph with all of them, fed by constants, is parsed into the
still empty network, and a call only connects a node that waits there. That has a real builder check the plugins (types,
shapes, profiles, fields, aliases); it makes no engine to ship, since TensorRT-RTX says that it supports no plugins.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from builder.lower_trt import EngineShape, Operation
from builder.onnx_nodes import BFLOAT16, BOOL, FLOAT, FLOAT16, INT32, INT64, Constant, Node, encode_model
from plugins.append.plugin import append_fields
from plugins.attend.plugin import attend_fields, kv_shape
from plugins.attend.tile_words import StepKernels, most_step_words
from plugins.commit.plugin import check_commit
from plugins.compile import compile_cubin
from plugins.errors import KernelError, UnsupportedShapeError, UnsupportedSmError
from plugins.layout import BlockFormat
from plugins.trt_fields import CompileCubin, PluginFields
from plugins.trt_operations import BODIES, Plugins, register
from plugins.trt_plugin import NAMESPACE, VERSION, PluginTensor, TensorRT
from runtime.config import EngineLimits, ModelSpec
from runtime.engine_interface import StepLimits
from runtime.errors import BuildError, ConfigError

if TYPE_CHECKING:
    import tensorrt as trt

CUBIN_SMS = {80: "sm_80", 89: "sm_89", 90: "sm_90a", 120: "sm_120"}
ONNX_TYPES = {"fp16": FLOAT16, "bf16": BFLOAT16, "fp32": FLOAT, "int32": INT32, "int64": INT64, "bool": BOOL}

FieldsOf = Callable[[Operation, int], PluginFields]


class ParserModule(TensorRT, Protocol):
    """What `ParserInsert` uses besides."""

    OnnxParser: type[trt.OnnxParser]


class RegistryModule(TensorRT, Protocol):
    """What `plugin_insert` uses besides."""

    def get_plugin_registry(self) -> trt.IPluginRegistry: ...


def plugin_step(
    spec: ModelSpec, limits: EngineLimits, max_step_tokens: int, block_format: BlockFormat, sm: int
) -> StepLimits:
    """Step limits of the plugin form, with room for the tile lists of every step. Raises ConfigError."""
    shape = EngineShape(spec, limits, StepLimits(max_step_tokens, block_format, max_tile_words=1))
    with _as_builder_errors():
        fields = base_fields(shape, sm)
        check_commit(fields)  # which is no part of the plan, but of every engine
        kernels = StepKernels.of(kv_shape(fields), fields.sm)
        words = most_step_words(kernels, spec.num_kv_heads, limits.max_batch_size, max_step_tokens)
    return dataclasses.replace(shape.step, max_tile_words=words)


def plugin_insert(module: RegistryModule, shape: EngineShape, sm: int) -> RegistryInsert:
    """Registers the plugins with TensorRT and compiles their kernels: `build_plan`'s `insert` for --target trt.

    sm: 10 * major + minor. Raises ConfigError for what no kernel covers, BuildError where kernels do not compile or
    plugins are registered already.
    """
    with _as_builder_errors():
        fields_of = step_fields(shape, sm, compile_cubin)
        plugins = register(module, module.get_plugin_registry())
    return RegistryInsert(plugins, fields_of)


@contextlib.contextmanager
def _as_builder_errors() -> Iterator[None]:
    try:
        yield
    except (UnsupportedSmError, UnsupportedShapeError) as error:
        raise ConfigError(f"target trt: {error}") from error
    except KernelError as error:
        raise BuildError(f"target trt: {error}") from error


def base_fields(shape: EngineShape, sm: int) -> PluginFields:
    """Attributes that all plugins of an engine share. Raises UnsupportedSmError, UnsupportedShapeError."""
    spec, limits = shape.spec, shape.limits
    if sm not in CUBIN_SMS:
        known = ", ".join(map(str, CUBIN_SMS))
        raise UnsupportedSmError(f"sm: got {sm}, expected one of {known}; use --target trt-rtx on other GPUs")
    if limits.dtype != limits.kv_dtype:
        raise UnsupportedShapeError(
            f"kv_dtype: got {limits.kv_dtype} with dtype {limits.dtype}, expected the same: kernels have one type; "
            f"pass --kv-dtype {limits.dtype} or build with --target trt-rtx"
        )
    return PluginFields(
        sm=CUBIN_SMS[sm], element=limits.dtype, block_format=shape.step.block_format, q_heads=spec.num_q_heads,
        kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, page_tokens=limits.page_tokens,
        block_entries=limits.block_entries,
    )  # fmt: skip


def step_fields(shape: EngineShape, sm: int, compiler: CompileCubin) -> FieldsOf:
    """Attributes of every plugin of the step network; kernels are compiled here, once."""
    base, num_layers = base_fields(shape, sm), shape.spec.num_layers
    append = append_fields(base, compiler)
    attend = attend_fields(base, num_layers, shape.geometry.scale, compiler)

    def fields_of(operation: Operation, layer: int) -> PluginFields:
        return append if operation == "append" else dataclasses.replace(attend, layer=layer)

    return fields_of


class RegistryInsert:
    """Through `add_plugin_v3`."""

    def __init__(self, plugins: Plugins, fields_of: FieldsOf) -> None:
        self._plugins, self._fields_of = plugins, fields_of

    def __call__(
        self, network: trt.INetworkDefinition, operation: Operation, layer: int, inputs: Sequence[trt.ITensor]
    ) -> Sequence[trt.ITensor]:
        plugin: Any = self._plugins.creators[operation].make(self._fields_of(operation, layer))
        added = network.add_plugin_v3(list(inputs), [], plugin)
        if added is None:
            raise BuildError(f"{operation}_{layer}: TensorRT refused the plugin; its reason is in the log above")
        added.name = f"{operation}_{layer}"
        return [added.get_output(index) for index in range(added.num_outputs)]


class ParserInsert:
    """Through TensorRT-RTX's ONNX parser, see the module's text. Keep it until the engine is built."""

    def __init__(
        self,
        module: ParserModule,
        network: trt.INetworkDefinition,
        logger: trt.ILogger,
        nodes: Mapping[tuple[str, int], PluginFields],
    ) -> None:
        """nodes: every (operation, layer) that will be asked for. The network must be empty, creators registered.

        Raises BuildError where the parser refuses.
        """
        model = encode_model([_node(operation, layer, fields) for (operation, layer), fields in nodes.items()])
        self._parser = module.OnnxParser(network, logger)
        if not self._parser.parse(model):
            parser: Any = self._parser  # the bindings' signature of get_error cannot be read
            errors = [str(parser.get_error(index).desc()) for index in range(parser.num_errors)]
            raise BuildError(f"TensorRT-RTX's parser refused the plugins: {'; '.join(errors)}")
        found = [network.get_layer(index) for index in range(network.num_layers)]
        self._layers = {layer.name: layer for layer in found}

    def __call__(
        self, network: trt.INetworkDefinition, operation: str, layer: int, inputs: Sequence[trt.ITensor]
    ) -> Sequence[trt.ITensor]:
        node = self._layers[f"{operation}_{layer}"]
        for index, tensor in enumerate(inputs):
            node.set_input(index, tensor)
        return [node.get_output(index) for index in range(node.num_outputs)]


def _node(operation: str, layer: int, fields: PluginFields) -> Node:
    spec = BODIES[operation].spec
    attributes = {item.name: getattr(fields, item.name) for item in dataclasses.fields(fields)}
    return Node(
        op_type=spec.name,
        name=f"{operation}_{layer}",
        inputs=tuple(_constant(tensor, fields) for tensor in spec.inputs),
        num_outputs=len(spec.outputs),
        attributes={**attributes, "plugin_version": VERSION, "plugin_namespace": NAMESPACE},
    )


def _constant(tensor: PluginTensor, fields: PluginFields) -> Constant:
    """Zeros in place of an input, 1 wherever a step decides the size."""
    kind = fields.element if tensor.kind == "element" else tensor.kind
    return Constant(ONNX_TYPES[kind], tuple(fields.sizes().get(name, 1) for name in tensor.dims))

"""The TensorRT lowering: the model definition as a strongly typed network with the inputs and outputs of
`runtime.engine_interface` (the one table of them).

Two forms share everything but the operations on the KV arenas:
    plugin   `PluginForm`: one layer per operation, put in by a `PluginInsert`; arenas are edited in place
    native   `builder.network_ops.NativeForm`: plain layers; changed arenas are outputs of their own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from builder.layers import Layers
from builder.model import DecoderModel
from builder.native_tables import Geometry
from builder.network_ops import KvForm, NativeForm, NetworkOps, Rotary
from builder.trt_api import TrtModule
from builder.trt_layers import TrtLayers
from plugins.layout import BlockLayout
from runtime.config import EngineLimits, ModelSpec
from runtime.engine_interface import Binding, EngineInterface, StepLimits, make_interface

if TYPE_CHECKING:
    import tensorrt as trt

T = TypeVar("T")

Operation = Literal["append", "attend"]

APPEND_INPUTS = ("q", "k", "v", "cos", "sin", "slots", "pages", "seen")
APPEND_OUTPUTS = ("q", "pages", "seen")
ATTEND_TABLES = (
    "row_starts", "page_starts", "page_ids", "page_lens", "record", "record_skip",
    "block_starts", "block_ids", "block_lens", "tiles",
)  # fmt: skip
ATTEND_INPUTS = ("q", *ATTEND_TABLES, "pages", "seen", "blocks", "score")
ATTEND_OUTPUTS = ("out", "seen", "score")


class PluginInsert(Protocol):
    """Puts the plugin of one operation into the network.

    append: APPEND_INPUTS -> APPEND_OUTPUTS.   q [R, Q, D], k, v [R, G, D] dtype, not rotated; cos, sin [R, D / 2] fp32;
        slots; the layer's pages and seen.   Gives the rotated q; pages and seen are the inputs' memory.
    attend: ATTEND_INPUTS -> ATTEND_OUTPUTS.   q as rotated; tables of ALL layers as in `runtime.engine_interface`; the
        layer's pages and seen as `append` gave them; blocks, and score as the layer before gave it.
        Gives out [R, Q, D] dtype; seen and score are the inputs' memory.
    """

    def __call__(
        self, network: trt.INetworkDefinition, operation: Operation, layer: int, inputs: Sequence[trt.ITensor]
    ) -> Sequence[trt.ITensor]: ...


@dataclass(frozen=True)
class EngineShape:
    """What an engine is built from, weights apart."""

    spec: ModelSpec
    limits: EngineLimits
    step: StepLimits

    @property
    def interface(self) -> EngineInterface:
        return make_interface(self.spec, self.limits, self.step)

    @property
    def geometry(self) -> Geometry:
        spec, limits = self.spec, self.limits
        layout = BlockLayout(self.step.block_format, limits.block_entries, spec.head_dim)
        return Geometry(
            spec.num_kv_heads, spec.group_size, spec.head_dim, limits.page_tokens, layout, spec.head_dim**-0.5
        )


class PluginForm:
    """`KvForm` of plugin layers."""

    def __init__(
        self, network: trt.INetworkDefinition, insert: PluginInsert, inputs: Mapping[str, trt.ITensor]
    ) -> None:
        self._network, self._insert = network, insert
        self._tensors = dict(inputs)

    def append(
        self, layer: int, qkv: tuple[trt.ITensor, trt.ITensor, trt.ITensor], rotary: Rotary[trt.ITensor]
    ) -> trt.ITensor:
        names = [f"pages_{layer}", f"seen_{layer}"]
        inputs = [*qkv, *rotary, self._tensors["slots"], *(self._tensors[name] for name in names)]
        q, pages, seen = self._insert(self._network, "append", layer, inputs)
        self._tensors |= zip(names, (pages, seen), strict=True)
        return q

    def attend(self, layer: int, q: trt.ITensor) -> trt.ITensor:
        pages, seen = f"pages_{layer}", f"seen_{layer}"
        names = (*ATTEND_TABLES, pages, seen, "blocks", "score")
        inputs = [q, *(self._tensors[name] for name in names)]
        out, self._tensors[seen], self._tensors["score"] = self._insert(self._network, "attend", layer, inputs)
        return out

    def arenas(self) -> Mapping[str, trt.ITensor]:
        return {f"{name}_out": tensor for name, tensor in self._tensors.items()}


def build_network(
    api: TrtModule,
    network: trt.INetworkDefinition,
    shape: EngineShape,
    weights: Mapping[str, torch.Tensor],
    insert: PluginInsert | None = None,
) -> TrtLayers:
    """Fills an empty network; insert: of the plugin form, None for the native one.

    The result keeps the weights' memory: it must live until the engine is built.
    """
    layers = TrtLayers(api, network, shape.limits.dtype, shape.limits.kv_dtype)
    interface = shape.interface
    inputs = {binding.name: _add_input(api, network, interface, binding) for binding in interface.inputs}
    kv: KvForm[trt.ITensor]
    kv = NativeForm(layers, shape.geometry, inputs) if insert is None else PluginForm(network, insert, inputs)
    found = run_decoder(layers, shape.spec, weights, inputs, kv)
    for binding in interface.outputs:
        tensor = found[binding.name]
        tensor.name = binding.name
        network.mark_output(tensor)
    return layers


def run_decoder(
    layers: Layers[T], spec: ModelSpec, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, T], kv: KvForm[T]
) -> dict[str, T]:
    """One step: every output of `runtime.engine_interface`, by name."""
    logits = DecoderModel(spec).run(NetworkOps(layers, spec, weights, inputs, kv))
    assert logits is not None, "nothing interrupts it"
    return {"logits": logits, **kv.arenas()}


def _add_input(
    api: TrtModule, network: trt.INetworkDefinition, interface: EngineInterface, binding: Binding
) -> trt.ITensor:
    types = api.DataType
    dtypes = {
        "int32": types.INT32, "bool": types.BOOL, "fp16": types.HALF, "bf16": types.BF16, "fp32": types.FLOAT,
    }  # fmt: skip
    tensor = network.add_input(binding.name, dtypes[binding.dtype], interface.network_shape(binding))
    for axis, size in enumerate(binding.shape):
        if isinstance(size, str):
            tensor.set_dimension_name(axis, size)
    return tensor

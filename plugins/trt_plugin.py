"""What the TensorRT plugins share. Needs no TensorRT to import: its module is passed in, `tensorrt` or `tensorrt_rtx`.

An operation describes its tensors as data (`PluginSpec`) and says how to launch (`launch`); everything TensorRT asks
for follows from that: types, symbolic shapes, formats, aliases, checks, serialization. `bind` makes the class that
TensorRT sees, `PluginCreator` builds instances from fields.

In place: an output with `alias` is the input of that name, written to. TensorRT may copy instead, so `enqueue` compares
the two addresses and raises. While an engine is built nothing is launched: the builder may time a plugin on memory
that holds no tables. Creators keep every plugin alive that TensorRT asks for, clones included: the builder frees them
late, after Python would have.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, SupportsInt, TypeVar

from plugins.errors import PluginError
from plugins.kernel import Kernel, KernelRunner
from plugins.trt_fields import Array, PluginFields, field_kinds, pack, unpack

if TYPE_CHECKING:
    import tensorrt as trt

NAMESPACE = "commitkv"
VERSION = "1"
ALIGNMENT_BYTES = 16

Kind = Literal["element", "fp32", "fp16", "int32", "int64", "bool"]
F = TypeVar("F", bound=PluginFields)
RunnerFactory = Callable[[str, Mapping[Kernel, bytes]], KernelRunner]
"""(sm, cubins) -> what launches them. Raises where the device of this process is no `sm`."""


class TensorRT(Protocol):
    """The names of TensorRT's module that plugins use; `tensorrt` and `tensorrt_rtx` both have them."""

    DataType: type[trt.DataType]
    DimsExprs: type[trt.DimsExprs]
    IPluginV3: type[trt.IPluginV3]
    IPluginV3OneCore: type[trt.IPluginV3OneCore]
    IPluginV3OneBuildV2: type[trt.IPluginV3OneBuildV2]
    IPluginV3OneRuntime: type[trt.IPluginV3OneRuntime]
    IPluginCreatorV3One: type[trt.IPluginCreatorV3One]
    PluginField: type[trt.PluginField]
    PluginFieldCollection: type[trt.PluginFieldCollection]
    PluginFieldType: type[trt.PluginFieldType]
    TensorFormat: type[trt.TensorFormat]
    TensorRTPhase: type[trt.TensorRTPhase]


@dataclass(frozen=True)
class PluginTensor:
    """One input or output. dims: names of `PluginFields.sizes`, or of sizes that the inputs of a step decide.

    alias: the input that this output is, edited in place.
    """

    name: str
    kind: Kind
    dims: tuple[str, ...]
    alias: str | None = None


@dataclass(frozen=True)
class PluginSpec:
    """Name and tensors of a plugin, in TensorRT's order."""

    name: str
    inputs: tuple[PluginTensor, ...]
    outputs: tuple[PluginTensor, ...]

    @property
    def tensors(self) -> tuple[PluginTensor, ...]:
        return self.inputs + self.outputs

    def input_index(self, name: str) -> int:
        return [tensor.name for tensor in self.inputs].index(name)


@dataclass(frozen=True)
class Call:
    """One launch. address: of each input and output by name; an aliased output has its input's.

    size: every named size.   workspace: at least `workspace_bytes(size)`.   stream: a CUDA stream's handle.
    """

    runner: KernelRunner
    address: Mapping[str, int]
    size: Mapping[str, int]
    workspace: int
    stream: int


@dataclass(frozen=True)
class PluginSetup:
    """What all plugins of one registration share. alive: see the module's text."""

    trt: TensorRT
    make_runner: RunnerFactory
    alive: list[object] = field(default_factory=list)


class TrtPlugin(Generic[F]):
    """Body of a plugin; `bind` joins it with TensorRT's interfaces, which call the methods below."""

    spec: ClassVar[PluginSpec]
    fields_type: ClassVar[type[PluginFields]]

    def __init__(self, fields: F, setup: PluginSetup, building: bool) -> None:
        for interface in _interfaces(setup.trt):
            interface.__init__(self)
        self.plugin_name, self.plugin_version, self.plugin_namespace = self.spec.name, VERSION, NAMESPACE
        self.num_outputs = len(self.spec.outputs)
        self.fields = fields
        self.building = building
        self.size: Mapping[str, int] = {}
        self._setup = setup
        self._runner: KernelRunner | None = None
        self._serialized: list[Any] = []

    # What an operation says about itself.

    def cubins(self) -> Mapping[Kernel, bytes]:
        """The kernels that `launch` runs, as they travel in the engine."""
        raise NotImplementedError

    def workspace_bytes(self, size: Mapping[str, int]) -> int:
        """Bytes that `launch` needs beside its tensors, at these or smaller sizes."""
        raise NotImplementedError

    def launch(self, call: Call) -> None:
        """Runs the operation. Allocates nothing and waits for nothing."""
        raise NotImplementedError

    # IPluginV3

    def get_capability_interface(self, type: trt.PluginCapabilityType) -> object:
        return self

    def clone(self) -> Any:
        copy = self.__class__(self.fields, self._setup, self.building)
        copy.size, copy._runner = self.size, self._runner
        self._setup.alive.append(copy)
        return copy

    # IPluginV3OneBuildV2

    def get_output_data_types(self, input_types: Sequence[trt.DataType]) -> list[trt.DataType]:
        for tensor, got in zip(self.spec.inputs, input_types, strict=True):
            if got != self._type(tensor.kind):
                raise self._error(tensor, f"got {got}, expected {self._type(tensor.kind)}")
        return [self._type(tensor.kind) for tensor in self.spec.outputs]

    def get_output_shapes(
        self, inputs: Sequence[trt.DimsExprs], shape_inputs: Sequence[trt.DimsExprs], expr_builder: trt.IExprBuilder
    ) -> list[trt.DimsExprs]:
        known = {name: expr_builder.constant(value) for name, value in self.fields.sizes().items()}
        for tensor, dims in zip(self.spec.inputs, inputs, strict=True):
            self._check_rank(tensor, len(dims))
            for axis, name in enumerate(tensor.dims):
                known.setdefault(name, dims[axis])
        return [self._setup.trt.DimsExprs([known[name] for name in tensor.dims]) for tensor in self.spec.outputs]

    def supports_format_combination(
        self, pos: SupportsInt, in_out: Sequence[trt.DynamicPluginTensorDesc], num_inputs: SupportsInt
    ) -> bool:
        tensor, desc = self.spec.tensors[int(pos)], in_out[int(pos)].desc
        return bool(desc.type == self._type(tensor.kind) and desc.format == self._setup.trt.TensorFormat.LINEAR)

    def get_aliased_input(self, output_index: SupportsInt) -> int:
        alias = self.spec.outputs[int(output_index)].alias
        return -1 if alias is None else self.spec.input_index(alias)

    def configure_plugin(
        self, inputs: Sequence[trt.DynamicPluginTensorDesc], outputs: Sequence[trt.DynamicPluginTensorDesc]
    ) -> None:
        for tensor, desc in zip(self.spec.inputs, inputs, strict=True):
            for dims in (desc.min, desc.max):  # sizes that the engine fixes must be fixed in every profile
                self._check_fixed(tensor, _dims(dims))

    def get_workspace_size(
        self, inputs: Sequence[trt.DynamicPluginTensorDesc], outputs: Sequence[trt.DynamicPluginTensorDesc]
    ) -> int:
        return self.workspace_bytes(self._sizes([_dims(desc.max) for desc in inputs]))

    # IPluginV3OneRuntime

    def get_fields_to_serialize(self) -> Any:
        """A PluginFieldCollection, which the bindings turn into what TensorRT reads."""
        module, kinds = self._setup.trt, field_kinds(type(self.fields))
        self._serialized = [  # TensorRT reads them after this returns
            module.PluginField(name, array.data, getattr(module.PluginFieldType, kinds[name]))
            for name, array in pack(self.fields).items()
        ]
        return module.PluginFieldCollection(self._serialized)

    def attach_to_context(self, resource_context: trt.IPluginResourceContext) -> Any:
        attached = self.clone()
        if not self.building:  # loads the cubins, or says that they are for another device
            attached._runner = self._setup.make_runner(self.fields.sm, self.cubins())
        return attached

    def on_shape_change(self, inputs: Sequence[trt.PluginTensorDesc], outputs: Sequence[trt.PluginTensorDesc]) -> None:
        self.size = self._sizes([_dims(desc.dims) for desc in inputs])

    def set_tactic(self, tactic: SupportsInt) -> None:
        assert int(tactic) == 0, "there is one way to run each operation"

    def enqueue(
        self,
        input_desc: Sequence[trt.PluginTensorDesc],
        output_desc: Sequence[trt.PluginTensorDesc],
        inputs: Sequence[SupportsInt],
        outputs: Sequence[SupportsInt],
        workspace: SupportsInt,
        stream: SupportsInt,
    ) -> None:  # fmt: skip
        if self.building:
            return
        if self._runner is None:
            raise PluginError(f"{self.spec.name}: not attached to an execution context; no cubins are loaded")
        address = self._addresses([int(at) for at in inputs], [int(at) for at in outputs])
        self.launch(Call(self._runner, address, self.size, int(workspace), int(stream)))

    # Checks

    def _type(self, kind: Kind) -> trt.DataType:
        types = self._setup.trt.DataType
        element = {"fp16": types.HALF, "bf16": types.BF16}[self.fields.element]
        table = {
            "element": element, "fp32": types.FLOAT, "fp16": types.HALF,
            "int32": types.INT32, "int64": types.INT64, "bool": types.BOOL,
        }  # fmt: skip
        return table[kind]

    def _check_rank(self, tensor: PluginTensor, rank: int) -> None:
        if rank != len(tensor.dims):
            raise self._error(tensor, f"got {rank} dimensions, expected [{', '.join(tensor.dims)}]")

    def _check_fixed(self, tensor: PluginTensor, dims: tuple[int, ...]) -> None:
        self._check_rank(tensor, len(dims))
        fixed = self.fields.sizes()
        for name, got in zip(tensor.dims, dims, strict=True):
            if got != fixed.get(name, got):
                text = f"got {list(dims)}, expected {fixed[name]} for {name}; the engine was built for other sizes"
                raise self._error(tensor, text)

    def _sizes(self, inputs: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """All named sizes; PluginError where two inputs disagree."""
        size = self.fields.sizes()
        for tensor, dims in zip(self.spec.inputs, inputs, strict=True):
            self._check_fixed(tensor, dims)
            for name, got in zip(tensor.dims, dims, strict=True):
                if size.setdefault(name, got) != got:
                    raise self._error(tensor, f"got {got} for {name}, expected {size[name]} as in inputs before it")
        return size

    def _addresses(self, inputs: Sequence[int], outputs: Sequence[int]) -> dict[str, int]:
        """Address of every tensor by name; PluginError for a copied alias or a misaligned arena."""
        address = {tensor.name: at for tensor, at in zip(self.spec.inputs, inputs, strict=True)}
        for tensor, at in zip(self.spec.outputs, outputs, strict=True):
            if tensor.alias is None:
                address[tensor.name] = at
            elif at != address[tensor.alias]:
                raise self._error(
                    tensor,
                    f"got {at:#x}, expected {address[tensor.alias]:#x} of {tensor.alias}, which is edited in place; "
                    f"bind both to the same memory",
                )
        for tensor in self.spec.tensors:
            at = address[tensor.alias or tensor.name]
            if at % ALIGNMENT_BYTES:
                raise self._error(tensor, f"got address {at:#x}, expected a multiple of {ALIGNMENT_BYTES}")
        return address

    def _error(self, tensor: PluginTensor, text: str) -> PluginError:
        return PluginError(f"{self.spec.name} {tensor.name}: {text}")


def bind(module: TensorRT, body: type[TrtPlugin[Any]]) -> type[TrtPlugin[Any]]:
    """The class that TensorRT can call: `body` with the interfaces of `module`."""
    return types.new_class(body.__name__, (body, *_interfaces(module)))


def _interfaces(module: TensorRT) -> tuple[Any, ...]:
    """The base classes that TensorRT asks of a plugin; their constructors take `self` alone."""
    return module.IPluginV3, module.IPluginV3OneCore, module.IPluginV3OneBuildV2, module.IPluginV3OneRuntime


def _dims(dims: trt.Dims) -> tuple[int, ...]:
    return tuple(dims[axis] for axis in range(len(dims)))


class PluginCreator:
    """Body of a creator (`IPluginCreatorV3One`) of one operation."""

    def __init__(self, plugin_class: type[TrtPlugin[Any]], setup: PluginSetup) -> None:
        module = setup.trt
        interface: Any = module.IPluginCreatorV3One
        interface.__init__(self)
        self.name, self.plugin_version, self.plugin_namespace = plugin_class.spec.name, VERSION, NAMESPACE
        self._fields = [
            module.PluginField(name, b"", getattr(module.PluginFieldType, kind))
            for name, kind in field_kinds(plugin_class.fields_type).items()
        ]
        self.field_names: Any = module.PluginFieldCollection(self._fields)
        self._class, self._setup = plugin_class, setup

    def create_plugin(self, name: str, field_collection: trt.PluginFieldCollection_, phase: trt.TensorRTPhase) -> Any:
        """The plugin of these fields. Raises PluginError or what `check_support` raises."""
        given = [field_collection[index] for index in range(len(field_collection))]
        packed: dict[str, Array] = {str(item.name): item.data for item in given}
        fields = unpack(self._class.fields_type, packed)
        return self.make(fields, building=phase == self._setup.trt.TensorRTPhase.BUILD)

    def make(self, fields: PluginFields, building: bool = True) -> TrtPlugin[Any]:
        """A plugin that lives as long as this creator. building: for a network, not for an engine that runs."""
        plugin = self._class(fields, self._setup, building)
        self._setup.alive.append(plugin)
        return plugin


def bind_creator(module: TensorRT) -> type[PluginCreator]:
    """The creator class that TensorRT can call."""
    return types.new_class(PluginCreator.__name__, (PluginCreator, module.IPluginCreatorV3One))

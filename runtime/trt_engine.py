"""One TensorRT engine: loaded, checked against its manifest, bound and run, with captured graphs for decode steps.

Memory is plain allocations of torch: inputs, outputs and the scratch memory that all execution contexts share (they run
one at a time, on one stream). A captured graph holds addresses and shapes, so graphs are kept by both; each has an
execution context of its own, since a context's state belongs to the shapes it was last given.

Not run in this repository's tests beyond what needs no driver: see README.md.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch

from runtime.engine_interface import Binding, EngineInterface
from runtime.errors import DeviceError, ManifestError
from runtime.manifest import REBUILD
from runtime.table_checks import check_aligned

if TYPE_CHECKING:
    import tensorrt as trt

MAX_GRAPHS = 32
PACKAGE, API_MAJOR = "tensorrt", 11


class TrtModule(Protocol):
    """What the executor uses of the module `tensorrt`, so that calls are checked against its type stubs."""

    __version__: str
    Logger: type[trt.Logger]
    ILogger: type[trt.ILogger]
    Runtime: type[trt.Runtime]
    TensorIOMode: type[trt.TensorIOMode]
    TensorLocation: type[trt.TensorLocation]
    DataType: type[trt.DataType]
    ExecutionContextAllocationStrategy: type[trt.ExecutionContextAllocationStrategy]


def import_tensorrt() -> TrtModule:
    """The module `tensorrt`. Raises DeviceError saying what is missing."""
    fix = (
        f"install TensorRT {API_MAJOR} (pip install 'tensorrt-cu13=={API_MAJOR}.*'), or run a cpu engine with "
        f"device cuda, which needs none"
    )
    try:
        module = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise DeviceError(
            f"engine: target trt runs on TensorRT {API_MAJOR}, but Python package {PACKAGE} cannot be imported "
            f"({error}); {fix}"
        ) from error
    major = str(getattr(module, "__version__", "0")).split(".")[0]
    if major != str(API_MAJOR):
        raise DeviceError(f"engine: got {PACKAGE} {module.__version__}, expected version {API_MAJOR}; {fix}")
    return cast(TrtModule, module)


@dataclass(frozen=True)
class TensorFacts:
    """What an engine says about one tensor, in the interface's words.   shape: -1 for sizes that change."""

    is_input: bool
    dtype: str
    shape: tuple[int, ...]
    profile: tuple[tuple[int, ...], ...]
    aliases: str


def check_interface(interface: EngineInterface, tensors: Mapping[str, TensorFacts]) -> None:
    """Raises ManifestError unless the engine's tensors are those of `interface`, aliases and ranges included."""
    expected = {binding.name: binding for binding in (*interface.inputs, *interface.outputs)}
    if set(expected) != set(tensors):
        wrong = sorted(set(expected) ^ set(tensors))
        raise ManifestError(
            f"engine: tensors {', '.join(wrong[:6])} are in the plan or in the manifest but not in both; {REBUILD}"
        )
    inputs = {binding.name for binding in interface.inputs}
    for name, binding in expected.items():
        got = tensors[name]
        shape, profile = interface.network_shape(binding), interface.profile(binding) if name in inputs else ()
        if got.is_input != (name in inputs) or got.dtype != binding.dtype or got.shape != shape:
            raise ManifestError(
                f"engine: {name} is {got.dtype} {list(got.shape)} in the plan, expected {binding.dtype} {list(shape)}; "
                f"{REBUILD}"
            )
        if profile and got.profile != profile:
            raise ManifestError(
                f"engine: {name} takes {_ranges(got.profile)} in the plan, expected {_ranges(profile)}: it was built "
                f"for other limits; {REBUILD}"
            )
        if got.aliases != (binding.aliases or ""):
            raise ManifestError(
                f"engine: {name} shares memory with {got.aliases or 'nothing'} in the plan, expected "
                f"{binding.aliases or 'nothing'}: arenas must be edited in place; {REBUILD}"
            )


def _ranges(profile: tuple[tuple[int, ...], ...]) -> str:
    return " to ".join(str(list(shape)) for shape in (profile[0], profile[-1])) if profile else "nothing"


def check_sm(built_for: int, got: int, card: str) -> None:
    """Raises DeviceError for a plan of another GPU generation."""
    if built_for != got:
        raise DeviceError(
            f"engine: the plan was built for sm_{built_for}, got {card} (sm_{got}); build it with --sm {got} on this "
            f"kind of card"
        )


def bound_shape(binding: Binding, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A binding's shape in one step."""
    return tuple(sizes[size] if isinstance(size, str) else size for size in binding.shape)


@dataclass(frozen=True, eq=False)
class StepBindings:
    """Addresses of all inputs by name and what the interface's letters stand for. Aliased outputs follow."""

    addresses: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal keys may replay one graph."""
        return (*sorted(self.addresses.items()), *sorted(self.sizes.items()))


class TrtEngine:
    """Runs steps on one stream of one GPU."""

    def __init__(
        self, module: TrtModule, plan: bytes, interface: EngineInterface, device: torch.device, plugins: object
    ) -> None:
        """plugins: registered creators, kept as long as the engine. Raises DeviceError or ManifestError."""
        self._trt, self._interface, self.device, self._plugins = module, interface, device, plugins
        self._logger = module.Logger(module.ILogger.WARNING)
        self._runtime = module.Runtime(self._logger)
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise DeviceError(
                f"engine: TensorRT {module.__version__} could not load the plan (its reason is in the log above); it "
                f"loads plans of its own version and GPU only; {REBUILD}"
            )
        self._engine = engine
        check_interface(interface, self._facts())
        memory_bytes = max(1, engine.device_memory_size_v2)
        self._memory = torch.empty(memory_bytes, dtype=torch.uint8, device=device)
        logits = next(binding for binding in interface.outputs if binding.aliases is None)
        most = {dim.name: dim.most for dim in interface.dims}
        self.logits = torch.empty(bound_shape(logits, most), dtype=torch.float32, device=device)
        self._logits_name = logits.name
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._context = self._make_context()
        self._graphs: OrderedDict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, trt.IExecutionContext]] = (
            OrderedDict()
        )

    def run(self, bindings: StepBindings, replay: bool) -> torch.Tensor:
        """Runs one step after what the current stream holds; logits [N, W] fp32, valid on the current stream.

        replay: the step's shape comes again, so it is captured the first time and replayed from then on.
        """
        for name, address in bindings.addresses.items():
            check_aligned(name, address)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        captured = self._graphs.get(bindings.key) if replay else None
        if captured is not None:
            self._graphs.move_to_end(bindings.key)
            with torch.cuda.stream(stream):
                captured[0].replay()
        elif replay:
            self._run_and_capture(bindings)
        else:
            self._enqueue(self._context, bindings)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return self.logits[: bindings.sizes["N"]]

    def _facts(self) -> dict[str, TensorFacts]:
        engine, module = self._engine, self._trt
        names = {
            module.DataType.INT32: "int32", module.DataType.BOOL: "bool", module.DataType.HALF: "fp16",
            module.DataType.BF16: "bf16", module.DataType.FLOAT: "fp32",
        }  # fmt: skip
        facts = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            is_input = engine.get_tensor_mode(name) == module.TensorIOMode.INPUT
            profile = engine.get_tensor_profile_shape(name, 0) if is_input else []
            dtype = engine.get_tensor_dtype(name)
            facts[name] = TensorFacts(
                is_input,
                names.get(dtype, str(dtype)),
                tuple(engine.get_tensor_shape(name)),
                tuple(tuple(shape) for shape in profile),
                "" if is_input else engine.get_aliased_input_tensor(name) or "",
            )
        return facts

    def _make_context(self) -> trt.IExecutionContext:
        """A context whose scratch memory is ours; contexts run one after the other on one stream."""
        context = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise DeviceError("engine: TensorRT could not make an execution context (its reason is in the log above)")
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        return context

    def _enqueue(self, context: trt.IExecutionContext, bindings: StepBindings) -> None:
        """Binds everything and runs the plan on the engine's stream."""
        for binding in self._interface.inputs:
            shape = bound_shape(binding, bindings.sizes)
            accepted = context.set_input_shape(binding.name, shape)
            accepted = context.set_tensor_address(binding.name, bindings.addresses[binding.name]) and accepted
            if not accepted:
                raise DeviceError(f"engine: TensorRT refused input {binding.name} of shape {list(shape)}; see the log")
        for binding in self._interface.outputs:
            address = self.logits.data_ptr() if binding.aliases is None else bindings.addresses[binding.aliases]
            if not context.set_tensor_address(binding.name, address):
                raise DeviceError(f"engine: TensorRT refused the memory of output {binding.name}; see the log")
        missing = context.infer_shapes()
        if missing:
            raise DeviceError(f"engine: inputs {', '.join(missing)} were left without a shape or an address")
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise DeviceError("engine: TensorRT could not run the step (its reason is in the log above)")

    def _run_and_capture(self, bindings: StepBindings) -> None:
        """Runs the step as it is, which settles the context's state for these shapes, then records the same again.

        Recording runs nothing. The oldest graph makes room.
        """
        context = self._make_context()
        self._enqueue(context, bindings)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a server's) may use the driver meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._enqueue(context, bindings)
        self._graphs[bindings.key] = (graph, context)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)

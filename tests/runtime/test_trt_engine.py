"""What `TrtEngine` asks of TensorRT and of CUDA graphs, in order. Both need a driver, so stand-ins note the calls.

That the calls fit TensorRT's signatures is checked by mypy against its stubs (tests/plugins/test_plugins_trt.py).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.config import EngineLimits, ModelSpec, RopeSpec
from runtime.engine_interface import EngineInterface, StepLimits, make_interface
from runtime.errors import DeviceError, ManifestError, TableError
from runtime.trt_engine import MAX_GRAPHS, StepBindings, TrtEngine, bound_shape, import_tensorrt

SPEC = ModelSpec("llama", 2, 64, 96, 4, 2, 64, 97, 1e-5, RopeSpec(10000.0), 4096, False)
LIMITS = EngineLimits(dtype="fp16", kv_dtype="fp16", max_batch_size=4, max_seq_len=256)
INTERFACE = make_interface(SPEC, LIMITS, StepLimits(32, "k8v4", 64))
SIZES = {"R": 4, "N": 4, "S": 4, "S+1": 5, "S*G+1": 9, "P": 8, "B": 8, "X": 16, "pages": 50, "blocks": 60}
NAMES = {"int32": "INT32", "bool": "BOOL", "fp16": "HALF", "bf16": "BF16", "fp32": "FLOAT"}


class Context:
    """An execution context: remembers what it is given."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes, self.shapes, self.addresses, self.refuse = notes, {}, {}, ""
        self.memory: tuple[int, int] | None = None

    def set_device_memory(self, memory: int, size: int) -> None:
        self.memory = (memory, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return name != self.refuse

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.shapes if name not in self.addresses]

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self.memory is not None, "contexts have no scratch memory of their own"
        self.notes.append(("run", self, stream_handle))
        return True


class Engine:
    """An engine that says of itself what `interface` says, but for `changes`."""

    device_memory_size_v2 = 4096

    def __init__(self, interface: EngineInterface, notes: list[Any]) -> None:
        self.interface, self.notes, self.aliases = interface, notes, {b.name: b.aliases for b in interface.outputs}
        self.contexts: list[Context] = []
        self._tensors = (*interface.inputs, *interface.outputs)
        self.num_io_tensors = len(self._tensors)

    def _of(self, name: str) -> Any:
        return next(binding for binding in self._tensors if binding.name == name)

    def get_tensor_name(self, index: int) -> str:
        return self._tensors[index].name

    def get_tensor_mode(self, name: str) -> str:
        return "INPUT" if name not in self.aliases else "OUTPUT"

    def get_tensor_dtype(self, name: str) -> str:
        return NAMES[self._of(name).dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.interface.network_shape(self._of(name))

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        assert profile_index == 0
        return list(self.interface.profile(self._of(name)))

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases[name]

    def create_execution_context(self, strategy: str) -> Context:
        assert strategy == "USER_MANAGED"
        self.contexts.append(Context(self.notes))
        return self.contexts[-1]


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was run or captured; torch's streams and graphs need a GPU."""
    noted: list[Any] = []

    class Stream:
        cuda_stream = 77

        def __init__(self, device: object = None) -> None: ...
        def wait_stream(self, other: object) -> None: ...
        def synchronize(self) -> None: ...

    @contextmanager
    def using(stream: object) -> Any:
        yield

    @contextmanager
    def graph(made: Graph, stream: Stream, capture_error_mode: str) -> Any:
        before = len(noted)
        yield
        noted[before:] = [("capture", made, *noted[before:])]

    for name, value in (("Stream", Stream), ("current_stream", lambda device: Stream()), ("stream", using),
                        ("graph", graph), ("CUDAGraph", Graph)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return noted


def module(engine: Engine | None) -> Any:
    same = SimpleNamespace(**{name: name for name in ("INT32", "BOOL", "HALF", "BF16", "FLOAT")})
    return SimpleNamespace(
        __version__="11.4.0",
        Logger=lambda severity: severity,
        ILogger=SimpleNamespace(WARNING="warning"),
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine),
        TensorIOMode=SimpleNamespace(INPUT="INPUT"),
        DataType=same,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="USER_MANAGED"),
    )


def load(engine: Engine | None) -> TrtEngine:
    return TrtEngine(module(engine), b"plan", INTERFACE, torch.device("cpu"), plugins=None)


def bindings(**sizes: int) -> StepBindings:
    addresses = {binding.name: 4096 * (i + 1) for i, binding in enumerate(INTERFACE.inputs)}
    return StepBindings(addresses, {**SIZES, **sizes})


def test_a_step_binds_every_tensor_and_arenas_to_themselves(notes: list[Any]) -> None:
    engine = Engine(INTERFACE, notes)
    loaded, given = load(engine), bindings()
    logits = loaded.run(given, replay=False)
    (context,) = engine.contexts
    assert notes == [("run", context, 77)]
    assert tuple(logits.shape) == (4, SPEC.vocab_size) and logits.data_ptr() == context.addresses["logits"]
    for binding in INTERFACE.inputs:
        assert context.shapes[binding.name] == bound_shape(binding, SIZES)
        assert context.addresses[binding.name] == given.addresses[binding.name]
    for binding in INTERFACE.outputs:
        if binding.aliases is not None:
            assert context.addresses[binding.name] == given.addresses[binding.aliases]


def test_a_decode_shape_is_run_then_captured_then_replayed(notes: list[Any]) -> None:
    engine = Engine(INTERFACE, notes)
    loaded = load(engine)
    for _ in range(3):
        loaded.run(bindings(), replay=True)
    kinds = [note[0] for note in notes]
    assert kinds == ["run", "capture"], "later steps replay"
    graph, own = notes[1][1], engine.contexts[1]
    assert graph.replays == 2 and notes[0][1] is own and notes[1][2][1] is own, "a graph has a context of its own"
    assert engine.contexts[0].memory == own.memory, "and shares the scratch memory"
    loaded.run(bindings(P=16), replay=True)
    assert [note[0] for note in notes] == ["run", "capture"] * 2 and len(engine.contexts) == 3
    loaded.run(bindings(), replay=False)
    assert notes[-1][1] is engine.contexts[0], "steps that do not come again use the first context"


def test_old_graphs_make_room(notes: list[Any]) -> None:
    engine = Engine(INTERFACE, notes)
    loaded = load(engine)
    for pages in range(1, MAX_GRAPHS + 2):
        loaded.run(bindings(P=pages), replay=True)
    captured = len(notes)
    loaded.run(bindings(P=MAX_GRAPHS + 1), replay=True)
    assert len(notes) == captured
    loaded.run(bindings(P=1), replay=True)
    assert len(notes) == captured + 2, "the oldest was dropped, so it is captured again"


def test_refusals_come_before_anything_runs(notes: list[Any]) -> None:
    engine = Engine(INTERFACE, notes)
    loaded, given = load(engine), bindings()
    crooked = replace(given, addresses={**given.addresses, "score": 4104})
    with pytest.raises(TableError, match="score: got address 0x1008, expected a multiple of 16"):
        loaded.run(crooked, replay=False)
    engine.contexts[0].refuse = "page_ids"
    with pytest.raises(DeviceError, match=r"refused input page_ids of shape \[8\]"):
        loaded.run(given, replay=False)
    assert notes == []


def test_plans_that_do_not_load_or_copy_arenas(notes: list[Any]) -> None:
    with pytest.raises(DeviceError, match=r"TensorRT 11\.4\.0 could not load the plan"):
        load(None)
    copying = Engine(INTERFACE, notes)
    copying.aliases["score_out"] = None
    with pytest.raises(ManifestError, match="score_out shares memory with nothing in the plan, expected score"):
        load(copying)
    other = Engine(make_interface(SPEC, replace(LIMITS, max_batch_size=2), StepLimits(32, "k8v4", 64)), notes)
    with pytest.raises(ManifestError, match="it was built for other limits"):
        load(other)


def test_another_tensorrt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.9.0"))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"got tensorrt 10\.9\.0, expected version 11"):
        import_tensorrt()

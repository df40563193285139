"""Fuzz cases as the server's model would get them, against the serving code over the simulated engine."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass, field
from math import prod

from simulated_engine import make_engine

from perf.load.fuzz_cases import STRUCT_CODES, FuzzRequest, FuzzTensor
from runtime.config import RuntimeConfig
from runtime.loop import EngineLoop
from runtime.serving.tensors import InputTensor, Value
from runtime.serving.turns import Turns


def input_tensors(request: FuzzRequest) -> list[InputTensor] | None:
    """None for what a server refuses by itself: contents that do not fit type and shape, or are too many or few."""
    if request.surplus is not None or request.lacks_last:
        return None
    made = [as_input_tensor(tensor) for tensor in request.tensors]
    tensors = [tensor for tensor in made if tensor is not None]
    return tensors if len(tensors) == len(made) else None


def as_input_tensor(tensor: FuzzTensor) -> InputTensor | None:
    """As plain values; None when its contents do not fit."""
    count = prod(tensor.shape)
    if any(size < 0 for size in tensor.shape):
        return None
    if tensor.dtype == "BYTES":
        rows = _bytes_of(tensor.contents)
        values: list[Value] | None = None if rows is None else [*rows]
    else:
        size = struct.calcsize(STRUCT_CODES[tensor.dtype])
        fits = len(tensor.contents) == count * size
        values = list(struct.unpack(f"<{count}{STRUCT_CODES[tensor.dtype]}", tensor.contents)) if fits else None
    if values is None or len(values) != count:
        return None
    return InputTensor(tensor.name, "STRING" if tensor.dtype == "BYTES" else tensor.dtype, tensor.shape, values)


def _bytes_of(contents: bytes) -> list[bytes] | None:
    rows = []
    while contents:
        if len(contents) < 4:
            return None
        length = int.from_bytes(contents[:4], "little")
        if len(contents) < 4 + length:
            return None
        rows.append(contents[4 : 4 + length])
        contents = contents[4 + length :]
    return rows


@dataclass
class FuzzSink:
    """Waits for the one final response. `after_final`: responses that came too late."""

    final: threading.Event = field(default_factory=threading.Event)
    code: str = ""
    message: str = ""
    after_final: int = 0
    conversation: str = ""

    def send(self, outputs: tuple[object, ...], final: bool) -> None:
        self.after_final += self.final.is_set()
        for output in outputs:
            if getattr(output, "name", "") == "conversation_id":
                self.conversation = output.values[0].decode()  # type: ignore[attr-defined]
        if final:
            self.final.set()

    def fail(self, code: str, message: str) -> None:
        self.after_final += self.final.is_set()
        self.code, self.message = code, message
        self.final.set()

    def is_cancelled(self) -> bool:
        return False


class FuzzedServer:
    """Serving code, engine loop and a simulated engine; no server and no model. Idle conversations soon end."""

    def __init__(self) -> None:
        config = RuntimeConfig(kv_memory_bytes=1 << 20, max_idle_s=0.5)
        self.engine, _, self.manager = make_engine(config)
        self.logged: list[str] = []
        self.turns = Turns(EngineLoop(self.engine), None, self.logged.append)

    def send(self, request: FuzzRequest) -> FuzzSink | None:
        """None for what a server would not let through."""
        tensors = input_tensors(request)
        if tensors is None:
            return None
        sink = FuzzSink()
        self.turns.handle(tensors, request.request_id, sink, dict(request.parameters))
        return sink

    def conversations_after(self, timeout_s: float) -> int:
        """How many are left once those that are idle have had time to end."""
        deadline = time.monotonic() + timeout_s
        while self.engine.stats().conversations and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.engine.stats().conversations

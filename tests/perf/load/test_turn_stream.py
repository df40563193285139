"""How a stream ended, as a client sees it; with real servers: tests/triton/test_load.py."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from perf.load.turn_stream import Patience, _Reading


class Broken:
    """A stream that ends as gRPC ends one that fails inside it."""

    def __init__(self, code: Any, after_s: float) -> None:
        self._code, self._after_s = code, after_s

    def __aiter__(self) -> Broken:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(self._after_s)
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(self._code, metadata, metadata, "Internal error from Core")

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    ("code", "deadline_s", "status"),
    [
        (grpc.StatusCode.INTERNAL, 0.01, "left"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 0.01, "left"),
        (grpc.StatusCode.INTERNAL, None, "refused"),
        (grpc.StatusCode.INTERNAL, 60.0, "refused"),
        (grpc.StatusCode.UNAVAILABLE, None, "unreachable"),
    ],
)
def test_a_deadline_that_has_passed_is_the_clients_own_doing(code: Any, deadline_s: float | None, status: str) -> None:
    async def read() -> str:
        return (await _Reading(Broken(code, 0.02), Patience(deadline_s=deadline_s)).run()).status

    assert asyncio.run(read()) == status

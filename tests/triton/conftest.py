"""A tiny engine with random weights, and a real Triton server that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perf.server import ServerOptions, TritonServer


@pytest.fixture(scope="session")
def server(tiny_engine_dir: Path) -> Iterator[TritonServer]:
    parameters = {"engine_dir": str(tiny_engine_dir), "kv_memory_bytes": str(64 << 20), "num_threads": "1"}
    with TritonServer(ServerOptions(parameters=parameters, grace_s=2.0)) as running:
        yield running


@pytest.fixture
def url(server: TritonServer) -> str:
    return server.grpc_url

"""A port that somebody takes while the model loads: Triton listens only after that."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import perf.server
from perf.server import PortLostError, ServerOptions, TritonServer, http_status

pytestmark = pytest.mark.triton


@pytest.fixture
def thief(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], list[int]]]:
    """Takes the named port as soon as it is chosen, so many times; returns the list of what it took."""
    sockets: list[socket.socket] = []
    choose = perf.server.choose_ports

    def steal(name: str, times: int) -> list[int]:
        taken: list[int] = []

        def choose_and_lose(host: str, wanted: Mapping[str, int]) -> dict[str, int]:
            ports = choose(host, wanted)
            if len(taken) < times:
                sockets.append(socket.create_server((host, ports[name])))
                taken.append(ports[name])
            return ports

        monkeypatch.setattr(perf.server, "choose_ports", choose_and_lose)
        return taken

    yield steal
    for one in sockets:
        one.close()


def options_for(engine_dir: Path, grpc_port: int = 0) -> ServerOptions:
    parameters = {"engine_dir": str(engine_dir), "kv_memory_bytes": str(16 << 20), "num_threads": "1"}
    # With all three given nothing is ours to choose anew.
    others = (grpc_port + 1, grpc_port + 2) if grpc_port else (0, 0)
    return ServerOptions(
        parameters=parameters, grpc_port=grpc_port, http_port=others[0], metrics_port=others[1], grace_s=1.0
    )


def test_another_free_port_is_chosen(tiny_engine_dir: Path, thief: Callable[[str, int], list[int]]) -> None:
    """Metrics are what Triton serves last."""
    taken = thief("metrics", 1)
    with TritonServer(options_for(tiny_engine_dir)) as server:
        assert len(taken) == 1 and server.ports["metrics"] != taken[0]
        assert http_status(f"http://{server.metrics_url}/metrics") == 200


def test_a_given_port_that_is_lost_is_an_error(tiny_engine_dir: Path, thief: Callable[[str, int], list[int]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = TritonServer(options_for(tiny_engine_dir, min(port, 65533)))
    thief("metrics", 1)
    with pytest.raises(PortLostError, match="was taken by another program while the model loaded"):
        server.start()
    assert server.returncode not in (None, 0)

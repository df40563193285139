"""When a server is started again, and when not; with real servers: tests/triton/test_faults.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType

import pytest

from perf import supervise
from perf.server import ServerOptions, ServerStartError, TritonServer
from perf.supervise import Backoff, Supervisor, death
from runtime.errors import ConfigError


def test_waits_double_up_to_a_bound_and_begin_anew_after_steady_work() -> None:
    backoff = Backoff(first_s=1.0, most_s=5.0, steady_s=60.0)
    assert [backoff.wait_s(2.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [backoff.wait_s(60.0), backoff.wait_s(0.0)] == [1.0, 2.0]


def test_a_first_start_that_fails_is_the_operators_to_mend() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        options = ServerOptions(grpc_port=holder.getsockname()[1])
        with pytest.raises(ConfigError, match="grpc port: cannot listen"):
            Supervisor(options, print).run(threading.Event(), lambda server: None)


class ScriptedServer(TritonServer):
    """Starts and dies as `script` says: an error to raise at its start, or a return code; None: runs on."""

    script: list[Exception | int | None]
    seen: list[ServerOptions]

    def start(self) -> ScriptedServer:
        self.seen.append(self.options)
        what = self.script.pop(0)
        if isinstance(what, Exception):
            raise what
        self.ports = {"http": 8101, "grpc": 8102, "metrics": 8103}
        self._code = what
        return self

    @property
    def returncode(self) -> int | None:
        return self._code

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[ScriptedServer]]:
    monkeypatch.setattr(supervise, "POLL_S", 0.001)

    def make(*script: Exception | int | None) -> type[ScriptedServer]:
        kind = type("Scripted", (ScriptedServer,), {"script": list(script), "seen": []})
        monkeypatch.setattr(supervise, "TritonServer", kind)
        return kind

    return make


def test_the_next_server_has_the_same_ports_and_goes_on_with_the_log(
    scripted: Callable[..., type[ScriptedServer]],
) -> None:
    kind = scripted(-9, ConfigError("grpc port: taken"), ServerStartError("not ready"), 3, None)
    stopping, said = threading.Event(), list[str]()
    num_ready = 0

    def ready(server: TritonServer) -> None:
        nonlocal num_ready
        num_ready += 1
        if num_ready == 3:
            stopping.set()

    supervisor = Supervisor(ServerOptions(), said.append, Backoff(first_s=0.01, most_s=0.02))
    supervisor.run(stopping, ready)
    assert supervisor.restarts == 4 and not kind.script
    assert [options.grpc_port for options in kind.seen] == [0, 8102, 8102, 8102, 8102]
    assert [options.append_log for options in kind.seen] == [False, True, True, True, True]
    assert "code -9" in said[0] and "starting again in 0.01 s" in said[0]
    assert "grpc port: taken" in said[1] and "not ready" in said[2] and "0.02 s" in said[2]


def test_a_stop_while_waiting_starts_nothing(scripted: Callable[..., type[ScriptedServer]]) -> None:
    kind = scripted(-9, None)
    stopping = threading.Event()
    Supervisor(ServerOptions(), lambda _: stopping.set(), Backoff(first_s=60.0)).run(stopping, lambda server: None)
    assert len(kind.seen) == 1


def test_a_dead_model_is_told_apart(scripted: Callable[..., type[ScriptedServer]]) -> None:
    server = scripted(-9)(ServerOptions()).start()
    assert "code -9; see here.log" in death(server, "here.log")
    server.model_died = True
    assert "model's process was killed" in death(server, "here.log")

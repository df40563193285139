"""Keeps a server running: when it dies, another one starts on the same ports, sooner or later by how often it dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from perf.server import ServerOptions, TritonServer
from runtime.errors import CommitKVError

POLL_S = 0.2


class Backoff:
    """How long to wait before the next start: twice as long every time, from the beginning again after steady work."""

    def __init__(self, first_s: float = 1.0, most_s: float = 30.0, steady_s: float = 60.0) -> None:
        """steady_s: a server that was up so long died of something new."""
        self._first_s, self._most_s, self._steady_s = first_s, most_s, steady_s
        self._next_s = first_s

    def wait_s(self, up_s: float) -> float:
        """After a server that was up for `up_s`."""
        if up_s >= self._steady_s:
            self._next_s = self._first_s
        wait, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return wait


def death(server: TritonServer, log: object) -> str:
    """Why a server ended that nobody stopped, in one line. log: where more is said."""
    if server.model_died:
        return (
            "the model's process was killed, or ran out of memory; the server is stopped and conversations without a "
            f"checkpoint are lost: if memory was short, start it with a smaller --kv-mib ({log})"
        )
    return f"the server ended by itself with code {server.returncode}; see {log}"


class Supervisor:
    """say: one line for the operator.   restarts: starts after the first."""

    def __init__(self, options: ServerOptions, say: Callable[[str], None], backoff: Backoff | None = None) -> None:
        self._options = options
        self._say = say
        self._backoff = backoff or Backoff()
        self.restarts = 0

    def run(self, stopping: threading.Event, ready: Callable[[TritonServer], None]) -> None:
        """Until `stopping` is set. `ready` is called with every server that has become so.

        Raises ServerStartError or ConfigError where the very first start fails; later ones are tried again.
        """
        while not stopping.is_set():
            began = time.monotonic()
            try:
                why = self._run_one(stopping, ready)
            except CommitKVError as error:  # a port that somebody else has taken among them
                if self.restarts == 0:
                    raise
                why = str(error)
            if why is None:
                return
            wait_s = self._backoff.wait_s(time.monotonic() - began)
            self._say(f"{why}\nstarting again in {wait_s:g} s")
            stopping.wait(wait_s)
            self.restarts += 1

    def _run_one(self, stopping: threading.Event, ready: Callable[[TritonServer], None]) -> str | None:
        """One server's life; why it died, None if it was told to stop."""
        with TritonServer(self._options) as server:
            # Clients know the ports by now, and the log tells why the last one died.
            http, grpc, metrics = (server.ports[name] for name in ("http", "grpc", "metrics"))
            self._options = replace(
                self._options, append_log=True, http_port=http, grpc_port=grpc, metrics_port=metrics
            )
            ready(server)
            while not stopping.wait(POLL_S) and server.returncode is None:
                pass
            return None if server.returncode is None else death(server, self._options.log_path or "its log")

"""What tests of a real server share: HTTP requests, turns in the background, and waiting for rest."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tritonclient.grpc as grpcclient

from perf.client import Chat, TurnOptions, TurnResult, engine_stats
from perf.server import MODEL_NAME, TritonServer

LONG = TurnOptions(max_tokens=1500)


def post(server: TritonServer, path: str, body: Mapping[str, Any], model: str = MODEL_NAME) -> tuple[int, str]:
    """Status and text of an HTTP request to `path` of a model."""
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/{model}/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a generate_stream answer."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


class BackgroundTurn:
    """A turn in a thread, begun by its first piece. `leave`: the client breaks off at the next one."""

    def __init__(self, chat: Chat, options: TurnOptions = LONG) -> None:
        self.started = threading.Event()
        self.leave = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(chat.turn, "a long story", options, self._on_text)
        assert self.started.wait(60)

    def _on_text(self, _: str) -> None:
        self.started.set()
        if self.leave.is_set():
            raise ConnectionAbortedError

    def result(self) -> TurnResult:
        try:
            return self._future.result(120)
        finally:
            self._pool.shutdown()


class Stream:
    """One gRPC stream, in the client library's own words."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float | None = None) -> None:
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client = grpcclient.InferenceServerClient(url)
        self._client.start_stream(
            lambda result, error: self._answers.put((result, error)), headers=headers, stream_timeout=timeout_s
        )

    def send(self, model: str, inputs: list[grpcclient.InferInput], request_id: str = "", **parameters: str) -> None:
        self._client.async_stream_infer(model, inputs, request_id=request_id, parameters=parameters or None)

    def next(self) -> Any:
        """The next response. Raises the server's error."""
        result, error = self._answers.get(timeout=60)
        if error is not None:
            raise error
        return result

    def close(self, *, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def wait_until_no_turn_runs(url: str) -> None:
    """Fails after ten seconds."""
    deadline = time.monotonic() + 10
    while engine_stats(url)["engine"]["running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine_stats(url)["engine"]["running"] == 0

"""kill -9 of the model's process and of the server under load: clients are told, a new server takes over, and
conversations go on from their last checkpoint. `perf.serve --restart` runs as an operator would run it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from perf.client import Chat, ServerUnreachableError, TurnError, TurnOptions, TurnResult
from perf.server import MODEL_NAME, REPO_ROOT

pytestmark = pytest.mark.triton

READY_S = 120.0
TOLD_S = 30.0
NAMES = ("ada", "bob", "eve")
SHORT = TurnOptions(max_tokens=12)
LONG = TurnOptions(max_tokens=3000, timeout_s=120.0)


class Served:
    """`perf.serve --restart` in a process of its own."""

    def __init__(self, engine_dir: Path, folder: Path) -> None:
        command = [
            *(sys.executable, "-m", "perf.serve", "--restart", "--engine", str(engine_dir), "--threads", "1"),
            *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--grace-s", "2", "--kv-mib", "64"),
            *("--checkpoints", str(folder / "kept"), "--checkpoint-wait-s", "60", "--log", str(folder / "server.log")),
        ]
        self.process = subprocess.Popen(
            command, cwd=REPO_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.num_ready = 0
        self.wait_ready()
        # ready: gRPC 127.0.0.1:8001  HTTP ...
        self.url = next(line for line in self.lines if line.startswith("ready: gRPC ")).split()[2]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._arrived:
                self.lines.append(line)
                self._arrived.notify_all()

    def wait_ready(self) -> None:
        """Until one more server than before has been ready."""
        self.num_ready += 1

        def ready() -> bool:
            return sum(line.startswith("ready: ") for line in self.lines) >= self.num_ready

        with self._arrived:
            assert self._arrived.wait_for(ready, READY_S), "".join(self.lines)

    @property
    def triton(self) -> psutil.Process:
        [server] = psutil.Process(self.process.pid).children()
        return server

    @property
    def model(self) -> psutil.Process:
        """The process that runs `tensorrt_llm`; other models of the repository have theirs."""
        [stub] = [child for child in self.triton.children() if f"/{MODEL_NAME}/" in " ".join(child.cmdline())]
        return stub

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(READY_S)
        finally:
            self.process.kill()
            self._reader.join()


@pytest.fixture
def served(tiny_engine_dir: Path, tmp_path: Path) -> Iterator[Served]:
    running = Served(tiny_engine_dir, tmp_path)
    yield running
    if running.process.poll() is None:
        running.stop()


def text_of(number: int) -> str:
    return f"Turn {number}: " + "the lamps are lit along the quay, " * (3 + number)


def talk_all(served: Served, number: int) -> dict[str, TurnResult]:
    """The turn of this number in every conversation. What has been answered is kept, so the server may die next."""
    with ThreadPoolExecutor(len(NAMES)) as pool:
        turns = {name: pool.submit(Chat(served.url, name, "full").turn, text_of(number), SHORT) for name in NAMES}
        return {name: turn.result() for name, turn in turns.items()}


def kill_under_load(served: Served, victim: psutil.Process) -> None:
    """Every client that waits is told so, soon, while `victim` dies; then a new server is ready."""
    started = [threading.Event() for _ in NAMES]
    with ThreadPoolExecutor(len(NAMES)) as pool:
        turns: list[Future[TurnResult]] = [
            pool.submit(Chat(served.url, name, "full").turn, "a long story", LONG, lambda _, event=event: event.set())
            for name, event in zip((*NAMES[:2], "new"), started, strict=True)
        ]
        assert all(event.wait(READY_S) for event in started)
        begin = time.monotonic()
        victim.kill()
        for turn in turns:
            with pytest.raises((ServerUnreachableError, TurnError)):
                turn.result(TOLD_S)
        assert time.monotonic() - begin < TOLD_S
    served.wait_ready()


def test_conversations_outlive_the_model_and_the_server(served: Served) -> None:
    said = {name: [result.text] for name, result in talk_all(served, 0).items()}
    for number, which in enumerate(("model", "triton"), start=1):
        dead_model, dead_server = served.model, served.triton
        kill_under_load(served, dead_model if which == "model" else dead_server)
        assert not dead_model.is_running() and not dead_server.is_running(), "the rest of a dead server stays"
        for name, result in talk_all(served, number).items():
            said[name].append(result.text)
            turn = result.stats["turn"]
            assert "kv restored from a checkpoint" in turn["recomputed_reason"] and turn["recomputed_tokens"] == 0
            assert turn["reused_tokens"] > 100
    # A conversation that was never interrupted says the same.
    control = Chat(served.url, "control", "full")
    assert [control.turn(text_of(number), SHORT).text for number in range(3)] == said["ada"] == said["bob"]
    assert sum("starting again in" in line for line in served.lines) == 2
    assert served.stop() == 0
    assert not psutil.pid_exists(served.process.pid)


def test_a_terminated_command_takes_its_server_along(tiny_engine_dir: Path) -> None:
    """`timeout 60 make load` must not leave a server behind."""
    script = (
        "import time; from pathlib import Path\n"
        "from perf.serve import server_options; from perf.server import TritonServer\n"
        f"with TritonServer(server_options(Path({str(tiny_engine_dir)!r}), 64, 1, None, None)) as server:\n"
        "    print(server.pid, flush=True); time.sleep(600)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", script], cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    server = psutil.Process(int(command.stdout.readline()))
    family = [server, *server.children(recursive=True)]
    command.terminate()
    assert command.wait(TOLD_S) != 0
    assert not psutil.wait_procs(family, timeout=TOLD_S)[1]

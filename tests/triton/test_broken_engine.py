"""A real server whose device breaks for good: clients hear it, and nothing is called ready that never answers."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from perf.client import Chat, ServerUnreachableError, TurnError, TurnOptions
from perf.server import REPO_ROOT, ServerOptions, TritonServer
from runtime.loop import MAX_FAILED_STEPS

pytestmark = pytest.mark.triton

# The warm-up turn and short ones run; from the first long prompt on, nothing does.
FAULT = """
from runtime.paged_executor import PagedExecutor

_run = PagedExecutor.run
_broken = []


def _run_until_it_breaks(self, plan):
    if _broken or plan.num_tokens > 60:
        _broken.append(plan.num_tokens)
        raise RuntimeError("device lost")
    return _run(self, plan)


PagedExecutor.run = _run_until_it_breaks
"""


@pytest.fixture
def faulty_repository(tmp_path: Path) -> Path:
    """The model as it is, with a device that breaks."""
    repository = tmp_path / "repository"
    shutil.copytree(REPO_ROOT / "triton_model_repo" / "tensorrt_llm", repository / "tensorrt_llm")
    model = repository / "tensorrt_llm" / "1" / "model.py"
    text = model.read_text(encoding="utf-8")
    root = "Path(__file__).resolve().parents[3]"
    assert text.count(root) == 1
    model.write_text(text.replace(root, f"Path({str(REPO_ROOT)!r})") + FAULT, encoding="utf-8")
    return repository


def test_the_server_ends_when_its_device_is_broken_for_good(tiny_engine_dir: Path, faulty_repository: Path) -> None:
    parameters = {"engine_dir": str(tiny_engine_dir), "kv_memory_bytes": str(64 << 20), "num_threads": "1"}
    options = ServerOptions(model_repository=faulty_repository, parameters=parameters, grace_s=1.0)
    with TritonServer(options) as server:
        chat = Chat(server.grpc_url, "ada")
        assert chat.turn("hi", TurnOptions(max_tokens=2)).generated_tokens == 2
        for _ in range(MAX_FAILED_STEPS):
            with pytest.raises(TurnError, match="device lost"):
                chat.turn("x" * 100, TurnOptions(max_tokens=2))
        deadline = time.monotonic() + 30
        while server.returncode is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server.returncode not in (None, 0) and server.model_died
        with pytest.raises(ServerUnreachableError):
            Chat(server.grpc_url, "eve").turn("hi")

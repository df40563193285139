"""The examples of runtime/serving/README.md, run as they are printed against a real server; and where it listens."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from served import post

from perf.client import Chat
from perf.server import REPO_ROOT, TritonServer

pytestmark = pytest.mark.triton

README = (REPO_ROOT / "runtime" / "serving" / "README.md").read_text(encoding="utf-8")


def example(language: str, part: str) -> str:
    [found] = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if part in text]
    return str(found)


def objects_in(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, which may follow each other without anything between."""
    found, at = [], text.find("{")
    while at >= 0:
        value, end = json.JSONDecoder().raw_decode(text, at)
        found.append(value)
        at = text.find("{", end)
    return found


def run(command: list[str], text: str, server: TritonServer, tmp_path: Path) -> str:
    """What the example prints, with the ports of `server` in place of those of `make serve`."""
    for shipped, port in (("localhost:8000", server.http_url), ("localhost:8001", server.grpc_url)):
        text = text.replace(shipped, port)
    assert "localhost" not in text
    path = tmp_path / "example"
    path.write_text(text, encoding="utf-8")
    done = subprocess.run([*command, str(path)], capture_output=True, check=False, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_a_conversation_over_grpc(server: TritonServer, tmp_path: Path) -> None:
    told = run([sys.executable], example("python", "tritonclient"), server, tmp_path)
    sizes = [(int(held), int(full)) for held, full in re.findall(r"  \[(\d+) of (\d+) bytes\]", told)]
    assert len(sizes) == 2 and 0 < sizes[0][1] < sizes[1][1], "the second turn goes on with the first"


def test_a_whole_chat_over_http(server: TritonServer, tmp_path: Path) -> None:
    told = run([sys.executable], example("python", "urllib"), server, tmp_path)
    assert len(told.strip()) > 10


def test_curl(server: TritonServer, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    told = run(["sh", "-e"], example("sh", "curl"), server, tmp_path)
    answers = objects_in(told)
    assert len(answers) > 4 and not [answer for answer in answers if "error" in answer]
    assert {answer["model_name"] for answer in answers} == {"tensorrt_llm", "ensemble"}
    ended = {"conversation_id": "ada", "stats": True}
    status, text = post(server, "generate", ended)
    assert status == 400 and "conversation_id: got 'ada'" in json.loads(text)["error"], "the example ended it"


def test_every_port_is_on_loopback(server: TritonServer) -> None:
    process = psutil.Process(server.pid)
    everyone = [process, *process.children(recursive=True)]
    listening = {c.laddr for p in everyone for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert {address.port for address in listening} == set(server.ports.values())
    # A socket of both families says ::ffff:127.0.0.1.
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    with Chat(server.grpc_url, "reachable") as chat:
        assert chat.turn("x").generated_tokens > 0

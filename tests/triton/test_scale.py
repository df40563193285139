"""Two real servers behind a real nginx: conversations outlive the server that held them; and whose they are."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest

from perf.load.turn_stream import Answer, Requests, Target, turn_values
from perf.proxy import Proxy, Replica
from perf.scale import Plan, markdown, run_scale
from perf.server import ServerOptions, TritonServer

pytestmark = pytest.mark.triton


def test_conversations_outlive_the_server_that_held_them(tiny_engine_dir: Path) -> None:
    """The short form of `make scale`: one is killed in the middle of turns, comes back, and is killed again."""
    parameters = {
        "engine_dir": str(tiny_engine_dir), "kv_memory_bytes": str(32 << 20), "num_threads": "1",
        "default_policy": "full",
    }  # fmt: skip
    plan = Plan(conversations=6, turns=2, message_words=15, answer_tokens=48, think_s=0.2)
    report = asyncio.run(run_scale(ServerOptions(parameters=parameters, ready_timeout_s=300.0), plan))
    table = markdown(report)
    both_up, killed, back, killed_again = report.parts
    assert report.lost == 0 and report.found("cut") == 0 and report.found("recomputed") == 0, table
    assert both_up.conversations["kept"] == plan.conversations, table
    assert killed.conversations["restored"] > 0 and killed.retried > 0, table
    # nginx tries the server that is back with one conversation first; the others follow in their next turn.
    assert back.conversations["restored"] > 0 and killed_again.conversations["restored"] > 0, table
    assert all(p.conversations["kept"] + p.conversations["restored"] == plan.conversations for p in report.parts), table
    assert report.same_answers == report.compared == 8 * plan.conversations, table


async def _ask(url: str, key: str | None, values: dict[str, Any]) -> Answer:
    async with Requests(Target(url, {} if key is None else {"x-api-key": key})) as requests:
        return await requests.ask(values)


def test_a_key_opens_its_tenants_conversations_only(server: TritonServer) -> None:
    name = f"ledger-{uuid.uuid4().hex}"
    keys = {"key-of-acme": "acme", "key-of-other": "other"}
    with Proxy("nginx", [Replica(server.grpc_url, server.http_url)], keys) as proxy:

        def ask(key: str | None, values: dict[str, Any]) -> Answer:
            return asyncio.run(_ask(proxy.grpc_url, key, values))

        told = ask("key-of-acme", turn_values("keep this", name, 4))
        assert told.status == "ok", told.error
        for key in ("key-of-other", "unknown", None):
            seen = ask(key, {"stats": True, "conversation_id": name})
            assert seen.status == "refused" and "expected one that is held" in seen.error
        mine = ask("key-of-acme", {"stats": True, "conversation_id": name})
        assert mine.status == "ok" and mine.kv["kv_bytes"] > 0
        assert ask("key-of-acme", {"conversation_end": True, "conversation_id": name}).status == "ok"

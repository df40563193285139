"""Two real servers behind a real nginx: conversations outlive the server that held them; and whose they are."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from served import Stream

from perf.client import tensor
from perf.load.turn_stream import Answer, Requests, Target, turn_values
from perf.proxy import Proxy, Replica
from perf.scale import Part, Plan, markdown, run_scale
from perf.server import ServerOptions, TritonServer

pytestmark = pytest.mark.triton


def moved(part: Part) -> int:
    """Conversations that another server went on with, or whose answer it told again."""
    return part.conversations["restored"] + part.conversations["retold"]


def test_conversations_outlive_the_server_that_held_them(tiny_engine_dir: Path) -> None:
    """The short form of `make scale`: one is killed in the middle of turns, comes back, and is killed again."""
    parameters = {
        "engine_dir": str(tiny_engine_dir), "kv_memory_bytes": str(32 << 20), "num_threads": "1",
        "default_policy": "full",
    }  # fmt: skip
    plan = Plan(conversations=6, turns=2, message_words=15, answer_tokens=96, think_s=0.2)
    report = asyncio.run(run_scale(ServerOptions(parameters=parameters, ready_timeout_s=300.0), plan))
    table = markdown(report)
    both_up, killed, back, killed_again = report.parts
    assert report.lost == 0 and report.found("cut") == 0 and report.found("recomputed") == 0, table
    assert both_up.conversations["kept"] == plan.conversations, table
    # One of the kills may meet its server between an answer's last token and the next turn: then nobody asks again.
    assert moved(killed) > 0 and killed.retried + killed_again.retried > 0, table
    # nginx tries the server that is back with one conversation first; the others follow in their next turn.
    assert moved(back) > 0 and moved(killed_again) > 0, table
    assert all(p.conversations["kept"] + moved(p) == plan.conversations for p in report.parts), table
    assert report.same_answers == report.compared == 8 * plan.conversations, table


@pytest.fixture(scope="module")
def guarded(tiny_engine_dir: Path) -> Iterator[tuple[TritonServer, Proxy]]:
    """A server and nginx that share the secret, and two tenants with keys."""
    parameters = {
        "engine_dir": str(tiny_engine_dir), "kv_memory_bytes": str(32 << 20), "num_threads": "1",
        "tenant_parameter": "commitkv_tenant_changeme",
    }  # fmt: skip
    keys = {"key-of-acme": "acme", "key-of-other": "other"}
    with (
        TritonServer(ServerOptions(parameters=parameters, grace_s=1.0, ready_timeout_s=300.0)) as server,
        Proxy("nginx", [Replica(server.grpc_url, server.http_url)], keys) as proxy,
    ):
        yield server, proxy


async def _ask(url: str, key: str | None, values: dict[str, Any]) -> Answer:
    async with Requests(Target(url, {} if key is None else {"x-api-key": key})) as requests:
        return await requests.ask(values)


def _status(url: str, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{url}/v2/models/tensorrt_llm{path}", data, dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_client_cannot_claim_a_tenant_in_its_request(guarded: tuple[TritonServer, Proxy]) -> None:
    _, proxy = guarded
    name = f"ledger-{uuid.uuid4().hex}"
    told = asyncio.run(_ask(proxy.grpc_url, "key-of-acme", turn_values("keep this", name, 4)))
    assert told.status == "ok", told.error
    ask: dict[str, Any] = {"stats": True, "conversation_id": name}
    for key in (None, "key-of-other"):
        stream = Stream(proxy.grpc_url, {"x-api-key": key} if key else None)
        stream.send("tensorrt_llm", [tensor(k, v) for k, v in ask.items()], commitkv_tenant="acme")
        with pytest.raises(Exception, match="expected one that is held"):
            stream.next()
        stream.close()
    # Over HTTP no header reaches the model: nobody has a tenant, and who has a key is sent away.
    claim = {"commitkv_tenant": "acme", "commitkv-tenant": "acme"}
    for model_says in (_status(proxy.http_url, "/generate", ask | claim), _status(proxy.http_url, "/generate", ask)):
        assert model_says in (400, 404)
    assert _status(proxy.http_url, "/generate", ask, {"x-api-key": "key-of-acme"}) == 403
    greeting = {"text_input": "hi", "sampling_param_max_tokens": 2}
    assert _status(proxy.http_url, "/generate", greeting | claim) == 200


def test_the_secret_is_in_a_configuration_that_nginx_does_not_serve(guarded: tuple[TritonServer, Proxy]) -> None:
    server, proxy = guarded
    with urllib.request.urlopen(f"http://{server.http_url}/v2/models/tensorrt_llm/config", timeout=10) as reply:
        assert b"commitkv_tenant_changeme" in reply.read()
    assert _status(proxy.http_url, "/config") == 404 and _status(proxy.http_url, "") == 200
    client = grpcclient.InferenceServerClient(proxy.grpc_url)
    assert client.get_model_metadata("tensorrt_llm").name == "tensorrt_llm"
    with pytest.raises(grpcclient.InferenceServerException, match="not served to clients"):
        client.get_model_config("tensorrt_llm")
    client.close()


def test_a_key_opens_its_tenants_conversations_only(guarded: tuple[TritonServer, Proxy]) -> None:
    name = f"ledger-{uuid.uuid4().hex}"
    proxy = guarded[1]

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

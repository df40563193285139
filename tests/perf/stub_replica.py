"""A server that speaks Triton's two protocols and says who answered: what a proxy does is seen from there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from perf.ports import free_ports
from perf.proxy import HOST, Replica

WAIT_S = 10.0


class StubReplica:
    """Says its name and what it was told of the tenant; a request of the id "slow" gets its second piece at `go`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Event()
        self._grpc_port, self._http_port = free_ports(HOST, 2)
        self.replica = Replica(f"{HOST}:{self._grpc_port}", f"{HOST}:{self._http_port}")
        self.start()

    def start(self) -> None:
        self._grpc = grpc.server(ThreadPoolExecutor(16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(self), self._grpc)
        assert self._grpc.add_insecure_port(self.replica.grpc_url) == self._grpc_port
        self._grpc.start()
        self._http = ThreadingHTTPServer((HOST, self._http_port), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self._grpc.stop(0).wait()
        self._http.shutdown()
        self._http.server_close()


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, stub: StubReplica) -> None:
        self._stub = stub

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        told = {key: str(value) for key, value in context.invocation_metadata() if key.startswith("commitkv")}
        for request in requests:
            answer = service_pb2.ModelInferResponse(model_name=self._stub.name, model_version=json.dumps(told))
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)
            if request.id == "slow":
                self._stub.go.wait(WAIT_S)
                yield service_pb2.ModelStreamInferResponse(infer_response=answer)

    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def LogSettings(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.LogSettingsResponse()


def _handler(stub: StubReplica) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            said = {"replica": stub.name}
            if self.path.endswith("generate_stream"):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(b"data: first\n\n")
                stub.go.wait(WAIT_S)
                self.wfile.write(b"data: second\n\n")
                self.close_connection = True
            else:
                self._answer(json.dumps(said).encode())

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    return Handler

"""`python -m perf.load.fuzz --requests 20000`: malformed and random requests against a real server.

Most go over gRPC as raw messages, so that nothing on the client's side refuses them, the rest as JSON over HTTP. Each
must be answered with a result or an error; the server, its model's process and its answers must be the same afterwards;
and with every conversation ended, the KV memory must be empty. Exit code 0 only then. The same seed sends the same.
A server given by --url gets no whole chats without a conversation id: it may keep them for a while.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
from tqdm import tqdm
from tritonclient.grpc import service_pb2, service_pb2_grpc

from perf.load.command import add_server_arguments, exit_code, host_and_port, own_server, target_of, verdict
from perf.load.fuzz_cases import FuzzBody, FuzzCase, FuzzRequest, FuzzTensor, batches, grpc_requests, http_bodies, pack
from perf.load.soak import end_and_look
from perf.load.turn_stream import Requests, Target
from perf.server import MODEL_NAME, REPO_ROOT
from runtime.errors import ConfigError
from runtime.serving.contract import TENANT_PARAMETER

ANSWER_TIMEOUT_S = 120.0
AT_ONCE = 16
HTTP_SHARE = 0.1
MAX_IDLE_S = 10.0
MOST_KEPT = 20
REFERENCE = {"text_input": "The capital of France is", "sampling_param_max_tokens": 8}
Conversation = tuple[str, str]  # (id, tenant)


@dataclass(frozen=True)
class Reply:
    """kind: "result", "error" (the request's own fault), or what must not be: "internal", "unanswered", "broken"."""

    kind: str
    text: str = ""
    conversation: str = ""


@dataclass(frozen=True)
class FuzzReport:
    """faults: the first requests that were answered badly or not at all, as they can be read, with what came back."""

    requests: int
    seconds: float
    replies: Mapping[str, int]
    faults: tuple[str, ...] = ()
    same_answer: bool = True
    same_processes: bool = True
    left_behind: Mapping[str, int] = field(default_factory=dict)

    @property
    def failures(self) -> tuple[str, ...]:
        bad = [f"{count} requests: {kind}" for kind, count in self.replies.items() if kind not in ("result", "error")]
        if sum(self.replies.values()) != self.requests:
            bad.append(f"{self.requests} requests, but {sum(self.replies.values())} replies")
        if not self.same_answer:
            bad.append("a plain prompt is answered otherwise than before")
        if not self.same_processes:
            bad.append("the server or its model's process is another one, or gone")
        return (*bad, *(f"left behind: {count} {name}" for name, count in self.left_behind.items() if count))


def message_of(request: FuzzRequest) -> Any:
    """The gRPC message, checked by nobody. Text that protobuf cannot carry travels with "?" in it."""
    message = service_pb2.ModelInferRequest(
        model_name=MODEL_NAME, model_version=request.model_version, id=_sendable(request.request_id)
    )
    for tensor in request.tensors:
        one = message.inputs.add(name=_sendable(tensor.name), datatype=tensor.dtype)
        one.shape.extend(tensor.shape)
        message.raw_input_contents.append(tensor.contents)
    if request.surplus is not None:
        message.raw_input_contents.append(request.surplus)
    if request.lacks_last and message.raw_input_contents:
        del message.raw_input_contents[-1]
    for name in request.outputs:
        message.outputs.add(name=name)
    for key, value in request.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(message.parameters[_sendable(key)], kind, _sendable(value) if isinstance(value, str) else value)
    return message


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


class Sender:
    """Sends cases over one gRPC channel, and to `http` if there is one."""

    def __init__(self, channel: Any, http: tuple[str, int] | None) -> None:
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._http = http
        self._places = asyncio.Semaphore(AT_ONCE)

    async def send(self, case: FuzzCase) -> Reply:
        async with self._places:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    return await (self._send_grpc(case) if isinstance(case, FuzzRequest) else self._send_http(case))
            except TimeoutError:
                return Reply("unanswered", f"nothing within {ANSWER_TIMEOUT_S:g} s")
            except OSError as error:
                return Reply("broken", str(error))

    async def _send_grpc(self, request: FuzzRequest) -> Reply:
        conversation = ""
        try:
            async for reply in self._stub.ModelStreamInfer(_once(message_of(request))):
                if reply.error_message:
                    return _error(reply.error_message)
                conversation = _conversation_of(reply.infer_response) or conversation
                if reply.infer_response.parameters["triton_final_response"].bool_param:
                    return Reply("result", conversation=conversation)
        except grpc.aio.AioRpcError as error:
            gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
            return Reply("broken" if gone else "error", f"{error.code().name}: {error.details()}")
        return Reply("unanswered", "the stream ended before the last response")

    async def _send_http(self, case: FuzzBody) -> Reply:
        assert self._http is not None
        reader, writer = await asyncio.open_connection(*self._http)
        head = (
            f"POST /v2/models/{MODEL_NAME}/{case.path} HTTP/1.1\r\nHost: fuzz\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(case.body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + case.body)
            await writer.drain()
            reply = await reader.read(-1)
        finally:
            writer.close()
        status = reply.split(b" ", 2)[1:2]
        if not status or not status[0].isdigit():
            return Reply("unanswered", f"no status line: {reply[:80]!r}")
        text = reply.decode("utf-8", "replace")
        if status[0] != b"200" or '"error"' in text:
            return _error(text)
        drawn = re.search(r'"conversation_id":"([^"]+)"', text)
        return Reply("result", conversation=drawn[1] if drawn else "")


async def _once(message: Any) -> Any:
    yield message


def _error(text: str) -> Reply:
    return Reply("internal" if "internal error" in text.lower() else "error", text)


def _conversation_of(response: Any) -> str:
    """The id of a conversation that the server named itself."""
    for output, contents in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.name == "conversation_id" and len(contents) > 4:
            return str(contents[4:].decode("utf-8"))
    return ""


def conversations_of(cases: Iterable[FuzzCase], replies: Iterable[Reply]) -> set[Conversation]:
    """What those cases may have begun: by the ids that they sent, and that the server drew."""
    found: set[Conversation] = set()
    for case, reply in zip(cases, replies, strict=True):
        tenant = str(case.parameters.get(TENANT_PARAMETER, "")) if isinstance(case, FuzzRequest) else ""
        found |= {(name, tenant) for name in (*_named(case), reply.conversation) if name}
    return found


def _named(case: FuzzCase) -> list[str]:
    """The conversation ids that a case holds."""
    if isinstance(case, FuzzRequest):
        return [t.contents[4:].decode("utf-8", "replace") for t in case.tensors if t.name == "conversation_id"]
    try:
        record = json.loads(case.body)
    except ValueError:
        return []
    name = record.get("conversation_id") if isinstance(record, dict) else None
    return [name] if isinstance(name, str) else []


def is_unnamed_chat(case: FuzzCase) -> bool:
    """A whole chat without an id: the server may keep it for a while, and nobody can end it."""
    if isinstance(case, FuzzRequest):
        names = {tensor.name for tensor in case.tensors}
        return "messages" in names and "conversation_id" not in names
    return b'"messages"' in case.body and b'"conversation_id"' not in case.body


def cases_of(count: int, seed: int, *, with_http: bool) -> Iterable[Sequence[FuzzCase]]:
    """`count` cases in lists; the same seed gives the same ones."""
    over_http = round(count * HTTP_SHARE) if with_http else 0
    yield from batches(grpc_requests(), count - over_http, seed)
    yield from batches(http_bodies(), over_http, seed)


async def fuzz(
    target: Target, http: tuple[str, int] | None, count: int, seed: int, *, unnamed: bool = True
) -> FuzzReport:
    """Sends `count` cases and looks at the server afterwards. unnamed: also whole chats without an id, which only a
    server with a short `max_idle_s` has ended by then; else those are left out."""
    replies: Counter[str] = Counter()
    faults: list[str] = []
    begun: set[Conversation] = set()
    sent = 0
    begin = time.monotonic()
    async with Requests(target) as requests, grpc.aio.insecure_channel(target.url) as channel:
        before = await requests.ask(REFERENCE)
        sender = Sender(channel, http)
        with tqdm(total=count, unit="request", desc="fuzz", file=sys.stdout) as bar:
            for batch in cases_of(count, seed, with_http=http is not None):
                cases = [case for case in batch if unnamed or not is_unnamed_chat(case)]
                answers = await asyncio.gather(*map(sender.send, cases))
                replies.update(answer.kind for answer in answers)
                bad = [(c, a) for c, a in zip(cases, answers, strict=True) if a.kind not in ("result", "error")]
                faults += [f"{answer.kind}: {answer.text}\n    {case!r}" for case, answer in bad]
                begun |= conversations_of(cases, answers)
                sent += len(cases)
                bar.update(len(batch))
        await asyncio.gather(*(sender.send(end_request(name, tenant)) for name, tenant in begun))
        left_behind = await end_and_look(requests, ())
        after = await requests.ask(REFERENCE)
    return FuzzReport(
        requests=sent,
        seconds=time.monotonic() - begin,
        replies=dict(replies),
        faults=tuple(faults[:MOST_KEPT]),
        same_answer=before.status == after.status == "ok" and before.text == after.text,
        left_behind=left_behind,
    )


def end_request(name: str, tenant: str) -> FuzzRequest:
    """Ends one conversation of a tenant ("": requests that name none)."""
    contents = pack("BYTES", [name.encode("utf-8", "replace")])
    tensors = (
        FuzzTensor("conversation_end", "BOOL", (1,), b"\x01"),
        FuzzTensor("conversation_id", "BYTES", (1,), contents),
    )
    return FuzzRequest(tensors, parameters={TENANT_PARAMETER: tenant} if tenant else {})


def text_of(report: FuzzReport) -> str:
    """The report in lines."""
    replies = ", ".join(f"{count} {kind}" for kind, count in sorted(report.replies.items()))
    left = ", ".join(f"{count} {name}" for name, count in report.left_behind.items())
    return "\n".join(
        [
            f"{report.requests} requests in {report.seconds:.0f} s: {replies}",
            f"same processes: {report.same_processes}, a plain prompt answered as before: {report.same_answer}",
            f"left behind: {left}",
            *(f"  {fault}" for fault in report.faults),
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.load.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    add_server_arguments(parser, kv_mib=256)
    parser.add_argument("--output", type=Path, default=REPO_ROOT / "out" / "fuzz", help="(%(default)s)")
    return parser


def _processes(pid: int) -> Sequence[int]:
    """The server and what it started, as process ids."""
    try:
        server = psutil.Process(pid)
        return sorted([pid, *(child.pid for child in server.children(recursive=True))])
    except psutil.NoSuchProcess:
        return ()


def _report(args: argparse.Namespace) -> FuzzReport:
    if args.url:
        http = host_and_port(args.http_url) if args.http_url else None
        return asyncio.run(fuzz(target_of(args.url, args), http, args.requests, args.seed, unnamed=False))
    # Whole chats without an id stay held until they have been idle for so long: nobody can end them.
    with own_server(args, max_idle_s=str(MAX_IDLE_S)) as server:
        before = _processes(server.pid)
        http = host_and_port(server.http_url)
        report = asyncio.run(fuzz(target_of(server.grpc_url, args), http, args.requests, args.seed))
        lives = server.returncode is None and _processes(server.pid) == before
    return replace(report, same_processes=lives)


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises CommitKVError."""
    if args.requests < 1:
        raise ConfigError(f"--requests: got {args.requests}, expected at least 1; pass a larger number")
    args.output.mkdir(parents=True, exist_ok=True)
    report = _report(args)
    (args.output / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return verdict("fuzz", f"{text_of(report)}\nwritten: {args.output}/report.json", report.failures)


def main(argv: list[str] | None = None) -> int:
    return exit_code(run, _parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())

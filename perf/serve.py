"""`python -m perf.serve`: run a Triton server with an engine in the foreground until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from perf.limits import add_limit_arguments, limit_parameters
from perf.request_trace import request_trace_arguments
from perf.server import REPO_ROOT, ServerOptions, TritonServer
from perf.supervise import POLL_S, Supervisor, death
from runtime.config import DEVICES
from runtime.errors import CommitKVError, ConfigError
from runtime.policy.policy_file import is_policy_file
from runtime.serving.logs import LEVELS

DEFAULT_ENGINE = REPO_ROOT / "engines" / "smollm2-135m"
DEFAULT_KV_MIB = 1024
MAX_GRACE_S = 86400


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments every command that starts a server shares."""
    parser.add_argument("--engine", type=Path, default=DEFAULT_ENGINE, help="engine directory (%(default)s)")
    parser.add_argument("--kv-mib", type=int, default=DEFAULT_KV_MIB, help="KV memory in MiB (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="threads of the model, 0: all cores (%(default)s)")


def server_options(
    engine: Path, kv_mib: int, threads: int = 0, policy: str | None = None, log_path: Path | None = None
) -> ServerOptions:
    """Options with the model parameters of an engine. Raises ConfigError for an engine that is not there."""
    if not engine.is_dir():
        raise ConfigError(
            f"--engine: no directory {engine}, expected one written by the builder; run `python builder/build.py` first"
        )
    if kv_mib < 1:
        raise ConfigError(f"--kv-mib: got {kv_mib}, expected at least 1; pass the MiB that KV caches may take")
    if threads < 0:
        raise ConfigError(f"--threads: got {threads}, expected 0 (all cores) or more; pass a number of threads")
    parameters = {
        "engine_dir": str(engine.resolve()),
        "kv_memory_bytes": str(kv_mib << 20),
        "num_threads": str(threads),
    }
    if policy:
        parameters["default_policy"] = str(Path(policy).resolve()) if is_policy_file(policy) else policy
    return ServerOptions(parameters=parameters, log_path=log_path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.serve", description=__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="what runs the engine; engines built with "
        "--target trt need cuda (%(default)s)")  # fmt: skip
    parser.add_argument("--policy", help="policy of conversations that name none, or a policy file (the engine's own)")
    parser.add_argument("--trace", type=Path, help="new file for a record of every commit, see perf.trace (none)")
    parser.add_argument("--checkpoints", metavar="URL", default="", help="folder or fsspec URL that keeps "
        "conversations between turns: a restarted server, or another one, goes on with them (none)")  # fmt: skip
    parser.add_argument("--checkpoint-wait-s", type=float, default=0.0, metavar="S", help="an answer's end waits so "
        "long at most for its checkpoint: no crash loses what a client was told (%(default)s: not at all)")  # fmt: skip
    parser.add_argument("--restart", action="store_true", help="start again when the server or its model dies")
    parser.add_argument("--request-trace", metavar="TARGET", help="Triton's times of requests: a file name, or the URL "
        "of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces (none)")  # fmt: skip
    parser.add_argument("--request-trace-every", type=int, default=1, metavar="N", help="trace each N-th (%(default)s)")
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="of the model's JSON lines (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, help="0: any free one (%(default)s)")
    parser.add_argument("--grpc-port", type=int, default=8001, help="0: any free one (%(default)s)")
    parser.add_argument("--metrics-port", type=int, default=8002, help="0: any free one (%(default)s)")
    parser.add_argument("--grace-s", type=float, default=30.0, help="time for running turns at a stop (%(default)s)")
    parser.add_argument("--log", type=Path, default=REPO_ROOT / "out" / "serve" / "server.log", help="(%(default)s)")
    add_limit_arguments(parser)
    return parser


def _options(args: argparse.Namespace) -> ServerOptions:
    base = server_options(args.engine, args.kv_mib, args.threads, args.policy, args.log)
    if not 0 <= args.grace_s <= MAX_GRACE_S:
        raise ConfigError(f"--grace-s: got {args.grace_s}, expected 0 to {MAX_GRACE_S} seconds; pass another number")
    trace = {} if args.trace is None else {"trace_file": str(args.trace.resolve())}
    kept = {"checkpoint_url": _absolute(args.checkpoints), "checkpoint_wait_s": str(args.checkpoint_wait_s)}
    own = {"device": args.device, "grace_s": str(args.grace_s), "log_level": args.log_level}
    return ServerOptions(
        parameters={**base.parameters, **trace, **kept, **limit_parameters(args), **own},
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        grace_s=args.grace_s,
        log_path=args.log,
        arguments=request_trace_arguments(args.request_trace, args.request_trace_every),
    )


def _absolute(url: str) -> str:
    """A folder by its full path: the model's process has a working directory of its own."""
    return url if "://" in url or not url else str(Path(url).resolve())


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())

    def ready(server: TritonServer) -> None:
        print(
            f"ready: gRPC {server.grpc_url}  HTTP http://{server.http_url}  "
            f"metrics http://{server.metrics_url}/metrics  log {args.log}\nCtrl-C stops it",
            flush=True,
        )

    try:
        options = _options(args)
        print(f"starting Triton with {args.engine} ...", flush=True)
        if args.restart:
            Supervisor(options, lambda line: print(f"warning: {line}", file=sys.stderr, flush=True)).run(
                stopping, ready
            )
            return 0
        with TritonServer(options) as server:
            ready(server)
            while not stopping.wait(POLL_S) and server.returncode is None:
                pass
            if server.returncode is not None:
                print(f"error: {death(server, args.log)}", file=sys.stderr)
                return 1
            print("stopping: running turns may finish", flush=True)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

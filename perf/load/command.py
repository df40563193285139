"""What the commands of this folder share: a server of their own or one that is up already, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from perf.load.turn_stream import Target
from perf.serve import DEFAULT_ENGINE, server_options
from perf.server import TritonServer
from runtime.errors import CommitKVError, ConfigError


class ToolError(CommitKVError):
    """A tool that is not installed, or that failed."""


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """How to reach a server that is up already."""
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="sent with every stream")
    parser.add_argument("--tls", action="store_true", help="encrypt the connection to --url")


def add_server_arguments(parser: argparse.ArgumentParser, kv_mib: int) -> None:
    """--url and --http-url of a server that is up already, or what an own one needs."""
    parser.add_argument("--url", help="HOST:PORT of a server's gRPC endpoint (start an own one)")
    parser.add_argument("--http-url", help="with --url: HOST:PORT of its HTTP endpoint, for what goes over HTTP")
    add_target_arguments(parser)
    parser.add_argument("--engine", type=Path, default=DEFAULT_ENGINE, help="of an own server (%(default)s)")
    parser.add_argument("--kv-mib", type=int, default=kv_mib, help="of an own server (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="of an own server, 0: all cores (%(default)s)")


def target_of(url: str, args: argparse.Namespace) -> Target:
    """Raises ConfigError for a header without a colon."""
    headers = {}
    for header in args.header:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--header: got {header!r}, expected NAME:VALUE; write it so")
        headers[name.strip().lower()] = value.strip()
    return Target(url, headers, args.tls)


def host_and_port(url: str) -> tuple[str, int]:
    """Raises ConfigError unless it is HOST:PORT."""
    host, colon, port = url.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"--http-url: got {url!r}, expected HOST:PORT; write it so")
    return host, int(port)


def own_server(args: argparse.Namespace, **parameters: str) -> TritonServer:
    """A server with the engine of `args`, not started yet; its log goes beside the report. Raises ConfigError."""
    options = server_options(args.engine, args.kv_mib, args.threads, None, args.output / "server.log")
    return TritonServer(replace(options, parameters={**options.parameters, **parameters}))


def check_tool(name: str, binary: Path) -> None:
    """Raises ToolError when it is not there."""
    if not binary.is_file():
        raise ToolError(f"{name}: not found at {binary}; run `make load-tools`, or pass --binary")


def verdict(name: str, text: str, failures: Sequence[str]) -> int:
    """Prints a report, and what the run has to be refused for. Returns the exit code."""
    print(text)
    for failure in failures:
        print(f"error: {name}: {failure}", file=sys.stderr)
    return 1 if failures else 0


def exit_code(
    run: Callable[[argparse.Namespace], int], args: argparse.Namespace, stopped: str = "an own server is stopped"
) -> int:
    """Runs a command; its errors, and Ctrl-C, become one line and a code.   stopped: what the line says of Ctrl-C."""
    try:
        return run(args)
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; {stopped}", file=sys.stderr)
        return 130

"""TCP ports for servers that are about to start: given ones checked, free ones found."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from runtime.errors import ConfigError


def check_port(name: str, host: str, port: int) -> None:
    """Raises ConfigError when nobody can listen on `port`, before anything is started."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{name}: got {port}, expected 0 (any free port) to 65535; pass another number")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{name}: cannot listen on {host}:{port} ({error.strerror}); stop the program that holds the port, "
                "or pass another one (0 picks a free one)"
            ) from error


def free_ports(host: str, count: int) -> list[int]:
    """`count` different free ports; all are held until the last is known."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def choose_ports(host: str, wanted: Mapping[str, int]) -> dict[str, int]:
    """By name: the given ports, checked, or free ones where 0 is wanted. Raises ConfigError."""
    given = [port for port in wanted.values() if port]
    if len(set(given)) != len(given):
        raise ConfigError(f"ports: got {wanted}, expected different ones; change one or pass 0")
    for name, port in wanted.items():
        check_port(f"{name} port", host, port)
    spare = iter([p for p in free_ports(host, 2 * len(wanted)) if p not in given])
    return {name: port or next(spare) for name, port in wanted.items()}

"""What the load kit's commands share: how they end, and the server that they speak to."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from perf.load.command import (
    ToolError,
    add_server_arguments,
    check_tool,
    exit_code,
    host_and_port,
    own_server,
    target_of,
    verdict,
)
from runtime.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_arguments(parser, kv_mib=64)
    parser.add_argument("--output", type=Path, default=Path("out"))
    return parser.parse_args(words)


def test_an_own_server_has_the_engine_and_the_parameters(tmp_path: Path) -> None:
    server = own_server(parsed("--engine", str(tmp_path), "--threads", "2"), max_idle_s="10")
    parameters = server.options.parameters
    assert parameters["engine_dir"] == str(tmp_path) and parameters["num_threads"] == "2"
    assert parameters["kv_memory_bytes"] == str(64 << 20) and parameters["max_idle_s"] == "10"
    assert server.options.log_path == Path("out/server.log") and server.returncode is None
    with pytest.raises(ConfigError, match="--engine"):
        own_server(parsed("--engine", str(tmp_path / "none")))


def test_addresses_have_a_host_and_a_port() -> None:
    assert host_and_port("127.0.0.1:8000") == ("127.0.0.1", 8000)
    for bad in ("8000", "host:", "host:http"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            host_and_port(bad)


def test_headers_go_to_the_target() -> None:
    target = target_of("h:1", parsed("--header", "X-Key: a:b", "--tls"))
    assert target.url == "h:1" and dict(target.headers) == {"x-key": "a:b"} and target.tls
    for bad in ("no colon", ":value"):
        with pytest.raises(ConfigError, match="NAME:VALUE"):
            target_of("h:1", parsed("--header", bad))


def test_a_tool_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    check_tool("x", Path(__file__))
    with pytest.raises(ToolError, match=r"x: not found at .*make load-tools"):
        check_tool("x", tmp_path)


def test_a_command_ends_with_a_line_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(args: argparse.Namespace) -> int:
        raise ConfigError("--x: no")

    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    args = argparse.Namespace()
    assert exit_code(lambda _: verdict("fuzz", "fine", ()), args) == 0
    assert exit_code(lambda _: verdict("fuzz", "poor", ("2 lost", "1 left")), args) == 1
    shown = capsys.readouterr()
    assert shown.out == "fine\npoor\n" and shown.err == "error: fuzz: 2 lost\nerror: fuzz: 1 left\n"
    assert exit_code(refused, args) == 1 and capsys.readouterr().err == "error: --x: no\n"
    assert exit_code(interrupted, args, "all is stopped") == 130
    assert capsys.readouterr().err == "\ninterrupted; all is stopped\n"

import socket

import pytest

from perf.ports import choose_ports
from runtime.errors import ConfigError

HOST = "127.0.0.1"
ANY = {"http": 0, "grpc": 0, "metrics": 0}


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_free_ports_are_three_different_ones() -> None:
    ports = choose_ports(HOST, ANY)
    assert len(set(ports.values())) == 3 and all(ports.values())


def test_given_ports_are_kept() -> None:
    free = choose_ports(HOST, ANY)["http"]
    assert choose_ports(HOST, {**ANY, "http": free})["http"] == free


def test_a_port_in_use_is_one_clear_error(taken_port: int) -> None:
    with pytest.raises(ConfigError, match=f"grpc port: cannot listen on 127.0.0.1:{taken_port}"):
        choose_ports(HOST, {**ANY, "grpc": taken_port})


@pytest.mark.parametrize(("http", "grpc"), [(-1, 0), (70000, 0), (8123, 8123)])
def test_absurd_ports_are_refused(http: int, grpc: int) -> None:
    with pytest.raises(ConfigError, match="expected"):
        choose_ports(HOST, {**ANY, "http": http, "grpc": grpc})

"""Flags of `perf.serve` that become RuntimeConfig."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from perf.limits import add_limit_arguments, limit_parameters
from runtime.config import RuntimeConfig
from runtime.errors import ConfigError


def parse(*argv: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    add_limit_arguments(parser)
    return limit_parameters(parser.parse_args(argv))


def test_every_flag_is_a_field_and_keeps_its_default() -> None:
    parameters = parse()
    assert parameters.pop("max_step_ms") == "250.0"  # a server bounds what a library does not
    assert parameters.pop("tenant_parameter") == "commitkv_tenant"
    config = RuntimeConfig()
    assert {name: type(getattr(config, name))(text) for name, text in parameters.items()} == {
        name: getattr(config, name) for name in parameters
    }


def test_values_and_the_salt_go_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = parse("--max-idle-s", "600", "--max-tenant-waiting", "8", "--id-salt-file", "salt")
    assert (parameters["max_idle_s"], parameters["max_tenant_waiting"]) == ("600.0", "8")
    assert parameters["id_salt_file"] == str(tmp_path / "salt"), "the model's process has a directory of its own"


def test_a_secret_name_for_the_tenant_goes_through_and_is_checked() -> None:
    assert parse("--tenant-parameter", "commitkv_tenant_5ecret")["tenant_parameter"] == "commitkv_tenant_5ecret"
    with pytest.raises(ConfigError, match="tenant_parameter: got 'x-tenant'"):
        parse("--tenant-parameter", "x-tenant")


@pytest.mark.parametrize("flag", ["--max-idle-s", "--max-step-ms", "--max-conversation-bytes"])
def test_what_no_server_takes_is_refused_before_it_starts(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag[2:].replace("-", "_")):
        parse(flag, "-1")

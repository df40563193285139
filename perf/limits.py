"""Command-line flags for what tenants and conversations may take; they become model parameters of the same names."""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.config import RuntimeConfig
from runtime.serving.contract import TENANT_PARAMETER, check_tenant_parameter

# A server has somebody waiting for every token.
MAX_STEP_MS = 250.0
# Field of RuntimeConfig -> (kind, the server's default where it is not the field's own, help)
_FLAGS: dict[str, tuple[type, float | None, str]] = {
    "max_conversations": (int, None, "conversations held at once"),
    "max_tenant_conversations": (int, None, "the same for one tenant, 0: no bound of its own"),
    "max_conversation_bytes": (int, None, "KV memory of one conversation, 0: all there is"),
    "max_idle_s": (float, None, "a conversation ends after so long without a turn, 0: never"),
    "max_waiting": (int, None, "turns that may wait"),
    "max_tenant_waiting": (int, None, "the same for one tenant, 0: no bound of its own"),
    "max_tenant_running": (int, None, "places in the batch for one tenant while others run, 0: all"),
    "max_step_ms": (float, MAX_STEP_MS, "longest step beside which a prompt is read while others decode, 0: any"),
}


def add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each limit, --id-salt-file and --tenant-parameter."""
    group = parser.add_argument_group("limits")
    defaults = RuntimeConfig()
    for name, (kind, default, text) in _FLAGS.items():
        value = getattr(defaults, name) if default is None else default
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help=f"{text} (%(default)s)")
    group.add_argument("--id-salt-file", type=Path, metavar="FILE", help="secret that signs conversation ids: the "
        "server gives them out and takes no others (none: clients may choose their own)")  # fmt: skip
    group.add_argument("--tenant-parameter", default=TENANT_PARAMETER, metavar="NAME", help="header, or request "
        "parameter, that names the tenant; with a secret behind it (%(default)s_SECRET) only who knows the secret can "
        "name one (%(default)s)")  # fmt: skip


def limit_parameters(args: argparse.Namespace) -> dict[str, str]:
    """Model parameters. Raises ConfigError for values that no server takes."""
    values = {name: getattr(args, name) for name in _FLAGS}
    RuntimeConfig(**values)
    check_tenant_parameter(args.tenant_parameter)
    salt = {} if args.id_salt_file is None else {"id_salt_file": str(args.id_salt_file.resolve())}
    tenant = {"tenant_parameter": args.tenant_parameter}
    return {name: str(value) for name, value in values.items()} | salt | tenant

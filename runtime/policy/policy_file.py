"""A policy in a file: what `perf.calibrate` writes and the builder, the server and engines take.

JSON: {"format_version": 1, "name": "...",
       "model": {"name", "num_layers", "num_kv_heads", "head_dim"},   the model it was chosen for; others are refused
       "base": a registered policy, "changes": {field: value, "schedule": {...}, "protection": {...}, "signals": {...}},
       "calibration": whatever was measured; not read}

Fields that a file can change are those of `Policy` with plain values; see `runtime.policy.base`.
"""

from __future__ import annotations

import json
import math
import re
import types
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from runtime.config import ModelSpec
from runtime.errors import CommitKVError, ConfigError
from runtime.policy.base import Policy, Protection, Schedule
from runtime.policy.check import base_name
from runtime.policy.registry import ALL_POLICIES, get_policy
from runtime.policy.signals import Signals

FORMAT_VERSION = 1
POLICY_FILE = "policy.json"
"""Name inside an engine directory."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PLAIN = (bool, int, float, str)
_GROUPS: dict[str, type[Schedule] | type[Protection] | type[Signals]] = {
    "schedule": Schedule, "protection": Protection, "signals": Signals,
}  # fmt: skip
_FIELDS = ("format_version", "name", "model", "base", "changes")

R = TypeVar("R", Policy, Schedule, Protection, Signals)


@dataclass(frozen=True)
class PolicyModel:
    """The model that a policy was chosen for."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, spec: ModelSpec) -> PolicyModel:
        return cls(base_name(spec.name), spec.num_layers, spec.num_kv_heads, spec.head_dim)


@dataclass(frozen=True)
class PolicyFile:
    """changes: as in the file; `policy` is `base` with them applied, called `name`."""

    name: str
    model: PolicyModel
    base: str
    changes: dict[str, Any]
    policy: Policy


def is_policy_file(text: str) -> bool:
    """Whether the text that names a policy is the path of a file."""
    return text.endswith(".json")


def make_policy_file(name: str, spec: ModelSpec, base: str, changes: dict[str, Any]) -> PolicyFile:
    """Raises ConfigError or UnknownPolicyError naming the field."""
    return _policy_file(name, PolicyModel.of(spec), base, changes)


def write_policy_file(path: Path, file: PolicyFile, calibration: dict[str, Any]) -> None:
    """calibration: JSON that tells how it was found, for people."""
    record = {
        "format_version": FORMAT_VERSION,
        "name": file.name,
        "model": {field.name: getattr(file.model, field.name) for field in fields(PolicyModel)},
        "base": file.base,
        "changes": file.changes,
        "calibration": calibration,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_policy_file(path: Path) -> PolicyFile:
    """Raises ConfigError naming the file and the field."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"policy file {path}: cannot be read ({error.strerror}); pass a readable file") from error
    except ValueError as error:
        raise ConfigError(f"policy file {path}: {error}, expected JSON; write it with perf.calibrate") from error
    try:
        return _parse(data)
    except CommitKVError as error:
        raise ConfigError(f"policy file {path}: {error}") from error


def load_policy(path: Path, spec: ModelSpec) -> Policy:
    """The file's policy, known by its name from now on. Raises ConfigError, for a file of another model too."""
    file = read_policy_file(path)
    ours = PolicyModel.of(spec)
    for field in fields(PolicyModel):
        theirs, mine = getattr(file.model, field.name), getattr(ours, field.name)
        if theirs != mine:
            raise ConfigError(
                f"policy file {path}: model.{field.name} is {theirs!r}, expected {mine!r} of this engine: it was "
                f"chosen for another model; calibrate this one with perf.calibrate"
            )
    try:
        return add_policy(file.policy)
    except ConfigError as error:
        raise ConfigError(f"policy file {path}: {error}") from error


def add_policy(policy: Policy) -> Policy:
    """Lets requests of this process name the policy. Raises ConfigError for a name that means another one."""
    known = ALL_POLICIES.setdefault(policy.name, policy)
    if known != policy:
        raise ConfigError(f"name: {policy.name!r} is another policy already, expected a name of its own; choose one")
    return known


def _parse(data: Any) -> PolicyFile:
    record = _object(data, "the file")
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise ConfigError(f"format_version: got {version!r}, expected {FORMAT_VERSION}; calibrate again")
    for name in _FIELDS:
        if name not in record:
            raise ConfigError(f"{name}: is missing, expected the fields {', '.join(_FIELDS)}; calibrate again")
    for name in record:
        if name not in (*_FIELDS, "calibration"):
            raise ConfigError(f"{name}: unknown, expected the fields {', '.join(_FIELDS)}; remove it")
    known = get_type_hints(PolicyModel)
    model = _object(record["model"], "model")
    for name in {*known, *model}:
        if name not in model or name not in known:
            raise ConfigError(f"model.{name}: missing or unknown, expected {', '.join(known)}; calibrate again")
    values = {name: _value(hint, model[name], f"model.{name}") for name, hint in known.items()}
    base = _value(str, record["base"], "base")
    return _policy_file(
        _value(str, record["name"], "name"), PolicyModel(**values), base, _object(record["changes"], "changes")
    )


def _policy_file(name: str, model: PolicyModel, base: str, changes: dict[str, Any]) -> PolicyFile:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name: got {name!r}, expected lower-case letters, digits and . _ -; choose such a name")
    policy = replace(_changed(get_policy(base), changes, "changes"), name=name)
    return PolicyFile(name, model, base, dict(changes), policy)


def _changed(record: R, changes: dict[str, Any], where: str) -> R:
    """`record` with fields of plain values changed, those of its groups too."""
    hints = get_type_hints(type(record))
    values: dict[str, Any] = {}
    for name, value in changes.items():
        if name in _GROUPS and isinstance(record, Policy):
            values[name] = _changed(getattr(record, name), _object(value, f"{where}.{name}"), f"{where}.{name}")
        elif name == "name" or name not in hints or not _is_plain(hints[name]):
            known = ", ".join(n for n, hint in hints.items() if n != "name" and (_is_plain(hint) or n in _GROUPS))
            raise ConfigError(f"{where}.{name}: not a field that a file can change, expected one of {known}")
        else:
            values[name] = _value(hints[name], value, f"{where}.{name}")
    return replace(record, **values)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_plain(hint: Any) -> bool:
    return all(o in (*_PLAIN, type(None)) or get_origin(o) is Literal for o in _options(hint))


def _object(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: got {type(data).__name__}, expected a JSON object; correct it")
    return data


def _value(hint: Any, data: Any, where: str) -> Any:
    """`data` as one of the plain types of `hint`; true is no number and a whole number is a float."""
    for option in _options(hint):
        if option is float and type(data) in (int, float) and math.isfinite(data):
            return float(data)
        if (get_origin(option) is Literal and data in get_args(option)) or type(data) is option:
            return data
    names = ", ".join(getattr(option, "__name__", str(option)) for option in _options(hint))
    raise ConfigError(f"{where}: got {data!r:.60}, expected {names}; correct it")

"""Variants of a policy by name and JSON value, as a command line gives them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from plugins.commit.choices import Tier
from runtime.errors import ConfigError
from runtime.policy.base import Policy, Protection, Schedule, Thresholds
from runtime.policy.signals import Signals

Record = TypeVar("Record", Policy, Schedule, Protection, Signals)
_GROUPS: dict[str, type[Schedule] | type[Protection] | type[Signals]] = {
    "schedule": Schedule, "protection": Protection, "signals": Signals,
}  # fmt: skip
FIXED = ("name", "compresses", "gate", "merger", "alternate", "by_task", "chosen_from", *_GROUPS)
"""Fields that have no variants of their own; those of the groups are named schedule.x, protection.x, signals.x."""


def with_changes(policy: Policy, changes: dict[str, Any]) -> Policy:
    """`policy` with the given fields changed and its name kept.

    changes: field -> JSON value; "schedule.x", "protection.x" and "signals.x" name theirs;
        tiers: [[min_age, size, how, entries], ...]; thresholds: [calm, pressed, pressure] or null.
    Raises ConfigError naming the field.
    """
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    for field, value in changes.items():
        group, dot, inner = field.partition(".")
        if dot and group in parts:
            parts[group][inner] = value
        else:
            own[field] = value
    values: dict[str, Any] = {
        group: _changed(getattr(policy, group), inner, f"{group}.") for group, inner in parts.items() if inner
    }
    return _changed(policy, own | values, "", tuple(values))


def changeable() -> list[str]:
    """Names that `with_changes` takes."""
    names = [field.name for field in fields(Policy) if field.name not in FIXED]
    return names + [f"{group}.{f.name}" for group, record in _GROUPS.items() for f in fields(record)]


def _changed(record: Record, changes: dict[str, Any], prefix: str, made: tuple[str, ...] = ()) -> Record:
    """made: fields whose values are records already."""
    known = {field.name for field in fields(record)} - ({*FIXED} if isinstance(record, Policy) else set())
    for name in changes:
        if name not in known and name not in made:
            raise ConfigError(f"{prefix}{name}: unknown field, expected one of {', '.join(changeable())}")
    try:
        values = {name: value if name in made else _value(name, value) for name, value in changes.items()}
        return replace(record, **values)
    except (TypeError, ValueError, AttributeError) as error:
        given = ", ".join(f"{prefix}{name}={value!r}" for name, value in changes.items() if not is_dataclass(value))
        raise ConfigError(f"{given}: expected values of the fields' own types ({error})") from None


def _value(name: str, value: Any) -> Any:
    if name == "tiers":
        return tuple(Tier(*tier) for tier in value)
    if name == "thresholds":
        return None if value is None else Thresholds(*value)
    return tuple(value) if isinstance(value, list) else value

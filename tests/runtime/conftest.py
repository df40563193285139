"""Fixtures of replicas that share a store, see `replicas`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernel_engine import POLICIES, SPEC
from replicas import WAIT_S, Replica, small

from runtime.policy.registry import ALL_POLICIES, policies_for


@pytest.fixture
def small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All registered policies, made small."""
    for policy in [*policies_for(SPEC), *POLICIES.values()]:
        monkeypatch.setitem(ALL_POLICIES, policy.name, small(policy))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "kept")


@pytest.fixture
def replica(url: str, small_policies: None) -> Iterator[Callable[..., Replica]]:
    """Makes replicas that share a store."""
    made: list[Replica] = []

    def make(**options: object) -> Replica:
        made.append(Replica(url, **options))  # type: ignore[arg-type]
        if len(made) == 1:  # goes on as if there were no others, which are compared with it
            made[0].store.is_superseded = lambda key: False  # type: ignore[method-assign]
        return made[-1]

    yield make
    for one in made:
        one.check()
        one.engine.close(WAIT_S)

"""Changes by name reach the field they name; what cannot be is refused by that name."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.commit.choices import Tier
from runtime.errors import ConfigError
from runtime.policy.base import Policy, Thresholds
from runtime.policy.registry import ALL_POLICIES
from runtime.policy.variants import changeable, with_changes

BASE = ALL_POLICIES["commitkv"]


def test_fields_of_all_levels() -> None:
    policy = with_changes(BASE, {
        "budget_ratio": 0.5, "absorb_gate": None, "tiers": [[0, 5, "mean"], [1024, 20, "weighted"]],
        "thresholds": [0.1, 0.2, 0.9], "layer_scale": [1.0, 2.0], "schedule.warmup_tokens": 1000,
        "protection.names_and_numbers": True,
    })  # fmt: skip
    assert policy.tiers == (Tier(0, 5, "mean"), Tier(1024, 20, "weighted")) and policy.absorb_gate is None
    assert policy.thresholds == Thresholds(0.1, 0.2, 0.9) and policy.layer_scale == (1.0, 2.0)
    assert policy.schedule.warmup_tokens == 1000 and policy.schedule.recent_tokens == BASE.schedule.recent_tokens
    assert policy.protection.names_and_numbers and policy.name == BASE.name
    assert with_changes(BASE, {}) == BASE


@pytest.mark.parametrize(("changes", "message"), [
    ({"magic": 1}, "magic"),
    ({"schedule.magic": 1}, r"schedule\.magic"),
    ({"name": "x"}, "name"),
    ({"schedule": 3}, "schedule"),
    ({"budget_ratio": 0}, "budget_ratio"),
    ({"budget_ratio": "much"}, "budget_ratio"),
    ({"tiers": 5, "absorb_gate": None}, "tiers"),
    ({"tiers": [[0, 0]], "absorb_gate": None}, "size"),
    ({"tiers": [[0, 5, "median"]], "absorb_gate": None}, "median"),
    ({"tiers": [[0, 5]]}, "absorb_gate"),
    ({"tiers": [[9, 5], [0, 2]], "absorb_gate": None}, "rising"),
    ({"score": "magic"}, "score"),
    ({"share": "row"}, "share"),
    ({"layer_beta": 20.0}, "layer_beta"),
    ({"smooth": 4}, "odd"),
    ({"score": "gate"}, "gate"),
    ({"score": "recency", "redundancy": 0.1}, "redundancy"),
    ({"schedule.recent_tokens": 0}, "recent_tokens"),
    ({"block_format": "int3"}, "block_format"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_changes(BASE, changes)


def test_which_policies_have_a_budget() -> None:
    without = {name for name, policy in ALL_POLICIES.items() if not policy.has_budget}
    pooled = {name for name in ALL_POLICIES if name.startswith("pyramidkv-pooled")}
    assert without == {"full", "quantize-int8", "quantize-int4", "rkv-gated", "pyramidkv-rkv-alternating", *pooled}


def test_pooling_again_needs_masses() -> None:
    pooled = ALL_POLICIES["pyramidkv-pooled-chat"]
    with pytest.raises(ConfigError, match="pool_bias"):
        with_changes(pooled, {"pool_bias": "root"})
    with pytest.raises(ConfigError, match="redraw"):
        with_changes(pooled, {"redraw": True})
    with pytest.raises(ConfigError, match="tier_shares"):
        with_changes(pooled, {"tier_shares": [0.5, 0.2]})


def test_alternates_share_what_is_stored() -> None:
    for wrong in (BASE, ALL_POLICIES["pyramidkv-rkv-alternating"]):
        with pytest.raises(ConfigError, match="alternate"):
            Policy("twofold", score="seen", block_format="int8", alternate=wrong)


def test_every_field_is_changeable_or_fixed_for_a_reason() -> None:
    assert {"score", "share", "redraw", "tiers", "pool_bias", "schedule.warmup_tokens"} <= set(changeable())
    assert "name" not in changeable()

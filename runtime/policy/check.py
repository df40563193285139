"""Choices of a policy that contradict each other, refused by name when the policy is made."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

from plugins.commit.choices import PoolBias, PoolKind
from runtime.config import ModelSpec
from runtime.errors import ConfigError, UnsupportedPolicyError

if TYPE_CHECKING:
    from runtime.policy.base import Policy

MAX_SUPER_TOKEN = 1024
MAX_EXACT = 256
LEAST_GROWTH = 1.1


def check_model(policy: Policy, spec: ModelSpec) -> None:
    """Raises UnsupportedPolicyError for a policy with a scorer or merging network trained on another model."""
    for trained in policy.trained:
        if trained.model == _shape_of(spec):
            continue
        layers, heads, head_dim, name = trained.model
        what, how = ("scorer", "perf.train_gate") if trained is policy.gate else ("merging network", "perf.train_merge")
        raise UnsupportedPolicyError(
            f"policy {policy.name}: its {what} was trained on {name} ({layers} layers, {heads} KV heads of {head_dim}),"
            f" got {spec.name or 'a model without a name'} ({spec.num_layers} layers, {spec.num_kv_heads} KV heads of "
            f"{spec.head_dim}); choose another policy, or train a {what} with python -m {how}"
        )


def check_engine(policy: Policy, block_format: str, only_format: str | None) -> None:
    """Raises UnsupportedPolicyError for what an engine cannot have whose executor reads `only_format` alone."""
    if only_format is None:
        return
    if policy.compresses and block_format != only_format:
        raise UnsupportedPolicyError(
            f"policy {policy.name}: keeps {block_format} blocks, expected {only_format}, the one format that "
            f"this engine was built for; choose another policy, or build the engine with --policy {policy.name}"
        )
    if policy.score == "sum":
        raise UnsupportedPolicyError(
            f"policy {policy.name}: adds attention weights up, expected one that compares them, which is all that "
            f"this engine's attention records; choose another policy, or run it on an engine for torch"
        )
    if policy.compresses and policy.signals.need_device:
        raise UnsupportedPolicyError(
            f"policy {policy.name}: its signals read attention or hidden states of every step, expected none or "
            f"signals.boundary alone, since a TensorRT engine reports neither; set the weights of "
            f"signals.attention, entropy and jump to 0, or run it on an engine for torch"
        )


def fits(policy: Policy, spec: ModelSpec) -> bool:
    """Whether the model can have the policy."""
    return all(trained.model == _shape_of(spec) for trained in policy.trained)


def _shape_of(spec: ModelSpec) -> tuple[int, int, int, str]:
    """As `Gate.model` names a model."""
    return spec.num_layers, spec.num_kv_heads, spec.head_dim, base_name(spec.name)


def base_name(name: str) -> str:
    """A model's name without the quantization that GGUF files end theirs with: X.Q4_1 -> X."""
    return re.sub(r"[.-](Q\d\w*|F16|F32|BF16)$", "", name)


def check_policy(policy: Policy) -> None:
    """Raises ConfigError naming the field."""
    for field, good, expected in (
        ("score", policy.score in _SCORES, f"one of {', '.join(_SCORES)}"),
        ("share", policy.share in _SHARES, f"one of {', '.join(_SHARES)}"),
        ("window_rows", policy.window_rows >= 1, "at least 1"),
        ("smooth", policy.smooth >= 1 and policy.smooth % 2 == 1, "an odd whole number"),
        ("redundancy", policy.redundancy is None or 0 <= policy.redundancy <= 1, "a share from 0 to 1, or none"),
        ("layer_beta", policy.layer_beta >= 1, "1 or more"),
        ("floor_entries", policy.floor_entries >= 0, "0 or more"),
        ("absorb_gate", policy.absorb_gate is None or policy.absorb_gate > 0, "a number above 0, or none"),
        ("exact_entries", 0 <= policy.exact_entries <= MAX_EXACT, f"0 to {MAX_EXACT}"),
        (
            "exact_entries",
            not policy.exact_entries or _ranks_by_attention(policy),
            "0 but for recorded scores that are "
            "neither smoothed, nor protect outliers, nor alternate, and without tiers",
        ),
        ("repack_ratio", 0 <= policy.repack_ratio <= 1, "a share from 0 to 1"),
        ("pool_bias", policy.pool_bias in get_args(PoolBias), f"one of {', '.join(get_args(PoolBias))}"),
        ("gate", (policy.gate is not None) == (policy.score == "gate"), "one exactly for the score 'gate'"),
        ("layer_beta", policy.layer_beta == 1 or policy.share != "conversation", "1 with the share 'conversation'"),
        (
            "redundancy",
            policy.redundancy is None or not policy.redraw or policy.score not in ("recency", "gate"),
            f"none with redraw and the score {policy.score}, which says nothing of old entries' importance",
        ),
        ("smooth", policy.smooth == 1 or policy.score not in ("recency", "gate"), "1 with the score " + policy.score),
    ):
        if not good:
            raise ConfigError(f"{field} of {policy.name}: got {getattr(policy, field)!r}, expected {expected}")
    _check_schedule(policy)
    _check_signals(policy)
    _check_tiers(policy)
    _check_alternate(policy)


def _ranks_by_attention(policy: Policy) -> bool:
    """Whether an entry's rank is that of its recorded score alone, whose place in the text does not matter."""
    by_score = policy.score not in ("recency", "gate") and policy.smooth == 1 and policy.protection.outlier_z is None
    return by_score and not policy.tiers and policy.alternate is None


_SCORES = ("both", "seen", "probe", "norm", "window", "sum", "recency", "gate")
_SHARES = ("conversation", "layer", "head")


def _check_schedule(policy: Policy) -> None:
    schedule = policy.schedule
    for field, least in (("min_tokens", 0), ("recent_tokens", 1), ("span_tokens", 1), ("every_steps", 0),
                         ("warmup_tokens", 0), ("warmup_every", 1)):  # fmt: skip
        value = getattr(schedule, field)
        if value < least:
            raise ConfigError(f"schedule.{field} of {policy.name}: got {value!r}, expected at least {least}")
    if schedule.reread_growth and schedule.reread_growth < LEAST_GROWTH:
        raise ConfigError(
            f"schedule.reread_growth of {policy.name}: got {schedule.reread_growth!r}, expected 0 (never) or at least "
            f"{LEAST_GROWTH}: re-reading everything takes as long as reading it did"
        )
    if schedule.renew and not schedule.reread_growth:
        raise ConfigError(
            f"schedule.renew of {policy.name}: got true with schedule.reread_growth 0, expected a growth that says "
            f"when text is computed anew; set it, or renew to false"
        )


def _check_signals(policy: Policy) -> None:
    signals = policy.signals
    for field, good, expected in (
        *((name, getattr(signals, name) >= 0, "a weight of 0 or more")
          for name in ("attention", "entropy", "boundary", "jump")),
        ("threshold", 0 < signals.threshold <= 1, "a share in (0, 1]"),
        ("release", 0 <= signals.release <= signals.threshold, "a share from 0 to the threshold"),
        ("patience", signals.patience >= 1, "at least 1"),
        ("every_tokens", signals.every_tokens >= 1, "at least 1"),
        ("half_life_tokens", signals.half_life_tokens >= 1, "at least 1"),
        ("entropy_rise", signals.entropy_rise > 0, "a number above 0"),
        ("jump_z", signals.jump_z > 0, "a number above 0"),
    ):  # fmt: skip
        if not good:
            got = getattr(signals, field)
            raise ConfigError(f"signals.{field} of {policy.name}: got {got!r}, expected {expected}")


def _check_tiers(policy: Policy) -> None:
    tiers, name = policy.tiers, policy.name
    ages = [tier.min_age for tier in tiers]
    if ages != sorted(set(ages)) and not policy.tier_shares:
        raise ConfigError(f"tiers of {name}: got the ages {ages}, expected rising ones")
    for tier in tiers:
        if not 1 <= tier.size <= MAX_SUPER_TOKEN or tier.min_age < 0 or tier.how not in get_args(PoolKind):
            raise ConfigError(
                f"tiers of {name}: got {tier}, expected an age of 0 or more, a size from 1 to {MAX_SUPER_TOKEN} and "
                f"one of {', '.join(get_args(PoolKind))}"
            )
        most = tier.size - 1 if tier.how == "pca" else 1
        if not 1 <= tier.entries <= max(1, most):
            raise ConfigError(
                f"tiers of {name}: got {tier.entries} entries for {tier.size} tokens by {tier.how}, expected 1, or by "
                f"pca fewer than the tokens"
            )
        if tier.how in ("pca", "learned") and policy.score == "recency":
            raise ConfigError(
                f"tiers of {name}: got {tier.how} with the score recency, expected mean, max or weighted: it weighs by "
                f"how much attention tokens got, which that score does not say"
            )
    if policy.tier_shares and (
        len(policy.tier_shares) != len(tiers) or abs(sum(policy.tier_shares) - 1) > 1e-6 or min(policy.tier_shares) < 0
    ):
        raise ConfigError(f"tier_shares of {name}: got {policy.tier_shares}, expected {len(tiers)} shares of sum 1")
    if tiers and policy.absorb_gate is not None:
        raise ConfigError(f"tiers of {name}: got super tokens and an absorb_gate, expected one of them")
    if tiers and policy.score == "recency" and policy.redraw:
        raise ConfigError(f"redraw of {name}: got True, expected False where old entries are pooled by age")
    if len(tiers) > 1 and policy.score == "recency" and policy.pool_bias != "mass":
        raise ConfigError(
            f"pool_bias of {name}: got {policy.pool_bias!r}, expected mass where super tokens are pooled again: their "
            "bias tells how many tokens they stand for"
        )


def _check_alternate(policy: Policy) -> None:
    other = policy.alternate
    if other is None:
        return
    for field in ("score", "block_format"):
        if getattr(other, field) != getattr(policy, field):
            raise ConfigError(
                f"alternate of {policy.name}: got a {field} of {getattr(other, field)!r}, expected that of "
                f"{policy.name}, {getattr(policy, field)!r}: entries of both lie side by side"
            )
    if other.alternate is not None:
        raise ConfigError(f"alternate of {policy.name}: got one that alternates itself, expected a plain policy")

"""Every policy by name; drives the builder, requests, tests and evaluation."""

from __future__ import annotations

from runtime.config import ModelSpec
from runtime.errors import UnknownPolicyError
from runtime.policy import (
    alternating,
    commitkv,
    commitkv_gate,
    full,
    h2o,
    pyramid_layered,
    pyramid_pooled,
    quantize,
    rkv_gated,
    rkv_redundancy,
    snapkv,
    streaming,
)
from runtime.policy.base import Policy
from runtime.policy.check import fits

ALL_POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        commitkv.POLICY,
        commitkv_gate.POLICY,
        pyramid_pooled.POLICY,
        pyramid_pooled.CHAT,
        pyramid_pooled.CODE,
        pyramid_pooled.STORY,
        pyramid_layered.POLICY,
        rkv_gated.POLICY,
        rkv_redundancy.POLICY,
        alternating.POLICY,
        streaming.POLICY,
        h2o.POLICY,
        snapkv.POLICY,
        quantize.INT8,
        quantize.INT4,
        full.POLICY,
    )
}


def policies_for(spec: ModelSpec) -> list[Policy]:
    """Every policy that the model can have: those with a trained scorer fit the model of their training only."""
    return [policy for policy in ALL_POLICIES.values() if fits(policy, spec)]


def get_policy(name: str) -> Policy:
    """The policy called `name`; raises UnknownPolicyError listing the known ones."""
    policy = ALL_POLICIES.get(name)
    if policy is None:
        raise UnknownPolicyError(
            f"policy: got {name!r}, expected one of {', '.join(ALL_POLICIES)}; choose one of these"
        )
    return policy

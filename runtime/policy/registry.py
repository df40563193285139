"""Every policy by name; drives the builder, requests, tests and evaluation."""

from __future__ import annotations

from runtime.errors import UnknownPolicyError
from runtime.policy import commitkv, full, quantize
from runtime.policy.base import Policy

ALL_POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (commitkv.POLICY, quantize.INT8, quantize.INT4, full.POLICY)
}


def get_policy(name: str) -> Policy:
    """The policy called `name`; raises UnknownPolicyError listing the known ones."""
    policy = ALL_POLICIES.get(name)
    if policy is None:
        raise UnknownPolicyError(
            f"policy: got {name!r}, expected one of {', '.join(ALL_POLICIES)}; choose one of these"
        )
    return policy

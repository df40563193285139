"""full: every token stays in its page; the reference that the others are measured against."""

from runtime.policy.base import Policy

POLICY = Policy(name="full", compresses=False)

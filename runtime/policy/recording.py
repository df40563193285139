"""Which rows of a step raise scores, by the policy's score, and what it reports, by the policy's signals."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.policy.base import Policy
from runtime.step import NO_WATCH, Watch


@dataclass(frozen=True)
class Recording:
    """last_rows: only so many last rows of the chunk; 0: the usual sample.   adds: all rows, weights added up."""

    on: bool
    last_rows: int = 0
    adds: bool = False


def recording_of(policy: Policy, first: int, last: int, prompt_end: int) -> Recording:
    """For rows of the positions [first, last) of a turn whose prompt ends at `prompt_end`."""
    if not policy.records:
        return Recording(False)
    if policy.score == "window":
        window_start = max(first, prompt_end - policy.window_rows)
        observing = last <= prompt_end and last > window_start
        return Recording(observing, last - window_start if observing else 0)
    return Recording(True, adds=policy.score == "sum")


def watch_of(policy: Policy, first: int, last: int) -> Watch:
    """For rows of the positions [first, last)."""
    signals = policy.signals
    if not (policy.compresses and signals.need_device):
        return NO_WATCH
    return Watch(signals.need_attention and signals.looks(first, last), signals.need_hidden)

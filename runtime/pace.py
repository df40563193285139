"""How many prompt tokens may run beside decode rows, so that nobody waits long for the next token.

A step with d decode rows and p prompt tokens takes about  t = base + slope * p.  `base` is measured in steps that only
decode, `slope` in those that do both. A slope that rises (a longer context, a busier machine) counts at once, one that
falls counts slowly, so that the bound is kept rather than used up.
"""

from __future__ import annotations

# Weight of a new measurement that is better than what was known.
SLOW = 0.05
# A prompt gets on by this much in every step, whatever the bound: else it would never end.
LEAST_PROMPT_TOKENS = 16
# Before anything is known.
FIRST_PROMPT_TOKENS = 32


class StepPace:
    """Learns from measured steps. `max_step_ms` 0: no bound."""

    def __init__(self, max_step_ms: float) -> None:
        self._target_ns = max_step_ms * 1e6
        self._base_ns: float | None = None
        self._slope_ns: float | None = None

    def prompt_tokens(self, num_decode_rows: int, room: int) -> int:
        """How many of `room` prompt tokens to run in one step beside so many decode rows."""
        if not self._target_ns or not num_decode_rows:
            return room
        if self._slope_ns is None:
            return min(room, FIRST_PROMPT_TOKENS)
        fitting = int((self._target_ns - (self._base_ns or 0.0)) / self._slope_ns)
        return min(room, max(LEAST_PROMPT_TOKENS, fitting))

    def measure(self, num_decode_rows: int, num_prompt_tokens: int, duration_ns: int) -> None:
        """What a step took."""
        if num_prompt_tokens == 0:
            self._base_ns = _blend(self._base_ns, duration_ns)
            return
        if num_prompt_tokens < LEAST_PROMPT_TOKENS:
            return  # too few to tell a slope from noise
        base = (self._base_ns or 0.0) if num_decode_rows else 0.0
        slope = max(1.0, (duration_ns - base) / num_prompt_tokens)
        rising = num_decode_rows and (self._slope_ns is None or slope > self._slope_ns)
        self._slope_ns = slope if rising else _blend(self._slope_ns, slope)


def _blend(known: float | None, measured: float) -> float:
    return measured if known is None else known + SLOW * (measured - known)

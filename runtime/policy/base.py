"""A policy: score + budget + transform + schedule, as one frozen record of choices."""

from __future__ import annotations

from dataclasses import dataclass

from plugins.layout import QUANTIZED
from runtime.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """When a conversation is managed.

    min_tokens: nothing is staged while a conversation holds fewer tokens.
    recent_tokens: the newest tokens stay active.
    span_tokens: staged tokens of which a busy engine's review probes and commits; twice as many are not probed first.
    at_turn_end, on_idle, every_steps (0: never), at_watermark: which commit transitions are on.
    """

    min_tokens: int = 1000
    recent_tokens: int = 128
    span_tokens: int = 512
    at_turn_end: bool = True
    on_idle: bool = True
    every_steps: int = 8
    at_watermark: bool = True


@dataclass(frozen=True)
class Protection:
    """What is never merged or evicted, besides the ranges that a request names.

    sink_tokens: the first tokens of a conversation.   phrases: sentences asking to be remembered.
    names_and_numbers: tokens of numbers and capitalised names in user text.
    outlier_z: see `runtime.step.CommitRules.protect_outlier_z`.
    """

    sink_tokens: int = 4
    system_prompt: bool = True
    phrases: bool = True
    names_and_numbers: bool = False
    outlier_z: float | None = None


@dataclass(frozen=True)
class Policy:
    """One way to keep a conversation small. `compresses=False` keeps every token in pages.

    budget_ratio: share of all (layer, KV head, token) entries of committed tokens that stay.
    block_format: how committed entries are stored: one of `plugins.layout.QUANTIZED`, or "kv" for unquantized, in
        the engine's KV dtype.
    probe: raise scores by re-reading spans in idle time before they are committed.
    repack_ratio: a block is dissolved once the share of its entries above the line is under this.
    """

    name: str
    compresses: bool = True
    budget_ratio: float = 0.30
    block_format: str = "int4"
    probe: bool = True
    floor_entries: int = 16
    absorb_gate: float | None = 0.35
    repack_ratio: float = 0.75
    layer_scale: tuple[float, ...] = ()
    schedule: Schedule = Schedule()
    protection: Protection = Protection()

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_ratio <= 1.0:
            raise ConfigError(f"budget_ratio of {self.name}: got {self.budget_ratio}, expected a share in (0, 1]")
        if self.block_format not in (*QUANTIZED, "kv"):
            raise ConfigError(
                f"block_format of {self.name}: got {self.block_format!r}, expected one of {', '.join(QUANTIZED)} or "
                "kv (unquantized)"
            )

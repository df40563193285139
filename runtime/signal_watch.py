"""The device side of signals: what the watched sequences of one step show, in torch, on the CPU or a GPU.

A look runs a few rows of the step's queries again over the keys of a few layers, after the step's own attention has
stored them, so that the native forms and kernels stay as they are: with `LOOK_ROWS` rows and `LOOK_LAYERS` layers it
costs a few percent of a step that has many layers, in steps that look. Hidden states are read in every step of a
sequence that asks for them; the newest one waits here for the next step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from plugins.attend.params import AttendParams, StepTables
from plugins.attend.shares import page_shares
from plugins.memory import KvMemory
from runtime.step import SignalResult
from runtime.step_tables import StepRows

LOOK_ROWS = 4
LOOK_LAYERS = 4
KEPT_STATES = 1024
"""Conversations whose newest hidden state is remembered; one that drops out misses a single jump."""


class HiddenStates:
    """The newest hidden state of each conversation that asks for jumps."""

    def __init__(self) -> None:
        self._newest: OrderedDict[int, tuple[int, torch.Tensor]] = OrderedDict()  # handle -> (position, [hidden] fp32)

    def jumps(self, handle: int, first_position: int, states: torch.Tensor) -> torch.Tensor:
        """1 - cosine of each of states [n, hidden] with the one before it, [n] or, without one before, [n - 1]."""
        states = states.float()
        position, before = self._newest.pop(handle, (-1, None))
        self._newest[handle] = (first_position + states.shape[0] - 1, states[-1].clone())
        if len(self._newest) > KEPT_STATES:
            self._newest.popitem(last=False)
        if before is not None and position == first_position - 1:
            states = torch.cat((before[None], states))
        return 1.0 - torch.cosine_similarity(states[1:], states[:-1], dim=1)


@dataclass(eq=False)
class _Look:
    """One watched sequence.   rows: of the step that are looked at; hidden: page tokens that each does not see.

    shares [pages] and entropy: sums over the layers looked at so far.
    """

    sequence: StepRows
    span: slice
    memory: KvMemory
    tables: StepTables
    rows: torch.Tensor
    hidden: torch.Tensor
    shares: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    jumps: torch.Tensor | None = None


class StepWatch:
    """Watches one step; `attend` and `hidden` are called by it as it goes, `results` once it is over."""

    def __init__(self, states: HiddenStates, num_layers: int, scale: float) -> None:
        self._states, self._scale = states, scale
        self._layers = {(2 * i + 1) * num_layers // (2 * LOOK_LAYERS) for i in range(LOOK_LAYERS)}
        self._looks: list[_Look] = []

    def add(self, sequence: StepRows, first_row: int, memory: KvMemory, tables: StepTables) -> None:
        """tables: of this sequence alone, where its memory lies.   first_row: of the sequence in the step."""
        count = len(sequence.token_ids)
        stride = max(1, count // LOOK_ROWS)
        chosen = list(range(count - 1, -1, -stride))[:LOOK_ROWS]
        device = memory.blocks.device
        rows = torch.tensor([first_row + i for i in chosen], device=device)
        hidden = torch.tensor([count - 1 - i for i in chosen], device=device)
        span = slice(first_row, first_row + count)
        self._looks.append(_Look(sequence, span, memory, tables, rows, hidden))

    def attend(self, layer: int, q: torch.Tensor) -> None:
        """q [rows of the step, q_heads, D], after the layer's keys were stored."""
        if layer not in self._layers:
            return
        for look in self._looks:
            if look.sequence.watch.attention:
                memory, rows = look.memory, q.index_select(0, look.rows)
                where = (memory.pages[layer], memory.seen[layer], memory.blocks, memory.score, memory.layout)
                params = AttendParams(rows, torch.empty_like(rows), *where, look.tables.layer(layer), self._scale)
                shares, entropy = page_shares(params, look.hidden)
                look.shares.append(shares)
                look.entropies.append(entropy)

    def hidden(self, x: torch.Tensor) -> None:
        """x [rows of the step, hidden]: states behind the last layer."""
        for look in self._looks:
            if look.sequence.watch.hidden:
                look.jumps = self._states.jumps(look.sequence.handle, look.sequence.first_position, x[look.span])

    def results(self) -> tuple[SignalResult, ...]:
        """One for each watched sequence; on a GPU this waits for the step."""
        return tuple(map(_result, self._looks))


def _result(look: _Look) -> SignalResult:
    shares: dict[int, float] = {}
    entropy = 0.0
    if look.shares:
        mean = torch.stack(look.shares).mean(dim=0).tolist()
        shares = dict(zip(look.sequence.view.page_ids, mean, strict=True))
        entropy = float(torch.stack(look.entropies).mean())
    jumps = () if look.jumps is None else tuple(look.jumps.tolist())
    return SignalResult(look.sequence.handle, shares, entropy, jumps)

"""A trace of every commit, so that a bad answer can be followed back to what was compressed before it.

Opt-in: `RuntimeConfig.trace_file`; nothing here runs without it. The file is JSON Lines, one record a line, in the
order of events. An entry is named by the logical position of its token, or of a super token's first; layer, KV head
and position name one entry for good. `python -m perf.trace explain FILE --turn N` reads it.

header   {"type": "header", "version": 3, "model": name, "num_layers": n, "num_kv_heads": n}
turn     {"type": "turn", "handle": n, "conversation": id or null, "turn": n (from 1), "first": position of its first
         token, "prompt_end": position where its answer begins, "tokens": [ids of the prompt and the answer]}
         written when a turn ends. `handle` is the engine's own number of a conversation, never used twice in a run.
commit   {"type": "commit", "handle": n, "commit": n (from 1), "turn": turns that had ended, "line": lowest score that
         stayed, null if the floor alone decided, "keep_entries": budget over all rows,
         "positions": [n] logical positions of the tokens that were staged, protected ones not among them,
         "renewed": true where the whole text was computed anew for it: entries of the commits before it are gone,
         "protected": [[start, end), ...] positions that stay as they are whatever their score,
         "kept", "absorbed", "dropped": entries over all rows, "bytes_before", "bytes_after": of the conversation,
         "rows": [one record per layer and KV head, layer by layer]}
row      {"scores": [n] of the staged tokens, 3 digits, null where the score protects for good,
         "fates": a string of n letters: k kept, x kept unquantized, a absorbed into another entry or a super token,
         d dropped,
         "into": [positions] of the entries that took those of "a" in, in their order,
         "old_below": entries committed earlier that fell below the line and stay readable until their block goes,
         "old_absorbed": [[position, into], ...], "old_dropped": [positions] of entries committed earlier,
         "exact": [positions] of all that are unquantized from now on, where there are any}
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any, TextIO

import torch

from plugins.commit.fates import GONE, commit_fates
from plugins.commit.params import Decision, PublishParams
from plugins.memory import KvMemory
from runtime.config import ModelSpec
from runtime.conversation import Conversation
from runtime.errors import ConfigError
from runtime.kv_manager import KvManager
from runtime.kv_state import twin_of
from runtime.step import PublishPlan, PublishResult

log = logging.getLogger(__name__)

VERSION = 3


class Trace:
    """`runtime.observer.Observer` and `runtime.paged_executor.CommitWatcher` that writes the records above.

    Raises ConfigError for a file that exists or cannot be written. A write that fails later is said once in the log
    and ends the trace; the engine goes on.
    """

    def __init__(self, path: Path, manager: KvManager, spec: ModelSpec) -> None:
        self._path, self._manager, self._spec = path, manager, spec
        self._file: TextIO | None = _create(path)
        self._entries: dict[tuple[str, int], list[int]] = {}  # (block format, block id) -> positions of its entries
        self._exact: dict[int, list[list[int]]] = {}  # by handle: positions of each row's unquantized entries
        self._turns: dict[int, int] = {}  # ended turns by handle
        self._commits: dict[int, int] = {}
        self._pending: dict[int, dict[str, Any]] = {}  # commits that are being written, by handle
        self._write({
            "type": "header", "version": VERSION, "model": spec.name, "num_layers": spec.num_layers,
            "num_kv_heads": spec.num_kv_heads,
        })  # fmt: skip

    def turn_ended(self, conversation: Conversation) -> None:
        turn, handle = conversation.turn, conversation.handle
        assert turn is not None
        self._turns[handle] = self._turns.get(handle, 0) + 1
        self._write({
            "type": "turn", "handle": handle, "conversation": conversation.conversation_id,
            "turn": self._turns[handle], "first": turn.first_token, "prompt_end": turn.prompt_end,
            "tokens": conversation.tokens[turn.first_token :],
        })  # fmt: skip

    def committing(self, plan: PublishPlan, memory: KvMemory, params: PublishParams, decision: Decision) -> None:
        """Reads what the commit will do, before it writes."""
        if self._file is None:
            return
        line, handle = plan.line, plan.line.handle
        renewed, handle = handle < 0, max(handle, twin_of(handle))
        fates = [fate.tolist() for fate in commit_fates(memory, params, decision)]
        positions, drawn = list(line.positions[line.num_exact :]), float(decision.line)
        names = [[*self._old_names(plan, row), *positions] for row in range(len(fates))]
        scores, below = decision.staged_score[:, line.num_exact :].tolist(), _below(decision, params)
        exact = self._exact_names(decision, handle, positions, line.num_exact)
        rows = [
            _row_record(fates[row], names[row], scores[row], exact[row], sum(below[slice(*_bounds(plan, row))]))
            for row in range(len(fates))
        ]
        self._exact[handle] = exact
        self._pending[handle] = {
            "type": "commit", "handle": handle, "line": drawn if math.isfinite(drawn) else None,
            "keep_entries": line.keep_entries, "positions": positions, "renewed": renewed,
            "protected": self._manager[handle].protected_ranges(),
            "kept": sum(row["fates"].count(letter) for row in rows for letter in "kx"),
            "bytes_before": self._manager.kv_bytes(handle), "rows": rows,
        }  # fmt: skip
        self._rename(plan, fates, names, exact)

    def committed(self, handle: int, result: PublishResult) -> None:
        pending = self._pending.pop(handle, None)
        if pending is None:
            return
        self._commits[handle] = self._commits.get(handle, 0) + 1
        rows = pending.pop("rows")
        self._write(pending | {
            "commit": self._commits[handle], "turn": self._turns.get(handle, 0), "absorbed": result.absorbed,
            "dropped": result.dropped, "bytes_after": self._manager.kv_bytes(handle), "rows": rows,
        })  # fmt: skip

    def close(self) -> None:
        """What could not be written is lost; nobody can do anything about it here."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _old_names(self, plan: PublishPlan, row: int) -> list[int]:
        """Positions of the row's committed entries: those of blocks in table order, then the unquantized ones."""
        table = plan.line.blocks
        names = [
            p for i in range(*_bounds(plan, row)) for p in self._entries[table.format, table.ids[i]][: table.lens[i]]
        ]
        return names + (self._exact[plan.line.handle][row] if plan.line.num_exact else [])

    def _exact_names(self, decision: Decision, handle: int, positions: list[int], num_exact: int) -> list[list[int]]:
        """Positions of the entries of each row that are unquantized from now on."""
        if decision.exact is None:
            return [[] for _ in range(decision.staged_keep.shape[0])]
        before = self._exact[handle] if num_exact else [[]] * decision.staged_keep.shape[0]
        return [
            [(*names, *positions)[i] for i in row] for names, row in zip(before, decision.exact.tolist(), strict=True)
        ]

    def _rename(
        self, plan: PublishPlan, fates: list[list[int]], names: list[list[int]], exact: list[list[int]]
    ) -> None:
        """Which entries lie in the new blocks: those that leave dissolved blocks or pages, in order, if they stay."""
        old, new = plan.line.blocks, plan.blocks
        for row, fate in enumerate(fates):
            in_place: list[bool] = []
            for i in range(*_bounds(plan, row)):
                in_place += [not plan.dissolve[i]] * old.lens[i]
            in_place += [False] * (len(fate) - len(in_place))
            staying = (names[row][i] for i, into in enumerate(fate) if into == i and not in_place[i])
            moved = (name for name in staying if name not in exact[row])
            for i in range(new.starts[row], new.starts[row + 1]):
                if plan.new_block[i]:
                    self._entries[new.format, new.ids[i]] = [next(moved) for _ in range(new.lens[i])]
            assert next(moved, None) is None, f"row {row}: more entries stay than its new blocks hold"
        for i, gone in enumerate(plan.dissolve):
            if gone:
                del self._entries[old.format, old.ids[i]]

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            log.error("trace_file %s cannot be written any more (%s); it ends here", self._path, error)
            self.close()


def _create(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("x", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"trace_file: {path} cannot be created ({error.strerror}), expected the name of a file that does not exist "
            f"yet in a folder that can be written; choose another"
        ) from error


def _bounds(plan: PublishPlan, row: int) -> tuple[int, int]:
    """The row's blocks in the old table."""
    return plan.line.blocks.starts[row], plan.line.blocks.starts[row + 1]


def _below(decision: Decision, params: PublishParams) -> list[int]:
    """Per old block that stays: its entries below the line; 0 for dissolved ones."""
    below = params.old.lens - decision.alive.sum(dim=1)
    counts: list[int] = torch.where(params.dissolve, 0, below).tolist()
    return counts


def _row_record(
    fates: list[int], names: list[int], scores: list[float], exact: list[int], num_below: int
) -> dict[str, Any]:
    """fates, names: old entries, then staged ones; scores: of the staged ones.   exact: names of unquantized ones."""
    num_old = len(fates) - len(scores)
    letters, into = [], []
    for i in range(num_old, len(fates)):
        kept = "x" if names[i] in exact else "k"
        letters.append(kept if fates[i] == i else "d" if fates[i] == GONE else "a")
        if letters[-1] == "a":
            into.append(names[fates[i]])
    old = range(num_old)
    return {
        "scores": [float(f"{score:.3g}") if math.isfinite(score) else None for score in scores],
        "fates": "".join(letters),
        "into": into,
        "old_below": num_below,
        "old_absorbed": [[names[i], names[fates[i]]] for i in old if fates[i] not in (i, GONE)],
        "old_dropped": [names[i] for i in old if fates[i] == GONE],
        **({"exact": exact} if exact else {}),
    }

"""`python -m perf.trace explain TRACE.jsonl --turn N`: what had been compressed before a turn, with its text.

The trace is what an engine with `RuntimeConfig.trace_file` (`python -m perf.serve --trace FILE`) wrote; its schema is
in `runtime.trace`. Shares are over all layers and KV heads: "own" entries are stored for themselves, "merged" ones live
on in another entry, "gone" ones in none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import manifest as manifests
from runtime.errors import CommitKVError, RequestError
from runtime.trace import VERSION

PIECE_TOKENS = 24
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Token:
    """What is left of one token. turn: in which it came; commit: the one that compressed it; shares of the rows."""

    position: int
    token_id: int
    turn: int
    commit: int
    merged: float
    gone: float

    @property
    def own(self) -> float:
        return 1.0 - self.merged - self.gone


@dataclass(frozen=True)
class Explanation:
    """commits: records before the turn, oldest first; tokens: those they compressed, by position."""

    conversation: str
    turn: int
    commits: tuple[dict[str, Any], ...]
    tokens: tuple[Token, ...]
    num_tokens: int


class _Row:
    """What became of the entries of one layer and KV head."""

    def __init__(self) -> None:
        self._into: dict[int, int | None] = {}  # position -> the entry that took it in, None: dropped

    def replay(self, positions: Sequence[int], outcome: dict[str, Any]) -> None:
        """Applies one commit. A position that is committed again was computed again."""
        for position in positions:
            self._into.pop(position, None)
        into = iter(outcome["into"])
        for position, fate in zip(positions, outcome["fates"], strict=True):
            if fate != "k":
                self._into[position] = next(into) if fate == "a" else None
        self._into.update(dict(outcome["old_absorbed"]))
        self._into.update(dict.fromkeys(outcome["old_dropped"]))

    def state(self, position: int) -> str:
        """own, merged or gone: an entry that took others in and was dropped later took them with it."""
        merged, at = False, position
        while at in self._into:
            target = self._into[at]
            if target is None:
                return "gone"
            merged, at = True, target
        return "merged" if merged else "own"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Raises RequestError naming the line. A last line without its end is one that was being written: left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"trace {path}: cannot be read ({error}), expected a file of runtime.trace") from error
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            known = record["type"] in ("header", "turn", "commit")
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise RequestError(f"trace {path}, line {number}: expected a record of runtime.trace; is it another file?")
        records.append(record)
    if not records or records[0]["type"] != "header" or records[0].get("version") != VERSION:
        raise RequestError(f"trace {path}, line 1: expected a header of version {VERSION}; is it another file?")
    return records


def explain(records: Sequence[dict[str, Any]], turn: int, conversation: str | None = None) -> Explanation:
    """What was left when turn `turn` began. Raises RequestError for a turn that the trace does not hold."""
    handle, name = _find(records, turn, conversation)
    token_ids: dict[int, tuple[int, int]] = {}  # position -> (token id, turn)
    rows: list[_Row] = []
    commits: list[dict[str, Any]] = []
    compressed: dict[int, int] = {}
    for record in records:
        if record.get("handle") != handle:
            continue
        if record["type"] == "turn":
            if record["turn"] >= turn:
                break
            token_ids.update((record["first"] + i, (t, record["turn"])) for i, t in enumerate(record["tokens"]))
        else:
            commits.append(record)
            compressed.update((position, record["commit"]) for position in record["positions"])
            rows = rows or [_Row() for _ in record["rows"]]
            for row, outcome in zip(rows, record["rows"], strict=True):
                row.replay(record["positions"], outcome)
    tokens = []
    for position, number in sorted(compressed.items()):
        token_id, came = token_ids.get(position, (-1, turn))
        states = [row.state(position) for row in rows]
        merged, gone = states.count("merged") / len(rows), states.count("gone") / len(rows)
        tokens.append(Token(position, token_id, came, number, merged, gone))
    return Explanation(name, turn, tuple(commits), tuple(tokens), len(token_ids))


def _find(records: Sequence[dict[str, Any]], turn: int, conversation: str | None) -> tuple[int, str]:
    """Handle and name of the conversation that is asked for."""
    turns = [record for record in records if record["type"] == "turn"]
    names = {record["handle"]: str(record["conversation"]) for record in turns}
    if conversation is not None:
        names = {handle: name for handle, name in names.items() if name == conversation}
    if len(names) != 1:
        known = ", ".join(sorted({str(record["conversation"]) for record in turns})) or "none"
        raise RequestError(
            f"--conversation: got {conversation!r}, which is {len(names)} conversations of this trace, expected one of "
            f"{known}; name one"
        )
    handle, name = next(iter(names.items()))
    last = max(record["turn"] for record in turns if record["handle"] == handle)
    if not 1 <= turn <= last + 1:
        raise RequestError(
            f"--turn: got {turn}, expected 1 to {last + 1}: the trace holds {last} turns of {name}, and what the next "
            f"one would find"
        )
    return handle, name


def pieces(tokens: Sequence[Token]) -> Iterator[tuple[Token, ...]]:
    """Runs of consecutive tokens of one turn and commit, of `PIECE_TOKENS` at most."""
    run: list[Token] = []
    for token in tokens:
        if run and (
            token.position != run[-1].position + 1
            or (token.turn, token.commit) != (run[0].turn, run[0].commit)
            or len(run) == PIECE_TOKENS
        ):
            yield tuple(run)
            run = []
        run.append(token)
    if run:
        yield tuple(run)


def report(found: Explanation, decode: Decode, worst: int | None = None) -> str:
    """The explanation as text; worst: only so many pieces, those of which least is left."""
    lines = [
        f"conversation {found.conversation}: before turn {found.turn} it held {found.num_tokens} tokens, of which "
        f"{len(found.tokens)} were compressed in {len(found.commits)} commits"
    ]
    for record in found.commits:
        entries = len(record["positions"]) * len(record["rows"])
        lines.append(
            f"commit {record['commit']}, after turn {record['turn']}: {len(record['positions'])} tokens"
            f"{' computed anew' if record['renewed'] else ''}, "
            f"{record['kept'] / entries:.0%} of their entries kept; {record['absorbed']} entries absorbed, "
            f"{record['dropped']} dropped; line {_number(record['line'])}; {record['bytes_before']:,} -> "
            f"{record['bytes_after']:,} bytes"
        )
    runs = list(pieces(found.tokens))
    if worst is not None:
        runs = sorted(runs, key=lambda run: sum(token.own for token in run) / len(run))[:worst]
    lines += ["", f"{'positions':>13}  turn  commit   own  merged  gone  text"]
    for run in runs:
        own, merged, gone = (sum(x) / len(run) for x in zip(*((t.own, t.merged, t.gone) for t in run), strict=True))
        span = f"[{run[0].position}, {run[-1].position + 1})"
        text = decode([token.token_id for token in run]).replace("\n", "\\n")
        lines.append(f"{span:>13}  {run[0].turn:4}  {run[0].commit:6}  {own:4.0%}  {merged:6.0%}  {gone:4.0%}  {text}")
    return "\n".join(lines)


def _number(line: float | None) -> str:
    return "none (the floor decided)" if line is None else f"{line:.4g}"


def decoder(engine_dir: Path | None) -> Decode:
    """Token ids as text by the engine's tokenizer, or as numbers without one. Raises ManifestError."""
    if engine_dir is None:
        return lambda ids: " ".join(map(str, ids))
    import tokenizers

    manifests.load(engine_dir, verify=False)
    tokenizer = tokenizers.Tokenizer.from_file(str(engine_dir / manifests.TOKENIZER_FILE))
    return lambda ids: str(tokenizer.decode([i for i in ids if i >= 0], skip_special_tokens=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("explain", help="what had been compressed before a turn").add_argument
    add("trace", type=Path, help="file written by an engine with trace_file")
    add("--turn", type=int, required=True, help="number of the turn whose answer is in question, from 1")
    add("--conversation", help="its id, where the trace holds several")
    add("--engine", type=Path, help="engine directory, for the text of the tokens")
    add("--worst", type=int, help="only so many pieces of text, those of which least is left")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.worst is not None and args.worst < 1:
            raise RequestError(f"--worst: got {args.worst}, expected at least 1")
        decode = decoder(args.engine)
        print(report(explain(read_trace(args.trace), args.turn, args.conversation), decode, args.worst))
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m perf.code_bits`: how many bits K and V need, and what a Hadamard rotation before rounding is worth.

A conversation of `perf.evaluate` is read by the engine's own weights in transformers, its whole cache but the newest
tokens is rounded to codes, and the questions are put to a copy. Nothing is dropped: what shows is rounding alone. As
in committed blocks, K has a scale per channel over 64 tokens, V one per token; a rotation multiplies every row by a
normalized Hadamard matrix first and by its transpose afterwards, which spreads what single channels carry
(QuaRot, arXiv 2404.00456).
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from perf.evaluate import make_tasks, make_tasks_parser
from perf.evaluation.peers import PeerHolder, tokenize
from perf.evaluation.scores import clustered_mean
from perf.evaluation.tasks import Task
from perf.server import REPO_ROOT
from runtime.errors import CommitKVError
from runtime.rotation import hadamard

SPAN = 64  # tokens that share the scales of K: the entries of a block
RECENT = 32  # newest tokens, which stay as they are: commitkv's recent window
RESULTS = REPO_ROOT / "perf" / "results" / "code_bits.json"


@dataclass(frozen=True)
class Code:
    """Bits of a number of K and of V, and whether its rows are rotated before rounding."""

    k_bits: int
    v_bits: int
    k_rotated: bool = False
    v_rotated: bool = False

    @property
    def name(self) -> str:
        return f"K{self.k_bits}{' rotated' * self.k_rotated}, V{self.v_bits}{' rotated' * self.v_rotated}"


CODES = (
    Code(8, 8), Code(8, 6), Code(8, 4), Code(8, 4, v_rotated=True), Code(6, 6), Code(6, 6, True, True),
    Code(8, 3), Code(8, 3, v_rotated=True), Code(8, 2), Code(8, 2, v_rotated=True), Code(6, 4, True, True),
    Code(5, 5, True, True), Code(4, 4), Code(4, 4, k_rotated=True), Code(4, 4, True, True), Code(4, 3, True, True),
    Code(3, 4, k_rotated=True), Code(3, 3, True, True), Code(4, 2, True, True), Code(2, 2, True, True),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What rounding with one code did.   kl, error: of the next word, nats, over all questions.   bits: of a number,
    scales and minima included."""

    code: str
    bits: float
    kl: float
    error: float
    worst: float
    same_word: float
    questions: int


def rounded(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """x with every stretch along `dim` at 2^bits even steps between its extremes; scale and minimum in fp16."""
    low = x.amin(dim, keepdim=True)
    scale = ((x.amax(dim, keepdim=True) - low) / ((1 << bits) - 1)).half().float().clamp_min(2.0**-24)
    low = low.half().float()
    codes = torch.round((x - low) / scale).clamp(0, (1 << bits) - 1)
    return low + codes * scale


def rounded_keys(k: torch.Tensor, bits: int, rotation: torch.Tensor | None) -> torch.Tensor:
    """k [..., tokens, head_dim], rounded per channel over spans of tokens."""
    turned = k.float() if rotation is None else k.float() @ rotation
    out = torch.cat([rounded(span, bits, -2) for span in torch.split(turned, SPAN, dim=-2)], dim=-2)
    return (out if rotation is None else out @ rotation.T).to(k.dtype)


def rounded_values(v: torch.Tensor, bits: int, rotation: torch.Tensor | None) -> torch.Tensor:
    """v [..., tokens, head_dim], rounded per token."""
    turned = v.float() if rotation is None else v.float() @ rotation
    out = rounded(turned, bits, -1)
    return (out if rotation is None else out @ rotation.T).to(v.dtype)


def bits_of(code: Code, head_dim: int) -> float:
    """Bits of a number of K or V, two fp16 per channel and span of K and per token of V included."""
    return (code.k_bits + 32 / SPAN + code.v_bits + 32 / head_dim) / 2


class Rounding:
    """One conversation in transformers, whose cache is rounded in one way after the other."""

    def __init__(self, holder: PeerHolder, task: Task) -> None:
        from transformers import DynamicCache

        self._holder, self._tokens = holder, tokenize(task, holder.tokenizer, holder.chat)
        self._cache: Any = DynamicCache()
        first = 0
        for turn in self._tokens.turns:
            holder.forward(turn, first, self._cache)
            first += len(turn)
        self._rotation = hadamard(holder.spec.head_dim)

    def answers(self, code: Code | None) -> torch.Tensor:
        """Log probabilities [questions, vocab] of the next word; None: of the cache as it is."""
        cache = copy.deepcopy(self._cache)
        if code is not None:
            for layer in cache.layers:
                self._round(layer, code)
        return torch.stack([self._holder.ask(q, self._tokens.num_tokens, cache) for q in self._tokens.questions])

    def _round(self, layer: Any, code: Code) -> None:
        old = layer.keys.shape[-2] - RECENT
        k, v = layer.keys[..., :old, :], layer.values[..., :old, :]
        k[...] = rounded_keys(k, code.k_bits, self._rotation if code.k_rotated else None)
        v[...] = rounded_values(v, code.v_bits, self._rotation if code.v_rotated else None)


@torch.inference_mode()
def measure(holder: PeerHolder, tasks: Sequence[Task]) -> list[Row]:
    """A row per code, over all tasks."""
    kl: dict[Code, list[list[float]]] = {code: [] for code in CODES}
    same: dict[Code, list[bool]] = {code: [] for code in CODES}
    with tqdm(total=len(tasks) * (len(CODES) + 1), unit="code", file=sys.stdout) as bar:
        for task in tasks:
            conversation = Rounding(holder, task)
            whole = conversation.answers(None)
            bar.update()
            for code in CODES:
                got = conversation.answers(code)
                kl[code].append((whole.exp() * (whole - got)).sum(1).clamp_(min=0.0).tolist())
                same[code] += (whole.argmax(1) == got.argmax(1)).tolist()
                bar.update()
    rows = []
    for code in CODES:
        mean = clustered_mean(kl[code])
        worst, num = max(max(values) for values in kl[code]), len(same[code])
        bits = bits_of(code, holder.spec.head_dim)
        rows.append(Row(code.name, bits, mean.value, mean.error, worst, sum(same[code]) / num, num))
    return rows


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| codes | bits of a number | KL to the unrounded cache | worst | same word |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.code} | {r.bits:.2f} | {r.kl:.4f} ± {r.error:.4f} | {r.worst:.2f} | {r.same_word:.2f} |" for r in rows
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = make_tasks_parser("python -m perf.code_bits", "How many bits K and V need, rotated and not.")
    parser.set_defaults(contexts="1300", questions=90, output=RESULTS)
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        holder = PeerHolder(args.engine, args.threads)
        rows = measure(holder, make_tasks(args.contexts, args.questions, holder.spec.max_positions))
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    print(f"\n{markdown(rows)}\n\nwritten: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

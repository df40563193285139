"""`python -m perf.train_gate`: learns the scorer of gated R-KV from a model's own attention, on a CPU, in minutes.

Conversations are held with nothing compressed while attention is recorded and spans are re-read, as under commitkv. A
token's label in a (layer, KV head) says whether commitkv's line would keep it there: whether its largest recorded
weight is among the best `--keep` of all. One logistic regression for each (layer, KV head) then learns to tell that
from key, value and position alone. Every fifth run of 64 tokens is held out and judged, not learned from.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from perf.train_parts import Tracer, add_trace_arguments, check_arguments, exit_code, save_weights
from perf.workload import Conversation, load_conversation
from plugins.commit.gate import POSITION_UNIT, GateWeights, gate_logits
from plugins.commit.line import staged_kv, staged_scores
from runtime.gates import GATES_DIR
from runtime.policy.check import base_name

HOLDOUT_RUN, HOLDOUT_EVERY = 64, 5
THRESHOLDS = (0.4, 0.7)


@dataclass(frozen=True, eq=False)
class Trace:
    """Tokens of one conversation that have left the recent window.

    kv [rows, n, 2, D] fp16; positions [n] int64; scores [rows, n] fp32: largest weight recorded.
    """

    kv: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, eq=False)
class Samples:
    """Tokens of all traces together.   labels [rows, n] bool; held_out [n] bool."""

    kv: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    held_out: torch.Tensor


@dataclass(frozen=True)
class Judgement:
    """On held-out tokens.   auc: mean over rows; kept, recall: share of all entries, and of those worth keeping, that
    lie above each of THRESHOLDS."""

    auc: float
    kept: tuple[float, ...]
    recall: tuple[float, ...]


class GateTracer(Tracer):
    """A tracer that keeps scores."""

    def trace(self, conversation: Conversation, max_tokens: int) -> Trace:
        """What was recorded of a conversation with answers of `max_tokens`."""
        kv = self._hold(conversation, max_tokens)
        slots: list[int] = []
        positions: list[int] = []
        for page in kv.staged_pages():
            for offset, position in enumerate(page.positions):
                if not kv.is_protected(position):
                    slots.append(page.page_id * kv.page_tokens + offset)
                    positions.append(position)
        where = torch.tensor(slots, dtype=torch.int64)
        kv_tokens = staged_kv(self._memory, where).half()
        trace = Trace(kv_tokens, torch.tensor(positions), staged_scores(self._memory, where))
        self._end()
        return trace


def make_samples(traces: list[Trace], keep: float) -> Samples:
    """Labels each conversation by a line of its own over all rows, as a commit would."""
    labels = []
    for trace in traces:
        count = max(1, round(keep * trace.scores.numel()))
        labels.append(trace.scores >= trace.scores.flatten().topk(count).values[-1])
    positions = torch.cat([trace.positions for trace in traces])
    held_out = (torch.arange(positions.shape[0]) // HOLDOUT_RUN) % HOLDOUT_EVERY == HOLDOUT_EVERY - 1
    return Samples(torch.cat([t.kv for t in traces], dim=1), positions, torch.cat(labels, dim=1), held_out)


def train(samples: Samples, steps: int, decay: float) -> GateWeights:
    """Logistic regressions of all rows at once, full batch, on standardized features; the scaling goes into W and b."""
    learn = ~samples.held_out
    rows, count = samples.labels.shape[0], int(learn.sum())
    pos = (samples.positions[learn].float() / POSITION_UNIT).expand(rows, count)[..., None]
    features = torch.cat((samples.kv[:, learn].float().reshape(rows, count, -1), pos), dim=2)
    mean, spread = features.mean(dim=1, keepdim=True), features.std(dim=1, keepdim=True).clamp(min=1e-3)
    features.sub_(mean).div_(spread)
    labels = samples.labels[:, learn].float()
    rate = labels.mean(dim=1).clamp(1e-3, 1 - 1e-3)
    weight = torch.zeros(rows, features.shape[2], 1, requires_grad=True)
    bias = (rate / (1 - rate)).log().clone().requires_grad_()
    optimizer = torch.optim.Adam([weight, bias], lr=0.02)
    for _ in tqdm(range(steps), unit="step", file=sys.stdout):
        optimizer.zero_grad()
        logits = torch.bmm(features, weight)[..., 0] + bias[:, None]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1).sum()
        (loss + decay * weight.square().sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        scaled = weight[..., 0] / spread[:, 0]
        return GateWeights(scaled.contiguous(), bias - (scaled * mean[:, 0]).sum(dim=1))


def judge(samples: Samples, weights: GateWeights) -> Judgement:
    """How well held-out tokens are told apart."""
    held = samples.held_out
    p = gate_logits(samples.kv[:, held], samples.positions[held], weights).sigmoid()
    labels = samples.labels[:, held]
    aucs = [_auc(p[row], labels[row]) for row in range(p.shape[0]) if 0 < int(labels[row].sum()) < labels.shape[1]]
    kept = tuple((p > threshold).float().mean().item() for threshold in THRESHOLDS)
    recall = tuple((p > threshold)[labels].float().mean().item() for threshold in THRESHOLDS)
    return Judgement(sum(aucs) / max(1, len(aucs)), kept, recall)


def _auc(p: torch.Tensor, labels: torch.Tensor) -> float:
    """Probability that a token worth keeping scores above one that is not."""
    ranks = p.argsort().argsort().double() + 1
    good = int(labels.sum())
    bad = labels.shape[0] - good
    return (ranks[labels].sum().item() - good * (good + 1) / 2) / (good * bad)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m perf.train_gate", description="Trains the scorer of gated R-KV.")
    add_trace_arguments(parser, "conversations as JSONL (default: the shipped ones)")
    add = parser.add_argument
    add("--keep", type=float, default=0.35, help="share of all entries labelled as worth keeping (%(default)s)")
    add("--steps", type=int, default=300, help="optimizer steps (%(default)s)")
    add("--decay", type=float, default=3e-4, help="weight decay (%(default)s)")
    add("--output", type=Path, help=f"file to write (default: {GATES_DIR.name}/<model>.safetensors)")
    return parser


def run(args: argparse.Namespace) -> None:
    """Raises CommitKVError."""
    check_arguments(args, ("decay", args.decay >= 0, "0 or more"))
    started = time.monotonic()
    conversations = [load_conversation(path) for path in args.data]
    tracer = GateTracer(args.engine, args.kv_mib)
    traces = [tracer.trace(c, args.max_tokens) for c in tqdm(conversations, unit="conversation", file=sys.stdout)]
    samples = make_samples(traces, args.keep)
    traced = time.monotonic()
    weights = train(samples, args.steps, args.decay)
    found = judge(samples, weights)
    path = args.output or GATES_DIR / f"{base_name(tracer.spec.name)}.safetensors"
    tensors = {"weight": weights.weight, "bias": weights.bias}
    facts = {"tokens": str(samples.positions.shape[0]), "held_out_auc": f"{found.auc:.3f}"}
    save_weights(path, tracer.spec, tensors, **facts)
    for threshold, kept, recall in zip(THRESHOLDS, found.kept, found.recall, strict=True):
        print(f"p > {threshold}: keeps {kept:.3f} of the held-out entries, {recall:.3f} of those worth keeping")
    print(
        f"{samples.positions.shape[0]} tokens of {len(traces)} conversations, held-out AUC {found.auc:.3f}; "
        f"traces {traced - started:.0f} s, training {time.monotonic() - traced:.0f} s; written: {path}"
    )


def main(argv: list[str] | None = None) -> int:
    return exit_code(run, _parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())

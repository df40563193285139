"""Choosing the next token: every row by its own `SampleSpec`, whatever else is in the batch.

Order: penalties, forbidden ids, then greedy, or temperature, top-k, top-p and the inverse of the cumulative
distribution in order of token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.step import SampleSpec


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[tuple[int, float | None]]:
    """logits [n, vocab] fp32, one spec per row; returns (token id, log-probability or None) per row.

    Log-probabilities are of the distribution the model gave: before penalties, temperature and truncation. Everything
    is computed where the logits lie and comes up at once, at the end.
    """
    assert logits.shape[0] == len(specs)
    adjusted = logits
    if any(_adjusts(spec) for spec in specs):
        adjusted = logits.clone()
        for row, spec in zip(adjusted, specs, strict=True):
            _penalize(row, spec)
    tokens = _best(adjusted)
    drawn = [i for i, spec in enumerate(specs) if not _is_greedy(spec)]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(adjusted[rows], [specs[i] for i in drawn])
    if not any(spec.want_logprob for spec in specs):
        return [(token, None) for token in tokens.tolist()]
    wide = logits.double()
    logprobs = wide.gather(1, tokens[:, None])[:, 0] - wide.logsumexp(dim=-1)
    pairs = torch.stack((tokens.double(), logprobs), dim=1).tolist()  # token ids are exact in float64
    return [
        (int(token), logprob if spec.want_logprob else None)
        for (token, logprob), spec in zip(pairs, specs, strict=True)
    ]


def _best(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest. On a CPU numpy finds it in a tenth of torch's time."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _is_greedy(spec: SampleSpec) -> bool:
    return spec.temperature <= 0.0 or spec.top_k == 1


def _adjusts(spec: SampleSpec) -> bool:
    penalties = (spec.frequency_penalty or spec.presence_penalty) and spec.history
    return bool(penalties or spec.forbidden)


def _penalize(row: torch.Tensor, spec: SampleSpec) -> None:
    """logits[t] -= count(t) * frequency_penalty + (count(t) > 0) * presence_penalty, as OpenAI's API defines it."""
    if spec.history and (spec.frequency_penalty or spec.presence_penalty):
        ids, counts = torch.unique(torch.tensor(spec.history, device=row.device), return_counts=True)
        row[ids] -= counts * spec.frequency_penalty + spec.presence_penalty
    if spec.forbidden:
        row[list(spec.forbidden)] = -torch.inf


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Truncates and draws, all rows at once; every operation works within a row."""
    # Largest logit 0, so that no temperature, however small, can overflow.
    scaled = logits.double() - logits.amax(dim=-1, keepdim=True)
    scaled /= _column([spec.temperature for spec in specs], logits.device)
    for i, spec in enumerate(specs):
        if 0 < spec.top_k < logits.shape[1]:
            _keep_best(scaled[i], spec.top_k)
    probs = scaled.softmax(dim=-1)
    for i, spec in enumerate(specs):
        if spec.top_p < 1.0:
            _keep_nucleus(probs[i], spec.top_p)
    cumulative = probs.cumsum(dim=-1)
    target = _column([spec.uniform for spec in specs], logits.device) * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, target, right=True)
    # Rounding may put the target on the very end: the last token that has any probability is the answer then.
    last = probs.shape[1] - 1 - (probs > 0).int().flip(-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(picked, last)[:, 0]


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _keep_best(row: torch.Tensor, count: int) -> None:
    """-inf for all but the `count` largest of row [vocab]; of equal ones the lower ids stay."""
    threshold = row.topk(count).values[-1]
    above = row > threshold
    ties = row == threshold
    keep = above | (ties & (ties.cumsum(dim=0) <= count - above.sum()))
    row.masked_fill_(~keep, -torch.inf)


def _keep_nucleus(probs: torch.Tensor, top_p: float) -> None:
    """0 for all but the fewest most likely tokens whose probability reaches top_p (Holtzman et al. 2020)."""
    ordered, ids = probs.sort(descending=True, stable=True)
    before = ordered.cumsum(dim=0) - ordered
    keep = before < top_p
    keep[0] = True
    probs[ids[~keep]] = 0.0

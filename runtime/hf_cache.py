"""`CommitKVCache`: our policies in Hugging Face transformers.

    cache = CommitKVCache("commitkv", model=model, tokenizer=tokenizer)
    ids = model.generate(**inputs, past_key_values=cache)      # as often as there are turns, with the whole text
    cache.commit()                                             # or let the next turn do it

Pages, committed blocks, lifecycle, probes, kernels and policies are the engine's. transformers runs the model; the
cache holds no keys or values outside pages and blocks, so memory shrinks with every commit. `get_seq_length` and
positions stay logical. One sequence per cache; padding, beams and sliding windows are refused.

What a policy protects by its text (system prompt, sentences that ask to be remembered) is found where a tokenizer was
given; `protect` takes positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from runtime.conversation import Conversation
from runtime.errors import ConfigError, OutOfMemoryError, PromptTooLongError, RequestError
from runtime.hf_attention import CountedStep, HfDecoder, HfExecutor, RoutedCache
from runtime.hf_model import (
    CacheOptions,
    cache_limits,
    chat_format_of,
    full_cache_bytes,
    model_spec,
    prepare_model,
    probe_tokens_of,
)
from runtime.kv_manager import KvManager
from runtime.kv_storage import KvStorage
from runtime.maintenance import Maintenance
from runtime.policy.base import Policy
from runtime.policy.check import check_model
from runtime.policy.recording import recording_of
from runtime.policy.registry import get_policy
from runtime.policy.task_type import detect_task
from runtime.probing import CommitWork, ProbeSettings, ProbeWork
from runtime.protection import protected_ranges, token_ranges
from runtime.request import KvStats
from runtime.reservations import Freed, RowReservation
from runtime.step import SequencePlan
from runtime.step_tables import StepRows
from runtime.wiring import choose_forms

_HANDLE = 0
_HOOKED = "commitkv_hooks"


@dataclass(frozen=True, eq=False)
class _Open:
    """Rows of the forward call that runs."""

    token_ids: tuple[int, ...]
    reservation: RowReservation
    step: CountedStep


class CommitKVCache(RoutedCache):
    """A transformers cache of one conversation under one of our policies.

    policy: a registered name or a record. model: the model that will use the cache, on a CPU; its attention is routed
    through `runtime.hf_attention`, which serves other caches as before. tokenizer: the model's, needed by policies
    that probe. Raises ConfigError or UnknownPolicyError.
    """

    def __init__(
        self,
        policy: str | Policy = "commitkv",
        *,
        model: PreTrainedModel,
        tokenizer: Any = None,
        options: CacheOptions | None = None,
    ) -> None:
        self.policy = get_policy(policy) if isinstance(policy, str) else policy
        spec, self._options = model_spec(model), options or CacheOptions()
        check_model(self.policy, spec)
        if self.policy.signals.on:
            raise ConfigError(
                f"policy {self.policy.name}: stages tokens by signals, expected none in a CommitKVCache, whose steps "
                f"transformers runs and nothing watches; set the weights of signals to 0, or use the engine"
            )
        super().__init__(spec.num_layers)
        self._limits = cache_limits(model, self._options)
        self._tokenizer, self._chat_format = tokenizer, chat_format_of(tokenizer, self.policy)
        self._manager = KvManager(
            spec, self._limits, self._options.kv_memory_bytes or full_cache_bytes(model, self._limits)
        )
        storage = KvStorage(spec, self._limits, self._manager.num_pages, self._manager.num_blocks)
        _, forms = choose_forms(torch.get_num_threads(), torch.get_num_threads())
        self._executor = HfExecutor(HfDecoder(model), spec, self._limits, storage, forms)
        self._conversation = Conversation(_HANDLE, None, self.policy)
        self._manager.open(_HANDLE, self.policy)
        prompt = probe_tokens_of(tokenizer, self._chat_format)
        probe = ProbeSettings(prompt, self._options.probe_tokens, self._limits.max_seq_len)
        conversations = {_HANDLE: self._conversation}
        self._maintenance = Maintenance(self._manager, conversations, probe, self._options.watermark)
        self._open: _Open | None = None
        self._decoding = False
        self._prompt_end = 0
        self._num_layers = spec.num_layers
        prepare_model(model)
        _hook(model)

    # What transformers asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Logical tokens, whatever is left of them."""
        return self._manager[_HANDLE].num_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._limits.max_seq_len

    @property
    def is_croppable(self) -> bool:
        """Only where nothing is scored or compressed does `crop` leave no trace; assisted decoding asks this."""
        return not self.policy.compresses

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens, a negative count as in transformers. RequestError for committed ones."""
        if tokens_to_remove > 0:
            raise RequestError(f"crop: got {tokens_to_remove}, expected 0 or a negative number of tokens to remove")
        kept = self.get_seq_length() + tokens_to_remove
        freed = self._manager.truncate(_HANDLE, max(0, kept))
        if freed is None:
            raise RequestError(
                f"crop: {-tokens_to_remove} tokens reach into what was committed, expected only newer ones; "
                f"begin again with reset()"
            )
        del self._conversation.tokens[max(0, kept) :]
        self._manager[_HANDLE].unprotect_from(max(0, kept, self.policy.protection.sink_tokens))
        self._release(freed)

    def reset(self) -> None:
        """Forgets everything; protection too, but for the policy's own first tokens."""
        self._release(self._manager.release(_HANDLE))
        self._manager.open(_HANDLE, self.policy)
        self._conversation.policy = self.policy
        self._conversation.tokens.clear()
        self._decoding = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise _one_sequence("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats != 1:
            raise _one_sequence("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if indices.tolist() not in ([0], [True]):
            raise _one_sequence("batch_select_indices")

    # What users ask

    def protect(self, start: int, end: int) -> None:
        """Tokens at logical positions [start, end) are never merged or evicted; they may lie ahead."""
        if not 0 <= start < end <= self._limits.max_seq_len:
            raise RequestError(
                f"protect: got [{start}, {end}), expected 0 <= start < end <= {self._limits.max_seq_len}; correct it"
            )
        self._manager[_HANDLE].protect(start, end)

    def commit(self) -> None:
        """Ends the turn: freezes what lies behind the recent window, probes it, commits it."""
        self._decoding = False
        self._maintenance.turn_ended(self._conversation)
        self._run_all(self._maintenance.urgent)
        self._run_all(self._maintenance.idle)

    def stats(self) -> KvStats:
        """Bytes and token counts; `kv_bytes` holds pages, blocks with scales, biases and scores, and tables."""
        return self._manager.stats(_HANDLE)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every logical token so far."""
        return tuple(self._conversation.tokens)

    # One forward call

    def begin(self, token_ids: list[int], position_ids: torch.Tensor | None) -> None:
        """Takes pages for the rows that are about to run. Called by the model's hook."""
        assert self._open is None, "a forward call inside another one"
        if self._decoding and len(token_ids) > 1 and self._options.auto_commit:
            self.commit()
        self._run_all(self._maintenance.urgent)
        first = self.get_seq_length()
        self._check_rows(token_ids, first, position_ids)
        if len(token_ids) > 1:
            self._apply_text_rules(token_ids, first)
        reservation = self._reserve(len(token_ids))
        rows = self._rows(tuple(token_ids), first, reservation)
        step = self._executor.begin(rows)
        self._open, self.step = _Open(tuple(token_ids), reservation, step), step

    def end(self) -> None:
        """Records the rows that ran. Called by the model's hook."""
        opened = self._open
        assert opened is not None
        if opened.step.num_attended != self._num_layers:
            self.give_up()
            raise ConfigError(
                "attn_implementation: was changed after the cache was made, expected commitkv_sdpa or commitkv_eager; "
                "make a new CommitKVCache"
            )
        self._open = self.step = None
        self._conversation.tokens.extend(opened.token_ids)
        self._manager.settle_rows(opened.reservation)
        self._maintenance.step_done()
        self._decoding = len(opened.token_ids) == 1

    def give_up(self) -> None:
        """Gives back the pages of a forward call that failed. Called by the model's hook."""
        if self._open is not None:
            self._manager.cancel_rows(self._open.reservation)
            self._release(Freed(self._open.reservation.new_page_ids))
            self._open = self.step = None

    def _check_rows(self, token_ids: list[int], first: int, position_ids: torch.Tensor | None) -> None:
        last = first + len(token_ids)
        if last > self._limits.max_seq_len:
            raise PromptTooLongError(
                f"input_ids: {len(token_ids)} tokens after {first} of the conversation, expected at most "
                f"{self._limits.max_seq_len} together; shorten the prompt or raise CacheOptions.max_seq_len"
            )
        if position_ids is not None and position_ids.reshape(-1).tolist() != list(range(first, last)):
            raise RequestError(
                f"position_ids: got {position_ids.reshape(-1).tolist()[:8]}..., expected {first} to {last - 1}: the "
                f"conversation's own positions, without padding; leave them out"
            )

    def _rows(self, token_ids: tuple[int, ...], first: int, reservation: RowReservation) -> StepRows:
        """The rows, of which those raise scores that would in the engine, piece by piece."""
        policy, size = self._conversation.policy, self._options.record_piece_tokens
        if len(token_ids) > 1:
            self._prompt_end = first + len(token_ids)
        record = bytearray()
        for start in range(0, len(token_ids), size):
            piece = token_ids[start : start + size]
            start += first
            recording = recording_of(policy, start, start + len(piece), self._prompt_end)
            plan = SequencePlan(
                handle=_HANDLE, token_ids=piece, first_position=start, slots=reservation.slots, view=reservation.view,
                record_seen=recording.on, record_skip=policy.record_skip, sample=None,
                record_last=recording.last_rows, record_sum=recording.adds,
            )  # fmt: skip
            record += StepRows.of(plan).record
        return StepRows(token_ids, first, reservation.slots, reservation.view, bytes(record), policy.record_skip)

    def _reserve(self, num_tokens: int) -> RowReservation:
        """Pages for new rows, after a commit if they do not fit. Raises OutOfMemoryError."""
        try:
            return self._manager.reserve_rows(_HANDLE, num_tokens)
        except OutOfMemoryError:
            work = self._maintenance.reclaim()
            if work is None or not self._commit(work):
                raise
        return self._reserve(num_tokens)

    def _apply_text_rules(self, token_ids: list[int], first: int) -> None:
        """What the policy makes of a prompt's text: its task type and its system part, sentences, names and numbers."""
        rules = self.policy.protection
        if self._chat_format is None or not self.policy.compresses:
            return
        offsets, text = [], ""
        for token_id in token_ids:
            piece = str(self._tokenizer.decode([token_id]))
            offsets.append((len(text), len(text) + len(piece)))
            text += piece
        system_end = self._chat_format.system_end(text) if first == 0 else 0
        if first == 0 and self.policy.by_task:
            self._take_policy(self.policy.for_task(detect_task(text[system_end:])))
        ranges = protected_ranges(text, rules)
        if rules.system_prompt and system_end:
            ranges.append((0, system_end))
        for start, end in token_ranges(ranges, offsets):
            self._manager[_HANDLE].protect(first + start, first + end)

    def _take_policy(self, policy: Policy) -> None:
        """Of a cache that is still empty."""
        protected = self._manager[_HANDLE].protected_ranges()
        self._manager.release(_HANDLE)
        self._manager.open(_HANDLE, policy)
        for start, end in protected:
            self._manager[_HANDLE].protect(start, end)
        self._conversation.policy = policy

    # Commits

    def _run_all(self, next_work: Callable[[], ProbeWork | CommitWork | None]) -> None:
        """Does the maintenance that `next_work` names until there is none, or no room for it."""
        while (work := next_work()) is not None:
            if isinstance(work, ProbeWork):
                self._probe(work)
            elif not self._commit(work):
                return

    def _probe(self, work: ProbeWork) -> None:
        done = False
        try:
            done = self._executor.probe(work.plan, lambda: False)
        finally:
            self._release(self._maintenance.settle_probe(work, done))

    def _commit(self, work: CommitWork) -> bool:
        """False, with nothing changed, where there is no room to write the new blocks."""
        (plan,) = work.plans
        (line,) = self._executor.draw_lines(work.plans)
        try:
            reservation = self._manager.reserve_publish(plan, line)
        except OutOfMemoryError:
            self._maintenance.commit_failed()
            return False
        try:
            self._executor.publish(reservation.plan, line)
        except BaseException:
            self._manager.cancel_commit(reservation)
            raise
        self._release(self._manager.settle_commit(reservation))
        _, replaced = self._maintenance.committed(plan.handle)
        if replaced is not None:
            self._release(replaced)
        return True

    def _release(self, freed: Freed) -> None:
        self._executor.release(freed.page_ids, freed.blocks)


def _one_sequence(name: str) -> RequestError:
    return RequestError(
        f"{name}: a CommitKVCache holds one sequence, expected no beams and no batch; use one per sequence"
    )


def _hook(model: PreTrainedModel) -> None:
    """Tells a `CommitKVCache` about every forward call of its model, once per model."""
    base = model.base_model
    if not hasattr(base, _HOOKED):
        before = base.register_forward_pre_hook(_before_forward, with_kwargs=True)
        after = base.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)
        setattr(base, _HOOKED, (before, after))


def _cache_of(kwargs: dict[str, Any]) -> CommitKVCache | None:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return cache if isinstance(cache, CommitKVCache) else None


def _before_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _cache_of(kwargs)
    if cache is None:
        return
    input_ids = args[0] if args else kwargs.get("input_ids")
    if input_ids is None:
        raise RequestError("inputs_embeds: a CommitKVCache must know the tokens to re-read them; pass input_ids")
    if input_ids.shape[0] != 1:
        raise RequestError(
            f"batch: got {input_ids.shape[0]} sequences (of beams, returned sequences or prompts), expected 1; use one "
            f"CommitKVCache per sequence, num_beams=1 and num_return_sequences=1"
        )
    cache.begin(input_ids[0].tolist(), kwargs.get("position_ids"))


def _after_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """`output` is None where the call raised."""
    cache = _cache_of(kwargs)
    if cache is None:
        return
    if output is None:
        cache.give_up()
    else:
        cache.end()

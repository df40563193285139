"""`python -m perf.evaluation.peers`: other caches on the same weights, tasks and questions, driven turn by turn.

Runs in an environment of its own (`make peers`), because kvpress pins what it needs. transformers' QuantizedCache
quantizes everything; the presses of kvpress (NVIDIA) keep a share of the tokens. A press works when its context is
prefilled, so here it is asked again after every turn to bring the whole cache down to its share, as its own
DecodingPress does every so many tokens. KVzip reads the whole context once more and compresses it once, at the end:
that is how it is made, and it favours it here.

Bytes: what is kept, in fp16; of QuantizedCache its codes, scales and zeros, and the tokens it holds back unquantized.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from perf.evaluation import report
from perf.evaluation.hold import PEER_FULL, Raw, Store, compare, first_tokens
from perf.evaluation.tasks import Task
from perf.peer_model import PeerModel, transformers_model
from plugins.linear.cpu import has_fast_bf16
from runtime import manifest as manifests
from runtime.chat_format import ChatFormat, RenderedTurn
from runtime.errors import CommitKVError, ConfigError
from runtime.text import EngineTokenizer
from runtime.wiring import load_chat_format, load_tokenizer

GROUP = 64  # numbers per scale of QuantizedCache; its default
RESIDUAL = 128  # newest tokens that QuantizedCache keeps as they are; its default


@dataclass(frozen=True)
class TokenTask:
    """A task in tokens: `turns` one after the other make the conversation, a question follows all of them."""

    turns: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(turn) for turn in self.turns)


def tokenize(task: Task, tokenizer: EngineTokenizer, chat: ChatFormat) -> TokenTask:
    """The tokens that our engine makes of the same turns and questions."""

    def encode(turn: RenderedTurn, answer: str = "") -> tuple[int, ...]:
        return tuple(tokenizer.encode(turn.text + answer, (turn.user_start, turn.user_end))[0])

    turns = [encode(chat.first_turn(task.system, task.turns[0]))]
    turns += [encode(chat.next_turn(text, False)) for text in task.turns[1:]]
    questions = [encode(chat.next_turn(q.text, False), q.opening) for q in task.questions]
    return TokenTask(tuple(turns), tuple(questions))


@dataclass(frozen=True)
class Peer:
    """One way to hold a conversation.

    cache: makes an empty one.   press: makes a press for a share of the tokens, or None.   whole: the press works once,
    on the whole conversation.   token_bits: bits that one number of K or V takes.
    """

    name: str
    cache: Callable[[Any], Any]
    press: Callable[[float], Any] | None = None
    share: float = 1.0
    whole: bool = False
    token_bits: float = 16.0


def peers(shares: tuple[float, ...]) -> Iterator[Peer]:
    """Every peer; presses once per share. Raises ConfigError where a package is missing."""
    try:
        import kvpress
        from transformers import DynamicCache
    except ImportError as error:
        raise ConfigError(f"peers: {error}, expected kvpress 0.5.5 in this environment; run make peers") from error

    def dynamic(_: Any) -> Any:
        return DynamicCache()

    yield Peer(PEER_FULL, dynamic)
    for bits in (8, 4):
        # A scale and a zero of 16 bits for every group.
        name, token_bits = f"transformers QuantizedCache int{bits}", bits + 32 / GROUP
        yield Peer(name, partial(_quantized, bits), token_bits=token_bits)
    turn_by_turn = {
        "SnapKV": lambda ratio: kvpress.SnapKVPress(ratio),
        "ExpectedAttention + AdaKV": lambda ratio: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio)),
        "TOVA": lambda ratio: kvpress.TOVAPress(ratio),
        "KeyDiff": lambda ratio: kvpress.KeyDiffPress(ratio),
        "StreamingLLM": lambda ratio: kvpress.StreamingLLMPress(ratio),
        "Random": lambda ratio: kvpress.RandomPress(ratio),
        "SnapKV + merging": lambda ratio: kvpress.MergingPress(kvpress.SnapKVPress(ratio)),
    }
    for share in shares:
        for name, make in turn_by_turn.items():
            yield Peer(f"kvpress {name} share={share}", dynamic, make, share)
        yield Peer(f"kvpress KVzip share={share}", dynamic, kvpress.KVzipPress, share, whole=True)


def _quantized(bits: int, config: Any) -> Any:
    from transformers import QuantizedCache

    return QuantizedCache("hqq", config, nbits=bits)


class PeerHolder:
    """transformers with the engine's own weights."""

    def __init__(self, engine_dir: Path, num_threads: int) -> None:
        manifest = manifests.load(engine_dir, verify=False)
        self.tokenizer = load_tokenizer(engine_dir, manifest)
        self.chat = load_chat_format(engine_dir, manifest)
        self.spec = manifest.model
        # Where a CPU does not multiply bf16, torch takes minutes for a turn; fp32 holds the same weights exactly.
        dtype = manifest.limits.dtype if has_fast_bf16() else "fp32"
        torch.set_num_threads(num_threads)
        self.model = transformers_model(PeerModel(engine_dir, self.spec, dtype, (), num_threads))
        self._tokenizer_dir = tempfile.TemporaryDirectory()
        self._save_tokenizer(engine_dir, manifest)

    def _save_tokenizer(self, engine_dir: Path, manifest: manifests.Manifest) -> None:
        """KVzip looks for the model's tokenizer where the model's configuration says that it came from."""
        import transformers

        library: Any = transformers  # whose tokenizers have no types
        tokens = manifest.tokens
        tokenizer = library.PreTrainedTokenizerFast(
            tokenizer_file=str(engine_dir / manifests.TOKENIZER_FILE), bos_token=tokens.bos_token or None,
            eos_token=tokens.eos_token or None,
        )  # fmt: skip
        if manifest.has_file(manifests.CHAT_TEMPLATE_FILE):
            tokenizer.chat_template = (engine_dir / manifests.CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
        tokenizer.save_pretrained(self._tokenizer_dir.name)
        self.model.config.name_or_path = self._tokenizer_dir.name

    @torch.inference_mode()
    def hold(self, task: Task, peer: Peer) -> Raw:
        started = time.monotonic()
        tokens = tokenize(task, self.tokenizer, self.chat)
        cache = peer.cache(self.model.config)
        if peer.whole:
            self._compress_whole(tokens, peer, cache)
        else:
            first = 0
            for turn in tokens.turns:
                self._turn(turn, first, peer, cache)
                first += len(turn)
        logprobs = torch.stack([self.ask(question, tokens.num_tokens, cache) for question in tokens.questions])
        num_bytes, full_bytes = self._bytes(tokens.num_tokens, peer, cache)
        seconds = time.monotonic() - started
        return Raw(logprobs, first_tokens(self.tokenizer, task), tokens.num_tokens, num_bytes, full_bytes, seconds)

    def _turn(self, turn: tuple[int, ...], first: int, peer: Peer, cache: Any) -> None:
        """Reads a turn into the cache, then lets the press bring everything down to its share of the tokens so far."""
        press: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if peer.press is not None:
            import kvpress

            target = max(1, round(peer.share * (first + len(turn))))
            base = peer.press(0.0)
            if isinstance(base, kvpress.MergingPress):  # DecodingPress takes scorers only; this one scores inside
                press = TurnPress(base, target)(self.model)
            else:
                press = kvpress.DecodingPress(base, compression_interval=1, target_size=target)(self.model)
        with press:
            self.forward(turn, first, cache)

    def _compress_whole(self, tokens: TokenTask, peer: Peer, cache: Any) -> None:
        assert peer.press is not None
        with peer.press(1.0 - peer.share)(self.model):
            self.forward(tuple(token for turn in tokens.turns for token in turn), 0, cache)

    def ask(self, question: tuple[int, ...], first: int, cache: Any) -> torch.Tensor:
        logits = self.forward(question, first, copy.deepcopy(cache))
        return torch.log_softmax(logits.float(), dim=-1)

    def forward(self, ids: tuple[int, ...], first: int, cache: Any) -> torch.Tensor:
        """Logits [vocab] of the last row. Positions stay logical, though the cache may hold fewer tokens."""
        positions = torch.arange(first, first + len(ids))[None]
        out = self.model(
            input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=positions, logits_to_keep=1
        )  # fmt: skip
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _bytes(self, num_tokens: int, peer: Peer, cache: Any) -> tuple[int, int]:
        """Bytes held, and those of the full cache in fp16."""
        full = num_tokens * self.spec.kv_token_bytes("fp16")
        if peer.press is None:
            quantized = max(0, num_tokens - RESIDUAL) if peer.token_bits < 16 else 0
            return round(full / num_tokens * (num_tokens - quantized * (1 - peer.token_bits / 16))), full
        numbers = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
        for layer in self.model.model.layers:  # AdaKV and KVzip mask what they would free
            masked = getattr(layer.self_attn, "masked_key_indices", None)
            numbers -= 0 if masked is None else 2 * self.spec.head_dim * len(masked[0])
        return 2 * numbers, full


class TurnPress:
    """Applies a press that wraps a scorer to the whole cache after one turn's forward pass."""

    def __init__(self, press: Any, target: int) -> None:
        self._press, self._target = press, target

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        hooks = [layer.self_attn.register_forward_hook(self._hook, with_kwargs=True) for layer in model.model.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        self._press.compression_ratio = max(0.0, 1.0 - self._target / layer.keys.shape[2])
        layer.keys, layer.values = self._press.compress(
            module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs
        )
        return output


def _parser() -> argparse.ArgumentParser:
    from perf.evaluate import make_tasks_parser

    parser = make_tasks_parser("python -m perf.evaluation.peers", "Other caches on the same tasks.")
    parser.add_argument("--shares", default="0.3,0.2", help="shares of the tokens that presses keep (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES", help="parts of names, between commas: KVzip,SnapKV "
                        "(default: all)")  # fmt: skip
    return parser


def chosen_peers(shares: str, only: str) -> list[Peer]:
    """Those whose names hold one of the parts, the full cache in any case. Raises ConfigError where none does."""
    from perf.evaluate import numbers

    everyone = list(peers(tuple(numbers("--shares", shares))))
    parts = [part.strip() for part in only.split(",") if part.strip()]
    if not parts:
        return everyone
    chosen = [peer for peer in everyone if peer.name == PEER_FULL or any(part in peer.name for part in parts)]
    if len(chosen) < 2:
        known = ", ".join(peer.name for peer in everyone)
        raise ConfigError(f"--only: got {only!r}, expected parts of these names: {known}")
    return chosen


def main(argv: list[str] | None = None) -> int:
    from perf.evaluate import make_tasks, peer_scores

    args = _parser().parse_args(argv)
    try:
        holder = PeerHolder(args.engine, args.threads)
        store = Store(args.output / "peers", f"transformers on {args.engine}")
        chosen = chosen_peers(args.shares, args.only)
        tasks = make_tasks(args.contexts, args.questions, holder.spec.max_positions)
        with tqdm(total=len(chosen) * len(tasks), unit="conversation", file=sys.stdout) as bar:
            for task in tasks:
                for peer in chosen:
                    bar.set_description(f"{task.num_tokens} tokens, {peer.name}")
                    hold_peer(holder, store, task, peer)
                    bar.update()
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{report.markdown(peer_scores(args.output / 'peers', tasks))}")
    return 0


def hold_peer(holder: PeerHolder, store: Store, task: Task, peer: Peer) -> None:
    """Measures what the store lacks; DynamicCache, the first of the peers, is what the others are held against."""
    whole = store.full_logprobs(task)
    if store.get(peer.name, task) is not None and whole is not None:
        return
    raw = holder.hold(task, peer)
    if peer.name == PEER_FULL:
        store.put_full(task, raw.logprobs)
        whole = raw.logprobs
    assert whole is not None
    if store.get(peer.name, task) is None:
        store.put(compare(task, peer.name, raw, whole))


if __name__ == "__main__":
    sys.exit(main())

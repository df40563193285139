"""What `perf.bench` sets beside our engine: transformers, torch's attention, llama.cpp. All on the same tokens.

Each system keeps one history and extends it from context to context; what is decoded or prefilled to be timed is taken
back, so that every round sees the same length.
"""

from __future__ import annotations

import copy
import json
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from builder.lower_torch import TORCH_DTYPE
from perf.bench_engine import Decoded, run_steps
from perf.peer_model import PeerMissingError, PeerModel
from runtime.memory_plan import weight_bytes

CHUNK_TOKENS = 512
Q8_0_BYTES = 34 / 32  # llama.cpp's q8_0: 32 codes and an fp16 scale


class System(Protocol):
    """name: of the row.   only_attention: whether the rest of the model is left out."""

    name: str
    only_attention: bool

    def holds(self, context: int, batch: int) -> bool:
        """Whether this system can be measured there."""
        ...

    def begin(self, context: int, batch: int) -> None:
        """Brings `batch` histories of `context` tokens into memory; contexts come in rising order."""
        ...

    def decode(self, num_steps: int, budget_s: float) -> Decoded:
        """One token for each history per step; what is decoded is taken back."""
        ...

    def prefill(self, num_tokens: int) -> float | None:
        """Tokens per second of about `num_tokens` new tokens, all histories together; None if it has no such thing."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Of one history."""
        ...

    @property
    def weight_bytes(self) -> int:
        """That one step reads."""
        ...

    def end(self) -> None:
        """Lets go of all but the first history."""
        ...

    def close(self) -> None: ...


class TransformersSystem:
    """transformers with one of its caches, and torch's attention inside."""

    only_attention = False

    def __init__(self, model: PeerModel, decoder: Any, backend: str | None = None) -> None:
        """backend: of QuantizedCache (4 bits); None: DynamicCache. Raises PeerMissingError."""
        from transformers import DynamicCache, QuantizedCache

        self.name = "transformers, DynamicCache" if backend is None else f"transformers, QuantizedCache ({backend})"
        self._model, self._decoder = model, decoder
        self._quantized = backend is not None
        try:
            self._first: Any = DynamicCache() if backend is None else QuantizedCache(backend, decoder.config, nbits=4)
        except ImportError as error:
            raise PeerMissingError(
                f"transformers, QuantizedCache: its backend {backend} is not installed; run make peers"
            ) from error
        self._cache: Any = self._first
        self._batch = 1

    def holds(self, context: int, batch: int) -> bool:
        return batch == 1 or not self._quantized

    def begin(self, context: int, batch: int) -> None:
        have = self._first.get_seq_length()
        for start in range(have, context, CHUNK_TOKENS):
            self._run(self._first, torch.tensor([self._model.tokens[start : min(context, start + CHUNK_TOKENS)]]))
        self._batch = batch
        self._cache = self._first
        if batch > 1:
            self._cache = copy.deepcopy(self._first)
            self._cache.batch_repeat_interleave(batch)

    def decode(self, num_steps: int, budget_s: float) -> Decoded:
        kept = [dict(layer.__dict__) for layer in self._cache.layers]
        token = torch.full((self._batch, 1), int(self._model.tokens[0]))
        step_ms = run_steps(lambda: self._run(self._cache, token).argmax(-1), num_steps, budget_s)
        self._put_back(kept)
        return Decoded(step_ms)

    def prefill(self, num_tokens: int) -> float | None:
        kept = [dict(layer.__dict__) for layer in self._cache.layers]
        tokens = torch.tensor([self._model.tokens[: max(1, num_tokens // self._batch)]] * self._batch)
        begin = time.perf_counter()
        self._run(self._cache, tokens)
        seconds = time.perf_counter() - begin
        self._put_back(kept)
        return tokens.numel() / seconds

    @torch.inference_mode()
    def _run(self, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            result = self._decoder(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = result.logits[:, -1]
        return logits

    def _put_back(self, kept: list[dict[str, Any]]) -> None:
        for layer, fields in zip(self._cache.layers, kept, strict=True):
            layer.__dict__.clear()
            layer.__dict__.update(fields)

    @property
    def kv_bytes(self) -> int:
        names = ("keys", "values", "_quantized_keys", "_quantized_values")
        held = [getattr(layer, name, None) for layer in self._first.layers for name in names]
        return sum(_tensor_bytes(tensor) for tensor in held if tensor is not None)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self._model.spec, self._model.dtype)

    def end(self) -> None:
        self._cache, self._batch = self._first, 1

    def close(self) -> None:
        """Nothing outlives the process."""


def _tensor_bytes(quantized: Any) -> int:
    """Bytes of a quantized tensor: its codes, scales and shifts, however its library nests them."""
    if isinstance(quantized, torch.Tensor) and not hasattr(quantized, "__tensor_flatten__"):
        return quantized.numel() * quantized.element_size()
    return sum(_tensor_bytes(getattr(quantized, name)) for name in quantized.__tensor_flatten__()[0])


class SdpaSystem:
    """torch's attention of one decode step over a contiguous cache in the engine's dtype, all layers; nothing else."""

    name = "torch SDPA, attention only"
    only_attention = True
    weight_bytes = 0

    def __init__(self, model: PeerModel) -> None:
        self._model = model
        self._context = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def holds(self, context: int, batch: int) -> bool:
        return True

    def begin(self, context: int, batch: int) -> None:
        spec, dtype = self._model.spec, TORCH_DTYPE[self._model.dtype]
        self._context = context
        q = torch.ones(batch, spec.num_q_heads, 1, spec.head_dim, dtype=dtype)
        kv_shape = (batch, spec.num_kv_heads, context, spec.head_dim)
        self._layers = [(q, torch.ones(kv_shape).to(dtype), torch.ones(kv_shape).to(dtype))
                        for _ in range(spec.num_layers)]  # fmt: skip

    def decode(self, num_steps: int, budget_s: float) -> Decoded:
        return Decoded(run_steps(self._attend, num_steps, budget_s))

    def _attend(self) -> None:
        for q, k, v in self._layers:
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def prefill(self, num_tokens: int) -> float | None:
        return None

    @property
    def kv_bytes(self) -> int:
        return self._context * self._model.spec.kv_token_bytes(self._model.dtype)

    def end(self) -> None:
        self._layers = []

    def close(self) -> None:
        """Nothing outlives the process."""


class LlamaCppSystem:
    """llama.cpp in a process of its own, batch 1, on the GGUF that the engine was built from."""

    only_attention = False

    def __init__(self, model: PeerModel, python: Path, gguf: Path, kv: str) -> None:
        """kv: f16 or q8_0. Raises PeerMissingError."""
        if not python.is_file():
            raise PeerMissingError(f"llama.cpp: no environment {python.parent.parent}; run make peers (minutes)")
        if not gguf.is_file():
            raise PeerMissingError(f"llama.cpp: no file {gguf}; pass the engine's GGUF with --gguf")
        self.name = f"llama.cpp, Q4_1 weights, {kv} KV" if "Q4_1" in gguf.name else f"llama.cpp, {gguf.stem}, {kv} KV"
        self._model, self._kv, self._have = model, kv, 0
        self.weight_bytes = gguf.stat().st_size
        command = [str(python), str(Path(__file__).with_name("bench_llama.py")), str(gguf), "--kv", kv,
                   "--threads", str(model.num_threads), "--max-tokens", str(model.spec.max_positions)]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.version = self._reply()["version"]
        except PeerMissingError:
            self.close()
            raise

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerMissingError(f"{self.name}: its process ended with code {self._process.wait()}; run make peers")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _ask(self, order: dict[str, Any]) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return [float(seconds) for seconds in self._reply()["seconds"]]

    def holds(self, context: int, batch: int) -> bool:
        return batch == 1

    def begin(self, context: int, batch: int) -> None:
        if context > self._have:
            self._ask({"extend": list(self._model.tokens[self._have : context])})
            self._have = context

    def decode(self, num_steps: int, budget_s: float) -> Decoded:
        pieces = [[int(token)] for token in self._model.tokens[:num_steps]]
        return Decoded(tuple(1e3 * s for s in self._ask({"timed": pieces, "budget_s": budget_s})))

    def prefill(self, num_tokens: int) -> float | None:
        piece = list(self._model.tokens[:num_tokens])
        return len(piece) / self._ask({"timed": [piece], "budget_s": 0.0})[0]

    @property
    def kv_bytes(self) -> int:
        share = Q8_0_BYTES / 2 if self._kv == "q8_0" else 1.0
        return round(self._have * self._model.spec.kv_token_bytes("fp16") * share)

    def end(self) -> None:
        """It has one history only."""

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

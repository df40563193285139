"""A transformers model whose attention reads our storage: what `CommitKVCache` and its probes run on.

`Cache.update` is given the keyword arguments of the attention call and may add to them; `RoutedCache` adds the step
whose pages and blocks attention shall read. The attention function registered here (`commitkv_sdpa`, `commitkv_eager`)
hands rows that carry a step to it, and all others to the implementation that the model had before, so a prepared
model serves other caches as it always did. Keys come rotated by transformers; our `append` gets an identity rotation.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from plugins.append.params import Rotary
from runtime.errors import ConfigError, RequestError
from runtime.executor_torch import KvStep, TorchExecutor
from runtime.step import int32
from runtime.step_tables import StepRows

STEP = "commitkv_step"
PREFIX = "commitkv_"


class Interrupted(Exception):
    """A probe gives way between two layers."""


class HfExecutor(TorchExecutor):
    """The engine's executor, for rows that transformers runs itself."""

    def begin(self, rows: StepRows) -> CountedStep:
        """Storage and attention of rows that are about to run."""
        return CountedStep(self._prepare([rows], int32()).kv)


class CountedStep:
    """`KvStep` that knows how many layers came by."""

    def __init__(self, step: KvStep) -> None:
        self._step = step
        self.num_attended = 0

    def append(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        return self._step.append(layer, q, k, v, rotary)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        self.num_attended += 1
        return self._step.attend(layer, q)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What transformers expects in `cache.layers`; all of it is the cache's own business."""

    def __init__(self, cache: RoutedCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = weakref.proxy(cache), index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self._cache.update(key_states, value_states, self._index, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        sizes: tuple[int, int] = self._cache.get_mask_sizes(query_length, self._index)
        return sizes

    def get_seq_length(self) -> int:
        return int(self._cache.get_seq_length())

    def get_max_length(self) -> int:
        return int(self._cache.get_max_length())


class RoutedCache(Cache):
    """A cache that holds no tensors: attention of the rows being run goes to `step`."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(num_layers)])
        self.step: KvStep | None = None
        self.interrupted: Callable[[], bool] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves K and V [1, G, rows, D] as they are and tells attention where to take them."""
        if self.interrupted is not None and self.interrupted():
            raise Interrupted
        batch, call = key_states.shape[0], kwargs.get("kwargs")
        if batch != 1:
            raise RequestError(
                f"batch: got {batch} sequences (of beams, returned sequences or prompts), expected 1; use one "
                f"CommitKVCache per sequence, num_beams=1 and num_return_sequences=1"
            )
        if not isinstance(call, dict):
            raise ConfigError(
                f"transformers: version {transformers.__version__} does not pass the attention call's arguments to "
                f"its cache, expected 5.24 or later; install that"
            )
        call[STEP] = self.step
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class HfDecoder:
    """`runtime.executor_torch.Decoder` over a prepared transformers model, so that probes run on it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._base = model.base_model
        self._head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._num_layers = int(model.config.num_hidden_layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KvStep,
        logit_rows: torch.Tensor,
        interrupted: Callable[[], bool] | None = None,
    ) -> torch.Tensor | None:
        """Logits [n, vocab] fp32 of `logit_rows` [n], None when interrupted. token_ids, positions: [rows] int64."""
        cache = RoutedCache(self._num_layers)
        cache.step, cache.interrupted = kv, interrupted
        try:
            out = self._base(input_ids=token_ids[None], position_ids=positions[None], cache=cache, use_cache=True)
        except Interrupted:
            return None
        hidden = out.last_hidden_state[0].index_select(0, logit_rows)
        logits: torch.Tensor = self._head(hidden).float()
        return logits


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface. query [B, Q, rows, D]; key, value [B, G, keys, D]; gives [B, rows, Q, D]."""
    step: KvStep | None = kwargs.pop(STEP, None)
    if step is None:
        return _base_attention(module)(module, query, key, value, attention_mask, **kwargs)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer == 0:
        _check_call(query, attention_mask, kwargs)
    rows, head_dim = query.shape[2], query.shape[3]
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    identity = (torch.ones(rows, head_dim // 2), torch.zeros(rows, head_dim // 2))
    out = step.attend(layer, step.append(layer, q, k, v, identity))
    return out[None], None


def _base_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """What the model would have used; `eager` lives in the model's own file."""
    name = module.config._attn_implementation.removeprefix(PREFIX)  # type: ignore[union-attr, operator]
    eager = sys.modules[type(module).__module__].eager_attention_forward if name == "eager" else None
    found: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = eager or AttentionInterface()[name]  # type: ignore[no-untyped-call]
    return found


def _check_call(query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """The last row sees everything, or there is padding or a window; and nobody asks for what kernels do not give."""
    if query.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "gradients: the kernels of CommitKVCache have none, expected torch.no_grad(); use it, or another cache"
        )
    if kwargs.get("output_attentions"):
        raise ConfigError(
            "output_attentions: got True, but attention over a CommitKVCache keeps no weights; leave it out"
        )
    if mask is None:
        return
    last = mask[..., -1, :]
    hidden = ~last if mask.dtype == torch.bool else last != 0
    if bool(hidden.any()):
        raise RequestError(
            f"attention_mask: hides {int(hidden.sum())} of {last.shape[-1]} tokens from the last row, expected none; "
            f"pass prompts without padding, and models whose sliding window is not shorter than the conversation"
        )

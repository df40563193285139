"""The one model definition: Llama, Mistral, Qwen2 (biases) and Qwen3 (q/k norm), written against `Ops`.

A lowering supplies the operations: the torch one runs them, a TensorRT one adds layers to a network. Tensors are
whatever the lowering says (`T`); shapes below are of the values that they stand for. R = rows of this step over
all sequences, H = hidden size, Q / G = query / KV heads, D = head size, F = ffn size.

Engine weights are fused where operations share their input: q, k, v into `qkv`, gate and up into `gate_up`.
`weight_recipes` is the authoritative list of their names, shapes and sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from runtime.config import ModelSpec

T = TypeVar("T")

EMBEDDING = "embedding.weight"
FINAL_NORM = "final_norm.weight"
HEAD = "head.weight"


class Ops(Protocol[T]):
    """What a lowering must offer. Weights are named as in `weight_recipes`; the lowering holds them."""

    def embed(self, weight: str) -> T:
        """[R, H]: rows of the embedding table for the step's token ids."""
        ...

    def linear(self, x: T, weight: str, bias: str | None) -> T:
        """[R, in] -> [R, out]: x . W^T + b."""
        ...

    def rms_norm(self, x: T, weight: str) -> T:
        """x / sqrt(mean(x^2) + eps) * w over the last dimension, in fp32 inside (Zhang and Sennrich, 2019)."""
        ...

    def add(self, a: T, b: T) -> T: ...

    def add_norm(self, x: T, delta: T, weight: str) -> tuple[T, T]:
        """x + delta and the rms_norm of it: the residual sum and what the next block reads."""
        ...

    def gated_silu(self, gate_up: T) -> T:
        """[R, 2F] -> [R, F]: silu(first half) * second half."""
        ...

    def split_heads(self, qkv: T) -> tuple[T, T, T]:
        """[R, (Q + 2G) * D] -> [R, Q, D], [R, G, D], [R, G, D]."""
        ...

    def append(self, layer: int, q: T, k: T, v: T) -> T:
        """Rotate q and k by the rows' positions, store k and v; returns the rotated q [R, Q, D]."""
        ...

    def attend(self, layer: int, q: T) -> T:
        """[R, Q, D] -> [R, Q * D]: attention over everything the rows' sequences hold in this layer."""
        ...

    def take_rows(self, x: T) -> T:
        """[R, H] -> [n, H]: only the rows whose logits are wanted."""
        ...

    def logits(self, x: T, weight: str) -> T:
        """[n, H] -> [n, vocab] fp32."""
        ...


@dataclass(frozen=True)
class LayerNames:
    """Engine weight names of one layer; None where the family has no such weight."""

    attention_norm: str
    qkv: str
    qkv_bias: str | None
    q_norm: str | None
    k_norm: str | None
    output: str
    ffn_norm: str
    gate_up: str
    down: str


@dataclass(frozen=True)
class WeightRecipe:
    """One engine weight: `sources` (Hugging Face names) are joined along dimension 0 to give `shape`.

    is_norm: stays fp32 in every engine (tiny, and the norm is computed in fp32).
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    is_norm: bool = False


def layer_names(spec: ModelSpec, layer: int) -> LayerNames:
    """Names of layer `layer`'s engine weights."""
    prefix = f"layers.{layer}"
    return LayerNames(
        attention_norm=f"{prefix}.attention_norm.weight",
        qkv=f"{prefix}.qkv.weight",
        qkv_bias=f"{prefix}.qkv.bias" if spec.qkv_bias else None,
        q_norm=f"{prefix}.q_norm.weight" if spec.qk_norm else None,
        k_norm=f"{prefix}.k_norm.weight" if spec.qk_norm else None,
        output=f"{prefix}.output.weight",
        ffn_norm=f"{prefix}.ffn_norm.weight",
        gate_up=f"{prefix}.gate_up.weight",
        down=f"{prefix}.down.weight",
    )


def weight_recipes(spec: ModelSpec) -> tuple[WeightRecipe, ...]:
    """Every weight of an engine, in the order in which a step reads them."""
    hidden = spec.hidden_size
    table = (spec.vocab_size, hidden)
    recipes = [WeightRecipe(EMBEDDING, table, (("model.embed_tokens.weight", table),))]
    for layer in range(spec.num_layers):
        recipes += _layer_recipes(spec, layer)
    recipes.append(_norm(FINAL_NORM, "model.norm.weight", hidden))
    if not spec.tied_embeddings:
        recipes.append(WeightRecipe(HEAD, table, (("lm_head.weight", table),)))
    return tuple(recipes)


def _norm(name: str, source: str, size: int) -> WeightRecipe:
    return WeightRecipe(name, (size,), ((source, (size,)),), is_norm=True)


def _layer_recipes(spec: ModelSpec, layer: int) -> list[WeightRecipe]:
    names = layer_names(spec, layer)
    hidden, ffn, source = spec.hidden_size, spec.ffn_size, f"model.layers.{layer}"
    q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    rows = q_size + 2 * kv_size

    def plain(name: str, source_name: str, shape: tuple[int, int]) -> WeightRecipe:
        return WeightRecipe(name, shape, ((f"{source}.{source_name}.weight", shape),))

    recipes = [_norm(names.attention_norm, f"{source}.input_layernorm.weight", hidden)]
    recipes.append(
        WeightRecipe(
            names.qkv,
            (rows, hidden),
            tuple((f"{source}.self_attn.{part}.weight", (size, hidden)) for part, size in sizes),
        )
    )
    if names.qkv_bias:
        parts = tuple((f"{source}.self_attn.{part}.bias", (size,)) for part, size in sizes)
        recipes.append(WeightRecipe(names.qkv_bias, (rows,), parts))
    if names.q_norm and names.k_norm:
        recipes.append(_norm(names.q_norm, f"{source}.self_attn.q_norm.weight", spec.head_dim))
        recipes.append(_norm(names.k_norm, f"{source}.self_attn.k_norm.weight", spec.head_dim))
    recipes.append(plain(names.output, "self_attn.o_proj", (hidden, q_size)))
    recipes.append(_norm(names.ffn_norm, f"{source}.post_attention_layernorm.weight", hidden))
    gate_up = tuple((f"{source}.mlp.{part}.weight", (ffn, hidden)) for part in ("gate_proj", "up_proj"))
    recipes.append(WeightRecipe(names.gate_up, (2 * ffn, hidden), gate_up))
    recipes.append(plain(names.down, "mlp.down_proj", (hidden, ffn)))
    return recipes


class DecoderModel:
    """The forward pass of one step, for any lowering."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.layers = tuple(layer_names(spec, layer) for layer in range(spec.num_layers))
        self.head = EMBEDDING if spec.tied_embeddings else HEAD

    def run(self, ops: Ops[T]) -> T:
        """Logits [n, vocab] of the wanted rows."""
        return self.logits(ops, self.hidden(ops))

    def hidden(self, ops: Ops[T]) -> T:
        """[R, H]: what the last layer leaves of every row."""
        x = ops.embed(EMBEDDING)
        normed = ops.rms_norm(x, self.layers[0].attention_norm)
        for layer, names in enumerate(self.layers):
            x, normed = ops.add_norm(x, self._attention(ops, layer, names, normed), names.ffn_norm)
            delta = ops.linear(ops.gated_silu(ops.linear(normed, names.gate_up, None)), names.down, None)
            if layer + 1 < len(self.layers):
                x, normed = ops.add_norm(x, delta, self.layers[layer + 1].attention_norm)
            else:
                x = ops.add(x, delta)
        return x

    def logits(self, ops: Ops[T], x: T) -> T:
        """Logits [n, vocab] of the wanted rows of x [R, H]."""
        return ops.logits(ops.rms_norm(ops.take_rows(x), FINAL_NORM), self.head)

    def _attention(self, ops: Ops[T], layer: int, names: LayerNames, normed: T) -> T:
        qkv = ops.linear(normed, names.qkv, names.qkv_bias)
        q, k, v = ops.split_heads(qkv)
        if names.q_norm and names.k_norm:
            q, k = ops.rms_norm(q, names.q_norm), ops.rms_norm(k, names.k_norm)
        q = ops.append(layer, q, k, v)
        return ops.linear(ops.attend(layer, q), names.output, None)

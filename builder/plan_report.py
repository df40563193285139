"""The memory plan as text: what weights and conversations will take under each policy."""

from __future__ import annotations

import re

from runtime.config import EngineLimits, ModelSpec
from runtime.errors import ConfigError
from runtime.memory_plan import committed_token_bytes, conversation_memory, weight_bytes
from runtime.policy.registry import ALL_POLICIES, policies_for

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def parse_bytes(text: str, name: str) -> int:
    """ "1GiB", "512 MB", "1000000" as bytes; ConfigError naming `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", text.upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ConfigError(f"{name}: got {text!r}, expected a size such as 512MiB or 1GiB; correct it")
    return size


def memory_report(model: ModelSpec, limits: EngineLimits, kv_memory_bytes: int) -> str:
    """Lines for `--dry-run`."""
    length = limits.max_seq_len
    lines = [
        f"memory plan of {model.name} ({model.family}, {model.num_layers} layers, {model.num_q_heads} query and "
        f"{model.num_kv_heads} KV heads of {model.head_dim})",
        f"  weights               {_weights(model, limits)}",
        f"  KV of one token, full {model.kv_token_bytes(limits.kv_dtype):,} B in {limits.kv_dtype}",
        f"  conversations of {length} tokens, at rest after a commit, in {_size(kv_memory_bytes)} of KV memory:",
        "",
        f"  {'policy':<28}{'B per old token':>16}{'one conversation':>18}{'of full':>9}{'conversations':>15}",
    ]
    full = conversation_memory(model, limits, ALL_POLICIES["full"], length).total_bytes
    for policy in policies_for(model):
        held = conversation_memory(model, limits, policy, length).total_bytes
        per_token = committed_token_bytes(model, limits, policy)
        mark = " (default)" if policy.name == limits.policy else ""
        lines.append(
            f"  {policy.name:<28}{per_token:>16,.0f}{_size(held):>18}{held / full:>9.2f}"
            f"{kv_memory_bytes // held:>15,}{mark}"
        )
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _weights(model: ModelSpec, limits: EngineLimits) -> str:
    size = _size(weight_bytes(model, limits.dtype, limits.weight_dtype))
    kind = limits.dtype if limits.weight_dtype == "same" else f"{limits.weight_dtype}, {limits.dtype} activations"
    return f"{size} in {kind}"

"""quantize-int8, quantize-int4: every entry stays, quantized; no scores needed."""

from runtime.policy.base import Policy


def _quantize_only(block_format: str) -> Policy:
    return Policy(
        name=f"quantize-{block_format}", budget_ratio=1.0, block_format=block_format, score="seen", absorb_gate=None
    )


INT8 = _quantize_only("int8")
INT4 = _quantize_only("int4")

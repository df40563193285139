"""rkv-gated: keeps what a trained scorer p = sigmoid(W . [k; v; pos] + b) lets through.

The form of R-KV that was proposed with CommitKV; the published one is rkv-redundancy. p > 0.4 stays, p > 0.7 while more
than 80 % of the KV memory is in use; names and numbers of the user's text are protected. W and b were learned by
`python -m perf.train_gate` from attention of SmolLM2-135M-Instruct, and other models are refused.
"""

from runtime.policy.base import Gate, Policy, Protection, Thresholds

POLICY = Policy(
    name="rkv-gated",
    score="gate",
    gate=Gate((30, 3, 64, "SmolLM2-135M-Instruct"), "SmolLM2-135M-Instruct.safetensors"),
    thresholds=Thresholds(calm=0.4, pressed=0.7, pressure=0.8),
    budget_ratio=0.35,
    absorb_gate=None,
    block_format="k8v4",
    protection=Protection(names_and_numbers=True),
)

"""commitkv-gate: commitkv's line, absorption and blocks over the trained gate's scores; nothing probed or recorded.

For servers that never idle, where commitkv has no time to probe. Entries are worth what the gate of rkv-gated says when
they are committed, and attention never changes it.
"""

from dataclasses import replace

from runtime.policy import commitkv, rkv_gated

POLICY = replace(commitkv.POLICY, name="commitkv-gate", score="gate", gate=rkv_gated.POLICY.gate)

"""Lets test modules import the helpers beside them, and keeps waiting threads from burning a shared machine."""

import os
import sys
from pathlib import Path

# Read by OpenMP when torch is first imported, so it has to be here: a waiting thread sleeps soon instead of spinning
# on a core that another process needs.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

for folder in ("runtime", "plugins", "builder", "perf", "triton"):
    sys.path.append(str(Path(__file__).parent / folder))

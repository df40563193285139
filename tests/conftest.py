"""Lets test modules import the helpers that lie beside them."""

import sys
from pathlib import Path

for folder in ("runtime", "plugins", "builder", "perf", "triton"):
    sys.path.append(str(Path(__file__).parent / folder))

"""Compression policies, one per file; `registry.ALL_POLICIES` lists them."""

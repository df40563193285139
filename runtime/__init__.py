"""The CommitKV engine: a pure half (stdlib only) that decides and a device half that computes."""

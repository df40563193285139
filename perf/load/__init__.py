"""Load, soak and fuzz against a server: our own open-loop driver, and runs of perf_analyzer and aiperf."""

"""The engine's own operations, one folder each: kernels, CPU forms and references."""

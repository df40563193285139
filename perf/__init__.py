"""Workloads, clients, reports, and the start of the Triton server they run against."""

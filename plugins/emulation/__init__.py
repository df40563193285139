"""Runs the CUDA kernels' own source on the CPU, where every hardware word checks how it is used."""

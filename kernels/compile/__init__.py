"""Compiles all Triton kernels ahead of time, without a GPU, and judges their machine code. No other code imports it but
tests and benchmarks."""

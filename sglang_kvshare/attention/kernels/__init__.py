"""Kernels for CUDA devices, each beside the plain PyTorch that says what it does.

A module here has the callable, its reference, and nothing of Triton; its kernel is the module of
the same name in ``device``, which is imported at the first launch. The callables take the reference
for tensors of a CPU and the kernel for those of a CUDA device.
"""

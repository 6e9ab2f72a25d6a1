"""Whether the kernel or the reference runs."""

from __future__ import annotations

import os

import torch

_TRUE = ("1", "true", "on", "yes", "y")


def takes_kernel(tensor: torch.Tensor, asked: bool | None) -> bool:
    """By default the kernel runs where there is a device for it.

    Args:
        tensor: one of the arguments; all are on one device.
        asked: ``True`` for the kernel, which for tensors of a CPU needs Triton's interpreter
            (``TRITON_INTERPRET=1`` before Triton is imported); ``False`` for the reference.

    Raises:
        ValueError: the kernel is asked for and cannot run.
    """
    if asked is None:
        return bool(tensor.is_cuda)
    if asked and not tensor.is_cuda and not _interpreted():
        raise ValueError("a kernel runs on a CUDA device, or on a CPU under TRITON_INTERPRET=1")
    return asked


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE

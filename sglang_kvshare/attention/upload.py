"""Index arrays on their way to the device, without the host waiting for it.

A copy from pageable memory waits until the stream has come to it. From pinned memory it does not;
PyTorch keeps a pinned block until the copies out of it are done, and then gives it out again, so
that after the first steps nothing is allocated.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def upload(device: torch.device, *arrays: NDArray[np.int64] | list[int]) -> list[torch.Tensor]:
    """int64 tensors on ``device``, of the same lengths; one copy for all of them, at least one.

    On a CPU a tensor shares the memory of its array.
    """
    given = [np.asarray(array, dtype=np.int64) for array in arrays]
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in given]
    lengths = [array.shape[0] for array in given]
    pinned = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=True)
    np.concatenate(given, out=pinned.numpy())
    return list(pinned.to(device, non_blocking=True).split(lengths))

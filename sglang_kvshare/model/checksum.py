"""SHA-256 of files, in blocks, so that a file of any size can report its progress."""

import hashlib
from collections.abc import Callable
from pathlib import Path

BLOCK = 1 << 20


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Hex digest of the file; `on_bytes` is told the size of each block as it is read."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()


def human_size(size: int) -> str:
    """The size in decimal units, as disks and package indexes state it."""
    value = float(size)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"

"""Where a data set comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DataSource:
    """Where tasks and workloads look for their data, in this order.

    Attributes:
        folder: holds data sets in the formats that :mod:`kvshare_eval.loaders` names.
        hub: whether data sets may be fetched by name from the hub.
    """

    folder: Path | None = None
    hub: bool = False

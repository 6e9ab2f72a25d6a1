"""Data sets from the hub, by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders.files import HubSet, Row


def fetch(place: HubSet) -> Iterator[Row]:
    """The rows of one split.

    Raises:
        EvalError: the package ``datasets`` is not installed, or the hub does not give the set.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise EvalError(
            f"{place.path} from the hub needs the package datasets: "
            "pip install 'sglang-kvshare[hub]'"
        ) from None
    try:
        rows = datasets.load_dataset(place.path, place.config, split=place.split)
    except Exception as error:  # its errors are those of four libraries, without a common class
        raise EvalError(f"the hub does not give {place.path}: {error}") from error
    return (dict(row) for row in rows)

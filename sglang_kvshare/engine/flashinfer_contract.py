"""What of FlashInfer the adapter leans on, compared with the installed package at start-up."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_kvshare.engine.seams import SeamError

#: The version that SGLang 0.5.23 pins.
TESTED_VERSION = "0.7.2"

WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"

#: Of each method the parameters that are given, by place or by name, in the order of the package.
USED: Mapping[str, str] = {
    "__init__": "float_workspace_buffer kv_layout backend",
    "plan": "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
    "num_kv_heads head_dim_qk page_size packed_custom_mask causal sm_scale q_data_type "
    "kv_data_type non_blocking fixed_split_size",
    "run": "q paged_kv_cache k_scale v_scale return_lse",
}
#: Those that are given by place.
PLACED: Mapping[str, int] = {"__init__": 2, "plan": 8, "run": 2}
#: Where a plan keeps the begin of each entry's mask.
MASK_INDPTR = "_mask_indptr_buf"


def check_wrapper(wrapper: type) -> None:
    """
    Raises:
        SeamError: the first thing that is missing or in another place.
    """
    for method, names in USED.items():
        function = inspect.unwrap(getattr(wrapper, method, None) or _nothing)
        found = [name for name in inspect.signature(function).parameters if name != "self"]
        used = names.split()
        if found[: PLACED[method]] != used[: PLACED[method]]:
            raise SeamError(_mismatch(f"{method} takes ({', '.join(found)})"))
        if missing := [name for name in used if name not in found]:
            raise SeamError(_mismatch(f"{method} has no parameter {missing[0]}"))
    if MASK_INDPTR not in inspect.unwrap(wrapper.plan).__code__.co_names:
        raise SeamError(_mismatch(f"plan does not set {MASK_INDPTR}"))


def _nothing() -> None:
    """A method that is not there takes nothing."""


def installed_version() -> str:
    """Of FlashInfer; ``unknown`` where no package of that name says so."""
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "unknown"


def _mismatch(finding: Any) -> str:
    return (
        f"flashinfer.{WRAPPER}.{finding}; installed is FlashInfer {installed_version()}, tested "
        f"with {TESTED_VERSION} (needed for: narrowed attention)"
    )

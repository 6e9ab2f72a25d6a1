"""Selectors: which of the reused tokens are recomputed all the same.

Every module of this package registers its selectors on import; a new one is a new file.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from sglang_kvshare.recompute.selectors.choosing import SelectionSettings, choose, forced_tokens
from sglang_kvshare.recompute.selectors.registry import (
    Need,
    Selector,
    Signals,
    register_selector,
    selector_named,
    selector_names,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Need",
    "SelectionSettings",
    "Selector",
    "Signals",
    "choose",
    "forced_tokens",
    "register_selector",
    "selector_named",
    "selector_names",
]

"""KV events for exact nodes only.

Seam: ``KVCacheEventRecorder``. Its block hashes say "this prefix is cached here" to routers, which
is not true of a branch: a request that does not accept approximation gets nothing from it.
"""

from __future__ import annotations

from typing import Any

from sglang_kvshare.engine.branches import is_approximate


class ExactEvents:
    """Stands before SGLang's recorder and keeps approximate nodes to itself."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def record_store(self, node: Any, *args: Any, **kwargs: Any) -> None:
        if not is_approximate(node):
            self._recorder.record_store(node, *args, **kwargs)

    def record_remove(self, node: Any, *args: Any, **kwargs: Any) -> None:
        if not is_approximate(node):
            self._recorder.record_remove(node, *args, **kwargs)

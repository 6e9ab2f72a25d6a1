"""How the tests are shared out between processes (``pytest -n``): what shares a server or the
fixtures of a file stays together."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        server = None if callspec is None else callspec.params.get("server")
        item.add_marker(pytest.mark.xdist_group(server or item.path.stem))

"""How the tests are shared out between processes (``pytest -n``): those of one server, and those
of one file, stay together. xdist's ``loadgroup`` has no effect under pytest 9.2."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from hypothesis import settings
from server_configs import CONFIGS

#: On a machine that does other things as well an example may take any time.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByServerOrFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByServerOrFile(config, log)


def scope_of(nodeid: str) -> str:
    """The server that is named among a test's parameters, or else the test's file."""
    file, _, rest = nodeid.partition("::")
    if file.startswith("tests/engine/"):
        parameters = re.search(r"\[(.*)\]", rest)
        for part in parameters[1].split("-") if parameters else ():
            if part in CONFIGS:
                return f"server {part}"
    return file


def pytest_collection_finish() -> None:
    """Importing SGLang chooses its device for the whole process: a test does so under the fixture
    ``sglang_cpu`` or in a process of its own, and no test file while it is read."""
    if "sglang" in sys.modules:
        raise pytest.UsageError("a test file imports sglang while it is collected")

"""Which tests go to one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

_SPEC = importlib.util.spec_from_file_location(
    "sharing_out", Path(__file__).parents[1] / "conftest.py"
)
sharing_out = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sharing_out)


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/engine/test_a.py::test_x[llama-query-0.25]", "server llama"),
        ("tests/engine/test_b.py::TestY::test_x[0.5-glm4]", "server glm4"),
        ("tests/engine/test_b.py::test_x[fp8_e5m2]", "server fp8_e5m2"),
        ("tests/engine/test_b.py::test_x[page1-overlap]", "tests/engine/test_b.py"),
        ("tests/engine/test_b.py::test_x", "tests/engine/test_b.py"),
        ("tests/e2e/test_c.py::test_x[llama]", "tests/e2e/test_c.py"),
        ("tests/unit/test_d.py::test_x", "tests/unit/test_d.py"),
    ],
)
def test_a_server_stays_together_and_so_does_a_file(nodeid, scope):
    assert sharing_out.scope_of(nodeid) == scope

"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_kvshare.config import KVShareConfig, cli_flag, option_fields, resolve
from sglang_kvshare.request import ReuseReport

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def configuration():
    return (ROOT / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize("spec", option_fields(), ids=lambda spec: spec.name)
def test_each_setting_has_its_row(configuration, spec):
    row = (
        f"| `{spec.name}` | `{cli_flag(spec.name)}` | `KVSHARE_{spec.name.upper()}` "
        f"| `{spec.default}` |"
    )
    assert row in configuration


def test_each_field_of_the_report_has_its_row(configuration):
    for name in ReuseReport().to_dict():
        assert f"| `{name}` |" in configuration


def test_each_reason_in_the_code_is_explained(configuration):
    code = "".join(path.read_text() for path in (ROOT / "sglang_kvshare").rglob("*.py"))
    named = set(re.findall(r'(?:reason=|_Outcome\()"(\w+)"', code))
    named |= set(re.findall(r'(?:None|"\)), "(\w+)"$', code, re.MULTILINE))
    named |= set(re.findall(r'return "(\w+)"$', code, re.MULTILINE))
    assert {"ok", "no_match", "prompt_logprobs", "donor_evicted"} <= named
    for reason in named - {"torch_native", "native", "cpu"}:
        assert f"`{reason}`" in configuration, reason


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_each_preset_can_be_read_and_changes_something(configuration, path):
    assert resolve(yaml_path=path) != KVShareConfig()
    assert f"configs/{path.name}" in configuration


def test_each_test_that_stands_for_a_report_exists():
    text = (ROOT / "docs" / "user-reports.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    files = {path.name for path in (ROOT / "tests").rglob("*.py")}
    named = set(re.findall(r"`(test_\w+)`", text)) | {"the_tree_says_where_its_values_come_from"}
    assert len(named) > 30
    for name in named:
        assert f"def {name}(" in code, name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert name in files, name

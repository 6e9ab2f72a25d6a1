"""The documents say what the code does."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from sglang_kvshare.config import REUSE_MODES, KVShareConfig, cli_flag, option_fields, resolve
from sglang_kvshare.engine.metrics import SERIES, exported_names
from sglang_kvshare.request import REASONS, RequestOptions, ReuseReport

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def configuration():
    return (ROOT / "docs" / "configuration.md").read_text()


@pytest.fixture(scope="module")
def operating():
    return (ROOT / "docs" / "operating.md").read_text()


@pytest.mark.parametrize("spec", option_fields(), ids=lambda spec: spec.name)
def test_each_setting_has_its_row(configuration, spec):
    row = (
        f"| `{spec.name}` | `{cli_flag(spec.name)}` | `KVSHARE_{spec.name.upper()}` "
        f"| `{spec.default}` |"
    )
    assert row in configuration


def test_each_setting_of_a_request_is_explained(configuration):
    section = configuration.split("## What a request can say")[1].split("\n## ")[0]
    for name in RequestOptions.__dataclass_fields__:
        assert f"`{name}`" in section


def test_each_field_of_the_report_has_its_row(configuration):
    for name in ReuseReport().to_dict():
        assert f"| `{name}` |" in configuration


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
def test_each_reason_has_its_row(configuration, reason):
    assert f"| `{reason.name}` | {reason.doc} |" in configuration


def returned(function: ast.FunctionDef) -> list[ast.expr | None]:
    return [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]


def reasons_in_the_code() -> set[str]:
    """Every text in ``sglang_kvshare`` that becomes the reason of a report."""
    named: list[ast.expr | None] = []
    for path in (ROOT / "sglang_kvshare").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="_Outcome")):
                    named.append(node.args[0])
                case ast.Call():
                    named += [k.value for k in node.keywords if k.arg in ("reason", "lost_because")]
                case ast.FunctionDef(name="refusal"):
                    named += returned(node)
                case ast.AnnAssign(target=ast.Name(id="lost_because"), value=value):
                    named.append(value)
    texts = {getattr(each, "value", None) for each in named}
    return {text for text in texts if isinstance(text, str)}


def test_each_reason_in_the_code_is_explained():
    found = reasons_in_the_code()
    # One of each kind of place.
    assert {"no_match", "bad_request_options", "prompt_logprobs", "donor_invalid"} <= found
    assert "donor_evicted" in found
    listed = {reason.name for reason in REASONS}
    assert found <= listed
    # These two are handed on as the request's mode.
    assert set(REUSE_MODES) - {"approximate"} <= listed


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_each_metric_has_its_row(operating, series):
    labels = ", ".join(f"`{label}`" for label in series.labels)
    assert f"| `{series.name}` | {series.kind} | {labels} | {series.doc} |" in operating


def test_the_documents_name_no_metric_that_is_not_exported(operating):
    named = set(re.findall(r"kvshare:\w+", operating))
    assert named <= exported_names()


#: An example of a file that a setting names.
PRESETS = sorted(set((ROOT / "configs").glob("*.yaml")) - {ROOT / "configs" / "tenants.yaml"})


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_each_preset_can_be_read_and_changes_something(configuration, path):
    # The balanced one spells the defaults out.
    assert (resolve(yaml_path=path) == KVShareConfig()) == (path.stem == "balanced")
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


def test_the_wheel_holds_every_package() -> None:
    """The folders are listed by hand, for two are installed under other names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join((name, *path.parent.relative_to(ROOT / folder).parts))
        for folder, name in (
            ("sglang_kvshare", "sglang_kvshare"),
            ("eval", "kvshare_eval"),
            ("patches", "kvshare_patches"),
        )
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == found

"""`kvshare doctor` where SGLang is not needed; with SGLang it is tested with the engine."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_kvshare import cli, doctor
from sglang_kvshare.doctor import BAD, ENTRY_POINTS, GOOD, HINT, Finding
from sglang_kvshare.engine.support_table import rows

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith(("KVSHARE", "SGLANG"))]:
        monkeypatch.delenv(name)


def installed(monkeypatch, **versions):
    """Only these packages, and this package's entry points."""

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "version", version)


def by_name(findings):
    return {finding.what: finding for finding in findings}


def run(*args):
    result = CliRunner().invoke(cli.app, ["doctor", *args])
    return result.exit_code, result.stdout


def test_without_sglang_it_says_so_and_ends_with_1(monkeypatch):
    installed(monkeypatch)
    code, out = run("--model-path", "M", "--page-size", "16")
    assert code == 1
    assert "KVShare would not serve: SGLang is not installed" in out
    assert "pip install sglang==0.5.23" in " ".join(out.split())


def test_the_table_is_that_of_the_document(monkeypatch):
    installed(monkeypatch)
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    doctor.show(doctor.examine([]), console)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    for row in rows():
        assert f"{row.what} {row.status} {row.why} {row.decided_by}" in lines


def test_json_is_for_machines(monkeypatch):
    installed(monkeypatch)
    code, out = run("--json")
    assert code == 1
    told = json.loads(out)
    assert told["would_start"] is False
    assert {"what": "SGLang", "state": BAD}.items() <= told["findings"][2].items()
    assert len(told["support"]) == len(rows())
    assert set(told["support"][0]) == {"group", "what", "status", "why", "decided_by"}


def test_it_ends_with_0_when_nothing_speaks_against_it(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda flags: [Finding("all", HINT, " ".join(flags))])
    code, out = run("--model-path", "M", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["would_start"] is True
    # The flags are the server's, and pass through.
    assert told["findings"][0]["says"] == "--model-path M"
    assert "KVShare would serve." in run()[1]


def test_another_version_is_a_hint_and_not_a_refusal(monkeypatch):
    """As at the start, where the symbols decide."""
    installed(monkeypatch, sglang="0.5.24")
    found = doctor._sglang()
    assert (found.state, found.says) == (HINT, "0.5.24, tested is 0.5.23")
    installed(monkeypatch, sglang="0.5.23")
    assert doctor._sglang().state == GOOD


def test_bad_settings_are_named(monkeypatch):
    monkeypatch.setenv("KVSHARE_RECOMPUTE_RATIO", "2")
    installed(monkeypatch)
    found = by_name(doctor.examine([]))["settings"]
    assert found.state == BAD
    assert "recompute_ratio" in found.says


def test_missing_packages_are_named_with_their_extra(monkeypatch):
    wanted = [re.match(r"[\w.-]+", line)[0] for line in doctor.requires(doctor.DISTRIBUTION)]
    every = dict.fromkeys(wanted, "1")
    installed(monkeypatch, **every)
    assert [item.state for item in doctor._extras()] == [GOOD]
    for extra, name in (
        ("model", "safetensors"),
        ("eval", "matplotlib"),
        ("hub", "datasets"),
        ("embedder", "sentence-transformers"),
    ):
        installed(monkeypatch, **{each: v for each, v in every.items() if each != name})
        [found] = doctor._extras()
        assert (found.what, found.state) == (f"optional packages ({extra})", HINT)
        assert found.says == f"missing: {name}"


def test_faiss_is_wanted_for_similar_donors_only(monkeypatch):
    found = doctor._faiss()
    assert (found.state, found.what) == (GOOD, "FAISS")
    assert re.match(r"\d+\.\d+", found.says)
    monkeypatch.setitem(sys.modules, "faiss", None)
    found = doctor._faiss()
    assert (found.state, found.remedy) == (HINT, "pip install faiss-cpu")
    assert "similar_donors finds none" in found.says
    installed(monkeypatch)
    assert found in doctor.examine([])


def test_entry_points(monkeypatch):
    def registered(*pairs):
        entries = [EntryPoint(name=name, value="x:y", group=group) for group, name in pairs]
        monkeypatch.setattr(
            doctor, "entry_points", lambda group: [e for e in entries if e.group == group]
        )

    registered(*ENTRY_POINTS)
    assert [item.state for item in doctor._entry_points()] == [GOOD, GOOD]
    monkeypatch.setenv("SGLANG_PLUGINS", "other, kvshare")
    assert [item.state for item in doctor._entry_points()] == [GOOD, HINT]
    monkeypatch.setenv("SGLANG_PLUGINS", "kvshare_cpu")
    found = list(doctor._entry_points())
    assert [item.state for item in found] == [BAD, GOOD]
    assert "SGLANG_PLUGINS=kvshare_cpu" in found[0].says
    registered(ENTRY_POINTS[0])
    monkeypatch.delenv("SGLANG_PLUGINS")
    assert [item.state for item in doctor._entry_points()] == [GOOD, BAD]


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        (["--model-path", "M"], "M"),
        (["--page-size", "1", "--model-path=M/x=y"], "M/x=y"),
        (["--model", "M"], "M"),
        (["--model-path"], None),
        (["--page-size", "1"], None),
    ],
)
def test_the_model_is_found_among_the_flags(flags, model):
    assert doctor._model(flags) == model

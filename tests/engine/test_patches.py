"""The patches to SGLang: they fit the wheel, do what they say, and are gone when taken out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patched_site import copy_package, copy_targets, stock_site
from tiny_models import MODELS

from sglang_kvshare.patching import installation
from sglang_kvshare.patching.installation import IN, OUT
from sglang_kvshare.patching.patch_set import STOCK, checksums, load, sha256

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).parents[2] / "patches" / "sglang-0.5.23"
SET = load("0.5.23")


def content_of(site: Path) -> dict[str, bytes]:
    return {path: (site / path).read_bytes() for path in SET.checksums}


def test_the_checksums_are_those_of_the_wheel(tmp_path):
    """Also: every patch fits whichever others are applied."""
    stock = content_of(copy_targets(tmp_path).site)
    assert {path for patch in SET.patches for path in patch.hunks} == set(SET.checksums)
    assert checksums(SET.patches, stock) == SET.checksums
    # So that a cached bytecode, which knows time and size, is never taken for another state's.
    for path, states in SET.checksums.items():
        sizes = {len(SET.changed(path, stock[path], STOCK, state)) for state in states}
        assert len(sizes) == len(states), path


@pytest.mark.parametrize("name", [*SET.names, "all"])
def test_a_patch_compiles_and_leaves_no_trace(tmp_path, name):
    place = copy_targets(tmp_path)
    stock = content_of(tmp_path)
    names = SET.names if name == "all" else (name,)
    assert installation.apply(place, names) == list(names)
    found = {each.patch.name: each.state for each in installation.examine(place)}
    assert found == {each: IN if each in names else OUT for each in SET.names}
    changed = content_of(tmp_path)
    for path in changed:
        assert (changed[path] != stock[path]) == bool(SET.touching(path) & set(names))
        compile(changed[path], path, "exec")
    assert installation.revert(place) == list(names)
    assert content_of(tmp_path) == stock
    assert all(sha256(stock[path]) == SET.checksums[path][STOCK] for path in stock)


def test_the_installation_that_runs_the_tests_is_known():
    for each in installation.examine(installation.find(stock_site())):
        assert each.state in (IN, OUT)


# --- what they do: the tests that go upstream with them -------------------------------------------


def upstream_test(name: str) -> str:
    (diff,) = FOLDER.glob(f"*-{name}.patch")
    found = re.search(r"^Test: .*/(test_\w+\.py)$", diff.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def outcomes(tmp_path: Path, names: tuple[str, ...], tests: list[str]) -> dict[str, set[str]]:
    """What pytest says of each test file in a process in which these patches are applied."""
    site = copy_package(tmp_path / "site", names).site
    # Upstream's helpers for tests import it, and nothing here uses it.
    (site / "datasets.py").write_text("load_dataset = Dataset = None\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-c", os.devnull, "-p", "no:cacheprovider"]
        + ["--continue-on-collection-errors", f"--rootdir={FOLDER}"]
        + [str(FOLDER / "tests" / test) for test in tests],
        env={**os.environ, "PYTHONPATH": str(site), "SGLANG_PLATFORM": "kvshare_cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found: dict[str, set[str]] = {test: set() for test in tests}
    for outcome, test in re.findall(
        r"^(PASSED|FAILED|ERROR) \S*?tests/(\w+\.py)", done.stdout, re.M
    ):
        found[test].add(outcome)
    assert all(found.values()), done.stdout[-3000:] + done.stderr[-3000:]
    return found


def test_with_all_patches_the_upstream_tests_pass(tmp_path):
    tests = [upstream_test(name) for name in SET.names]
    assert sorted(tests) == sorted(path.name for path in (FOLDER / "tests").glob("test_*.py"))
    assert outcomes(tmp_path, SET.names, tests) == {test: {"PASSED"} for test in tests}


def test_without_them_each_upstream_test_fails(tmp_path):
    """Positive control."""
    found = outcomes(tmp_path, (), [upstream_test(name) for name in SET.names])
    assert all(seen & {"FAILED", "ERROR"} for seen in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("name", SET.names)
def test_each_patch_stands_alone(tmp_path, name):
    test = upstream_test(name)
    assert outcomes(tmp_path, (name,), [test]) == {test: {"PASSED"}}


def test_the_help_of_sglang_serve_shows_the_flags_of_kvshare(tmp_path):
    site = copy_package(tmp_path / "site", ["plugin-flags-in-help"]).site
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from sglang.cli.main import main; main()",
            *("serve", "--model-type", "llm", "--help"),
        ],
        env={**os.environ, "PYTHONPATH": str(site), "SGLANG_PLATFORM": "kvshare_cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "--kvshare-config FILE.yaml" in done.stdout, done.stderr[-3000:]


# --- --schedule-policy hit-rate -------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_flag(tmp_path_factory):
    """What ``policy_by_flag.py`` found where that patch is applied, and that alone."""
    folder = tmp_path_factory.mktemp("policy")
    site = copy_package(folder / "site", ["schedule-policy-values"]).site
    model = MODELS["llama"].write(folder / "llama")
    script = Path(__file__).with_name("policy_by_flag.py")
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVSHARE")}
    done = subprocess.run(
        [sys.executable, str(script), str(model)],
        env={**env, "PYTHONPATH": str(site), "SGLANG_PLATFORM": "kvshare_cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "policy", "schedule", "hooked"),
    [
        ("by flag", "effective-cost", "effective-cost", False),
        ("by default", "hit-rate", "hit-rate", False),
        ("priorities", "hit-rate", "hit-rate", False),
        ("stock's own", "lpm", "hit-rate", False),
        ("ours of that name", "fcfs", "fcfs", True),
        ("switched off", "fcfs", None, True),
        ("not asked for", "fcfs", None, True),
    ],
)
def test_the_flag_and_the_setting_are_one(by_flag, name, policy, schedule, hooked):
    assert by_flag["starts"][name] == [policy, schedule, hooked]


def test_the_value_needs_kvshare(by_flag):
    assert "--schedule-policy hit-rate needs --kvshare" in by_flag["starts"]["alone"]
    # argparse's own status: SGLang's choices are still closed.
    assert by_flag["starts"]["no such value"] == "2"


def test_the_registered_policy_orders_and_falls_back_to_first_come(by_flag):
    assert by_flag["orders"] == {
        "ours": "cba",
        "ours, priorities": "cba",
        # Arrivals are a, b, c.
        "stock's tree": "abc",
        # b and c have the larger one.
        "stock's tree, priorities": "bca",
    }

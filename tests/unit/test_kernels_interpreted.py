"""The kernels under Triton's interpreter, in a process of its own.

Whether Triton interprets is decided while it is imported, and holds for the process. The tests are
in ``interpreted``; they run once, and each of their files is told of here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.unit
FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.stem for path in FOLDER.glob("*_interpreted.py"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("triton")
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    result = subprocess.run(
        [
            sys.executable,
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
            f"--junitxml={report}",
            *(str(FOLDER / f"{name}.py") for name in FILES),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert report.exists(), result.stdout + result.stderr
    return ElementTree.parse(report), result.stdout


@pytest.mark.parametrize("name", FILES)
def test_of_the_file(run, name):
    report, output = run
    cases = [case for case in report.iter("testcase") if name in case.get("classname", "")]
    assert cases, output
    failed = [case.get("name") for case in cases if len(case)]
    assert not failed, output


def test_files_are_found():
    assert len(FILES) == 4

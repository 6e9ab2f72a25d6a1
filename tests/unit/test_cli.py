"""The `kvshare` command itself; what `model` does is tested with the model package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sglang_kvshare
from sglang_kvshare import cli
from sglang_kvshare.model.errors import ModelError
from sglang_kvshare.model.progress import Reporter
from sglang_kvshare.model.registry import ModelSource

pytestmark = pytest.mark.unit

NAME = "smollm2-135m-instruct"


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_version() -> None:
    assert run("--version") == (0, f"sglang-kvshare {sglang_kvshare.__version__}\n", "")


@pytest.mark.parametrize("args", [["model"], ["model", "--list"]])
def test_known_models_are_listed(args: list[str]) -> None:
    code, out, _ = run(*args)
    assert code == 0
    assert NAME in out
    assert "Apache-2.0" in out


def test_model_ends_with_the_command_to_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path]] = []

    def made(source: ModelSource, target: Path, reporter: Reporter) -> int:
        asked.append((source.name, target))
        return 272_586_762

    monkeypatch.setattr(cli, "ensure_model", made)
    code, out, _ = run("model", NAME, "my models/smol")
    assert code == 0
    assert asked == [(NAME, Path("my models/smol"))]
    assert "my models/smol holds" in out
    assert "273 MB" in out
    last = "python -m sglang.launch_server --model-path 'my models/smol' --kvshare"
    assert out.splitlines()[-1] == last


def test_errors_are_one_sentence_and_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("model", "smollm2-135m", "x")
    assert (code, out) == (1, "")
    assert err.startswith("kvshare: There is no model 'smollm2-135m'. Did you mean")

    code, _, err = run("model", NAME)
    assert (code, err) == (1, f"kvshare: Give the folder to make: kvshare model {NAME} DIR\n")

    def failing(source: ModelSource, target: Path, reporter: Reporter) -> int:
        raise ModelError("The disk is full.")

    monkeypatch.setattr(cli, "ensure_model", failing)
    assert run("model", NAME, "x") == (1, "", "kvshare: The disk is full.\n")


def test_the_command_starts_without_the_heavy_libraries() -> None:
    heavy = ["gguf", "numpy", "safetensors", "sglang", "tokenizers", "torch", "transformers"]
    code = f"import sys, sglang_kvshare.cli; print([m for m in {heavy} if m in sys.modules])"
    root = str(Path(sglang_kvshare.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr

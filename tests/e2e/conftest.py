"""One real server on the default model for the end-to-end tests; it ends before others start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvshare_eval.servers import Server


@pytest.fixture(scope="session")
def model_folder():
    """``make test`` names the model; without it these tests say what they need."""
    folder = os.environ.get("SGLANG_KVSHARE_TEST_MODEL")
    if not folder:
        pytest.skip("SGLANG_KVSHARE_TEST_MODEL names no model folder; `make test` does")
    return Path(folder)


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    with Server(model_folder, log=tmp_path_factory.mktemp("server") / "server.log") as running:
        yield running

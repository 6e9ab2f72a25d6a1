"""``sglang.Engine`` without a server, switched on by the environment alone."""

from __future__ import annotations

import pytest
from programs import example

pytestmark = [pytest.mark.e2e]


def test_the_offline_example_reuses_notes_in_another_order(model_folder, monkeypatch):
    # A busy machine must change no decision.
    monkeypatch.setenv("KVSHARE_GATE", "off")
    first, second, off = example("engine_offline.py", "--model", str(model_folder))
    assert first["reason"] == "no_match"
    assert second["reused"] > 80
    assert (off["reason"], off["prefix"], off["reused"]) == ("off", 0, 0)

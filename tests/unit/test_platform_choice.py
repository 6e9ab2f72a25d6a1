"""The plain-CPU platform serves when asked and steps aside otherwise."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest

from sglang_kvshare.engine import platform_choice
from sglang_kvshare.engine.platform_choice import PLATFORM_CLASS, choose_cpu_platform

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch):
    """No accelerator, no other plug-in, nothing asked for."""
    for name in ("KVSHARE", "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    monkeypatch.setattr(platform_choice, "_accelerator", lambda: False)
    monkeypatch.setattr(platform_choice, "entry_points", lambda group: ())


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "M", "--kvshare"])


def plug_in(monkeypatch, name, result):
    entry = EntryPoint(name=name, value="x:y", group=platform_choice.PLATFORM_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: result)
    monkeypatch.setattr(platform_choice, "entry_points", lambda group: (entry,))


def test_installed_but_not_asked_for():
    assert choose_cpu_platform() is None


def test_the_flag_asks(asked):
    assert choose_cpu_platform() == PLATFORM_CLASS


@pytest.mark.parametrize(("value", "served"), [("1", True), ("true", True), ("0", False)])
def test_the_environment_asks(monkeypatch, value, served):
    monkeypatch.setenv("KVSHARE", value)
    assert (choose_cpu_platform() == PLATFORM_CLASS) is served


def test_sglang_can_select_it_by_name(monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", "kvshare_cpu")
    monkeypatch.setattr(platform_choice, "_accelerator", lambda: True)
    assert choose_cpu_platform() == PLATFORM_CLASS


def test_it_steps_aside_for_an_accelerator(asked, monkeypatch):
    monkeypatch.setattr(platform_choice, "_accelerator", lambda: True)
    assert choose_cpu_platform() is None


def test_it_steps_aside_for_the_stock_cpu_engine(asked, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert choose_cpu_platform() is None


def test_it_steps_aside_for_another_plug_in_that_takes_the_machine(asked, monkeypatch):
    plug_in(monkeypatch, "npu", lambda: "some.Platform")
    assert choose_cpu_platform() is None


def test_a_plug_in_without_its_hardware_is_no_obstacle(asked, monkeypatch):
    plug_in(monkeypatch, "npu", lambda: None)
    assert choose_cpu_platform() == PLATFORM_CLASS


def test_a_broken_plug_in_is_no_obstacle(asked, monkeypatch):
    def broken():
        raise ImportError("no driver")

    plug_in(monkeypatch, "npu", broken)
    assert choose_cpu_platform() == PLATFORM_CLASS


def test_its_own_entry_is_not_another_one(asked, monkeypatch):
    plug_in(monkeypatch, "kvshare_cpu", lambda: PLATFORM_CLASS)
    assert choose_cpu_platform() == PLATFORM_CLASS

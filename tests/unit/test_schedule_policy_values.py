"""``--schedule-policy`` and ``--kvshare-schedule`` as two names of one setting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvshare.config import ConfigError, KVShareConfig
from sglang_kvshare.engine import schedule_policy_values as values

pytestmark = pytest.mark.unit


@pytest.fixture(params=[True, False], ids=["patched", "stock"])
def patched(request, monkeypatch):
    monkeypatch.setattr(values, "offered", lambda: request.param)
    return request.param


def test_the_values_are_those_of_the_setting():
    for name in values.VALUES:
        assert KVShareConfig(schedule=name).schedule == name


def test_the_flag_is_the_setting():
    given: dict[str, object] = {}
    values.take("hit-rate", given, asked=True)
    assert given == {"schedule": "hit-rate"}
    values.take("hit-rate", given, asked=True)
    for stock in ("fcfs", "lpm"):
        untouched: dict[str, object] = {"schedule": "effective-cost"}
        values.take(stock, untouched, asked=False)
        assert untouched == {"schedule": "effective-cost"}


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="--kvshare-schedule fcfs"):
        values.take("hit-rate", {"schedule": "fcfs"}, asked=True)
    with pytest.raises(ConfigError, match="needs --kvshare"):
        values.take("effective-cost", {}, asked=False)


@pytest.mark.parametrize("schedule", ["hit-rate", "effective-cost", "fcfs", "stock"])
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "hit-rate"])
def test_both_agree_before_arguments_are_resolved(patched, schedule, policy):
    if policy == "hit-rate" and not patched:
        pytest.skip("stock SGLang has no such value")
    record = SimpleNamespace(schedule_policy=policy)
    config = values.agree(record, KVShareConfig(schedule=schedule))
    if policy == "hit-rate":
        # sglang.Engine(schedule_policy="hit-rate")
        assert (record.schedule_policy, config.schedule) == ("hit-rate", "hit-rate")
        return
    assert config.schedule == schedule
    moved = patched and policy == "fcfs" and schedule in values.VALUES
    assert record.schedule_policy == (schedule if moved else policy)
    # What moved is ordered without a hook. So is lpm, where none would do anything.
    assert values.stands_in(config) == (patched and schedule in values.VALUES)
    values.give_up(record)
    assert record.schedule_policy == policy


def test_without_kvshare_no_hook_is_spared(patched):
    assert not values.stands_in(None)

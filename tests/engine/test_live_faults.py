"""A fault at each step of a real forward costs reuse, and no request, slot or lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvshare_eval.live.process import in_a_process

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Break:
    """One way to break a step.

    Attributes:
        step: what the fault is counted as.
        target: what raises; empty for values that are not finite.
        reason: what the request is told when it reuses nothing; empty where it reuses all the same.
        kvshare: settings of the request, beside a ratio of 0.
    """

    step: str
    target: str
    reason: str = ""
    kvshare: Mapping[str, Any] = field(default_factory=dict)


ENGINE = "sglang_kvshare.engine."
#: As on a GPU, where it is known when the narrowed forward has been launched.
LATE = "late"
BY_QUERY = {"selector": "query", "recompute_ratio": 0.2}
BY_DEVIATION = {"selector": "deviation", "recompute_ratio": 0.2}
REFRESHED = {"refresh_tokens": 2}
BREAKS = {
    "match": Break("match", ENGINE + "tree_cache.plan_reuse", "planning_failed"),
    "select": Break("select", ENGINE + "admission.choose", "planning_failed"),
    "lock": Break("lock", ENGINE + "donor_locks._above", "planning_failed"),
    "copy": Break(
        "copy", "sglang_kvshare.attention.kernels.copy_rotate.rotate_", "placement_failed"
    ),
    "a copy that has begun": Break("copy", ENGINE + "forward._check", "placement_failed"),
    "narrow": Break("narrow", ENGINE + "row_attention.attend", "narrowing_failed"),
    "probe": Break("select", ENGINE + "forward.run_probes", "selection_failed", BY_QUERY),
    "check layer": Break(
        "narrow", ENGINE + "row_program._Measured.over_limit", "narrowing_failed", BY_DEVIATION
    ),
    "refresh": Break("refresh", ENGINE + "refresh._longer", kvshare=REFRESHED),
    "rank anew": Break("refresh", ENGINE + "refresh.WatchingAttention.tell", kvshare=REFRESHED),
    "publish": Break("publish", ENGINE + "branches.exact_ancestor"),
    "index": Break("index", ENGINE + "index_mirror.path_tokens"),
    "not finite": Break("copy", "", "donor_invalid"),
    "not finite, told late": Break("copy", LATE, "donor_invalid"),
}


@pytest.mark.parametrize("config", ["page1-overlap", "page16-normal"])
def test_a_fault_at_each_step_costs_reuse_and_nothing_else(config, tmp_path):
    seen = in_a_process(break_everything, config, tmp_path)
    for name, how in BREAKS.items():
        told = seen[name]
        assert set(told["faults"]) == {how.step}, (name, told)
        if how.reason:
            assert told["reason"] == how.reason, (name, told)
            assert told["reused_tokens"] == 0, (name, told)
        else:
            # What cannot be published, indexed or refreshed was reused all the same.
            assert told["reused_tokens"] > 30, (name, told)
        # Positive control: after the fault the same is reused, but for an index given up.
        assert (told["afterwards"] > 30) == (name != "index"), (name, told)
        if how.kvshare == REFRESHED:
            assert told["refreshed_afterwards"] > 0, (name, told)


def break_everything(name: str, folder: Path) -> dict[str, Any]:
    import live_machine
    from live_cases import DONOR, machine_on, options

    # Here they are wanted.
    live_machine.FAULTS = frozenset()
    bench = live_machine.build(live_machine.CONFIGS[name], folder)
    machine = machine_on(bench)
    live, told = bench.live, []
    judge = machine.judge

    def listening(sent: Any, got: Any) -> None:
        told.append((sent, got))
        judge(sent, got)

    machine.judge = listening
    seen = {}
    try:
        for where, how in BREAKS.items():
            live.reset()
            faults: list[str] = []
            live.cache.fault = faults.append
            machine.arrive_with_passages(DONOR, glue=3, question=1, settings=options())
            machine.run_until_idle()
            told.clear()
            with broken(how.target, live):
                if where != "index":
                    ask(machine, live_machine, told, how)
                else:
                    # The index fails at an insertion, and the plan was made before it.
                    machine.check = lambda: None
                    ask(machine, live_machine, told, how)
                    del machine.check
            (sent, got) = told[0]
            assert got.reason == "length"
            if not got.report["reused_tokens"]:
                # Every row was computed: the text is that of a full computation.
                sent.kvshare = {"reuse": "exact_prefix"}
                machine.check_text(sent, got)
            told.clear()
            ask(machine, live_machine, told, how, check=where != "index")
            seen[where] = {
                **got.report,
                "faults": list(faults),
                "afterwards": told[0][1].report["reused_tokens"],
                "refreshed_afterwards": told[0][1].report["refreshed_tokens"],
            }
        return seen
    finally:
        live.close()


def ask(machine: Any, live_machine: Any, told: list[Any], how: Break, check: bool = True) -> None:
    """The passages in another order, between new tokens, from arrival to the end."""
    from live_cases import options

    if not check:
        machine.check = lambda: None
    # Long enough for attention to be looked at once.
    settings = options(**{"recompute_ratio": 0, **how.kvshare}) | {"n_new": 12}
    machine.arrive_with_passages(order_of(how), glue=5, question=2, settings=settings)
    machine.run_until_idle()
    assert len(told) == 1
    live_machine.check_slots(machine.live)
    live_machine.check_locks(machine.live)
    live_machine.check_idle(machine.live)


def order_of(how: Break) -> list[int]:
    """The passages of the donor in another order; one alone where the prompt must not be cut."""
    from live_cases import DONOR

    return DONOR[:1:-1] if how.kvshare in (BY_QUERY, BY_DEVIATION) else DONOR[::-1]


class broken:
    """Breaks what ``target`` names; without, a value of every third cached token."""

    def __init__(self, target: str, live: Any) -> None:
        self._target, self._live = target, live
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        if self._target == LATE:
            self._patch.setattr("sglang_kvshare.attention.layerwise_copy.Copying.at_once", False)
        elif self._target:
            self._patch.setattr(self._target, _raise)
        if self._target in ("", LATE):
            pool = self._live.scheduler.tp_worker.model_runner.token_to_kv_pool
            slots = self._live.cache.all_values_flatten()
            pool.get_value_buffer(1)[slots[::3]] = float("nan")

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()


def _raise(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("injected")

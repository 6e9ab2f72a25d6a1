"""A fault at each step of a real forward costs reuse, and no request, slot or lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvshare_eval.live.process import in_a_process

pytestmark = pytest.mark.engine

#: step -> what is broken there.
BROKEN = {
    "match": "sglang_kvshare.engine.tree_cache.plan_reuse",
    "select": "sglang_kvshare.engine.admission.choose",
    "lock": "sglang_kvshare.engine.donor_locks._above",
    "copy": "sglang_kvshare.engine.placement.rotate_",
    "narrow": "sglang_kvshare.engine.narrowing.attend",
    "publish": "sglang_kvshare.engine.branches.exact_ancestor",
    "index": "sglang_kvshare.engine.index_mirror.path_tokens",
}
REASONS = {
    "match": "planning_failed",
    "select": "planning_failed",
    "lock": "planning_failed",
    "copy": "placement_failed",
    "narrow": "narrowing_failed",
    "not finite": "donor_invalid",
}


@pytest.mark.parametrize("config", ["page1-overlap", "page16-normal"])
def test_a_fault_at_each_step_costs_reuse_and_nothing_else(config, tmp_path):
    seen = in_a_process(break_everything, config, tmp_path)
    for where, reason in REASONS.items():
        assert seen[where]["reason"] == reason, (where, seen[where])
        assert seen[where]["reused_tokens"] == 0, (where, seen[where])
    # What cannot be published or indexed was reused all the same.
    assert seen["publish"]["reused_tokens"] > 30
    assert seen["index"]["reused_tokens"] > 30
    for where in (*BROKEN, "not finite"):
        step = "copy" if where == "not finite" else where
        assert set(seen[where]["faults"]) == {step}, (where, seen[where])
        # Positive control: after the fault the same is reused, but for an index given up.
        assert (seen[where]["afterwards"] > 30) == (where != "index"), (where, seen[where])


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
        for where in (*BROKEN, "not finite"):
            live.reset()
            faults: list[str] = []
            live.cache.fault = faults.append
            machine.arrive_with_passages(DONOR, glue=3, question=1, settings=options())
            machine.run_until_idle()
            told.clear()
            with broken(where, live):
                if where != "index":
                    ask(machine, live_machine, told)
                else:
                    # The index fails at an insertion, and the plan was made before it.
                    machine.check = lambda: None
                    ask(machine, live_machine, told)
                    del machine.check
            (sent, got) = told[0]
            assert got.reason == "length"
            if not got.report["reused_tokens"]:
                # Every row was computed: the text is that of a full computation.
                sent.kvshare = {"reuse": "exact_prefix"}
                machine.check_text(sent, got)
            told.clear()
            ask(machine, live_machine, told, check=where != "index")
            seen[where] = {
                **got.report,
                "faults": list(faults),
                "afterwards": told[0][1].report["reused_tokens"],
            }
        return seen
    finally:
        live.close()


def ask(machine: Any, live_machine: Any, told: list[Any], check: bool = True) -> None:
    """The passages in another order, between new tokens, from arrival to the end."""
    from live_cases import DONOR, options

    if not check:
        machine.check = lambda: None
    machine.arrive_with_passages(
        DONOR[::-1], glue=5, question=2, settings=options(recompute_ratio=0)
    )
    machine.run_until_idle()
    assert len(told) == 1
    live_machine.check_slots(machine.live)
    live_machine.check_locks(machine.live)
    live_machine.check_idle(machine.live)


class broken:
    """Breaks one step; for "not finite" one value of every cached token's first key."""

    def __init__(self, where: str, live: Any) -> None:
        self._where, self._live = where, live
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        if self._where == "not finite":
            pool = self._live.scheduler.tp_worker.model_runner.token_to_kv_pool
            slots = self._live.cache.all_values_flatten()
            pool.get_value_buffer(1)[slots[::3]] = float("nan")
        else:
            self._patch.setattr(BROKEN[self._where], _raise)

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()


def _raise(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("injected")

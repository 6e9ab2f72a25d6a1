"""Tenants in the simulator: nothing of one serves another, nor moves or foretells its requests."""

from __future__ import annotations

import numpy as np
import pytest
from test_simulator import made, run

from kvshare_eval.errors import EvalError
from kvshare_eval.simulator.costs import load_costs
from kvshare_eval.simulator.felt import Felt
from kvshare_eval.simulator.machine import Machine
from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.reservation import Lengths
from kvshare_eval.simulator.settings import Flags, side_named
from kvshare_eval.simulator.sides import parts_of
from kvshare_eval.simulator.workloads import make_workload

pytestmark = pytest.mark.unit

POOL = 50
COUNT = 300


def rag(tenants: int, **more: object) -> Requests:
    options = ",".join(f"{name}={value}" for name, value in {"tenants": tenants, **more}.items())
    return make_workload(f"rag:pool={POOL},{options}", COUNT, 3, None)


def test_one_tenant_is_what_it_was_without_the_option() -> None:
    one, default = rag(1), make_workload(f"rag:pool={POOL}", COUNT, 3, None)
    assert one.blocks == default.blocks
    assert one.namespaces == default.namespaces == ()
    assert (one.arrived_ps == default.arrived_ps).all()
    # Numbers of passages first, then those of questions, one after the other.
    passages = {content for blocks in one.blocks for content in blocks[:-1]}
    assert passages <= set(range(1, POOL + 1))
    assert [blocks[-1] for blocks in one.blocks] == list(range(POOL + 1, POOL + 1 + COUNT))


@pytest.mark.parametrize("cold", [0.0, 0.4])
def test_tenants_have_the_same_passages_under_numbers_of_their_own(cold: float) -> None:
    one, four = rag(1, cold=cold), rag(4, cold=cold)
    for name in ("arrived_ps", "prompt", "output", "max_new"):
        assert (getattr(one, name) == getattr(four, name)).all()
    of: dict[str, set[int]] = {}
    for i, (alone, own) in enumerate(zip(one.blocks, four.blocks, strict=True)):
        tenant = int(four.namespace(i).removeprefix("tenant-"))
        # Everything beyond the first pool's passages is asked only once, and moves up.
        moved = [tenant * POOL if content <= POOL else 3 * POOL for content in alone]
        assert own == tuple(content + by for content, by in zip(alone, moved, strict=True))
        of.setdefault(four.namespace(i), set()).update(own)
    assert len(of) == 4
    assert sum(map(len, of.values())) == len(set.union(*of.values()))
    # Drawn alike, by no rule that a schedule could follow.
    shares = np.unique(np.array(four.namespaces), return_counts=True)[1] / COUNT
    assert shares.min() > 0.15


def test_fewer_than_one_tenant_is_refused() -> None:
    with pytest.raises(EvalError, match="the least is 1"):
        rag(0)


def felt_of(requests: Requests, side: str) -> Felt:
    costs = load_costs("h100-llama-3.1-8b")
    requests = requests.at_rate(5).with_slo(2000, 100)
    return Machine(requests, costs, Flags.of(costs), side_named(side)).run()


@pytest.mark.parametrize("side", ["stock", "kvshare:reuse=true,order=effective-cost"])
def test_only_what_its_own_tenant_has_asked_before_is_found(side: str) -> None:
    four = rag(4)
    felt = felt_of(four, side)
    asked: dict[str, set[int]] = {}
    found = 0
    for i in np.argsort(felt.admitted_ps, kind="stable").tolist():
        before = asked.setdefault(four.namespace(i), set())
        least = sum(content in before for content in four.blocks[i]) * four.block_tokens
        assert felt.prefix[i] + felt.reused[i] <= least
        found += felt.prefix[i] + felt.reused[i]
        before.update(four.blocks[i])
    assert found > 0
    # All of one tenant find more: that is what keeping KV apart costs.
    together = felt_of(rag(1), side)
    assert sum(together.prefix) + sum(together.reused) > found


def four_requests() -> Requests:
    """One of b is computed while one of a and two of b come, the last of which has its passage."""
    return made(
        [0, 1, 2, 3],
        [200] * 4,
        [1] * 4,
        blocks=[(1, 2), (3, 4), (5, 6), (1, 7)],
        block_tokens=100,
        chained=False,
        namespaces=("b", "a", "b", "b"),
    )


@pytest.mark.parametrize("order", ["hit-rate", "effective-cost"])
def test_a_hit_goes_ahead_of_its_own_tenants_requests_only(order: str) -> None:
    requests = four_requests()
    served = {
        apart: np.argsort(
            run(requests, f"stock:order={order},apart={apart}", max_running=1).first_ps,
            kind="stable",
        ).tolist()
        for apart in ("true", "false")
    }
    # The hit (3) takes the first place that b has; were they one tenant's, it would be the first.
    assert served["true"] == [0, 1, 3, 2]
    assert served["false"] == [0, 3, 1, 2]


def test_answers_of_a_tenant_say_nothing_about_those_of_another() -> None:
    count = 80
    requests = made(
        [0] * count,
        [100] * count,
        [10] * count,
        [500] * count,
        namespaces=("a", *["b"] * (count - 2), "a"),
    )
    costs = load_costs("this-cpu")
    side = side_named("stock+reserve")

    def told_less(requests: Requests, first: int, last: int) -> bool:
        """Whether short answers of b make the estimate for ``last`` less than that for ``first``
        was before; an estimate is kept, so that two requests have to be asked about."""
        lengths = Lengths(
            requests, requests.max_new.tolist(), parts_of(side, Flags.of(costs), costs, requests)
        )
        unheard = lengths.of(first).predicted_tokens
        for one in range(1, count - 2):
            lengths.ended(one, 10)
        return lengths.of(last).predicted_tokens < unheard

    assert not told_less(requests, 0, count - 1)
    assert told_less(requests, 1, count - 2)
    assert told_less(requests.of_one(), 0, count - 1)

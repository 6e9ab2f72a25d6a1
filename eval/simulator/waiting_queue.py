"""The waiting requests: who they are, what their prefill is predicted to take, who goes first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from kvshare_eval.simulator.contents import Contents
from kvshare_eval.simulator.costs import PS_PER_MS, Costs
from kvshare_eval.simulator.kv_cache import KvCache, Node
from kvshare_eval.simulator.requests import Requests
from kvshare_eval.simulator.settings import Side
from kvshare_eval.simulator.swaps import Swaps
from sglang_kvshare.scheduling.jobs import Waiting
from sglang_kvshare.scheduling.order import Order

#: Waiting requests that are shown to an order, beside as many as may be overtaken.
_WINDOW = 128
#: SGLang's lpm sorts by prefix while no more than so many wait.
_LPM_UP_TO = 128
#: SGLang touches the prefixes of so many waiting requests every so many passes.
_TOUCHED, _TOUCH_EVERY = 128, 32


class WaitingQueue:
    """In SGLang's order: as they came; what KVShare preempts goes to the front."""

    def __init__(
        self,
        requests: Requests,
        contents: Contents,
        cache: KvCache,
        swaps: Swaps,
        order: Order,
        side: Side,
        costs: Costs,
    ) -> None:
        self._requests = requests
        self._arrived_ps: list[int] = requests.arrived_ps.tolist()
        self._contents = contents
        self._cache = cache
        self._swaps = swaps
        self._order = order
        self._side = side
        self._costs = costs
        # Beyond the window of bypasses an order is first come first served anyway; SGLang's lpm
        # only asks whether more than 128 wait.
        self._window = _WINDOW + (side.most_bypasses if side.own_order else 1)
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()
        #: What a prediction rests on: the match's last node, the content after it, the donors.
        self._seen: dict[int, tuple[Node | None, int | None, int]] = {}
        self._touches = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __getitem__(self, i: int) -> Waiting:
        return self._waiting[i]

    def add(self, i: int, fill_tokens: int, preemptions: int = 0) -> None:
        """It came, or was preempted.

        Args:
            fill_tokens: its prompt, and what it has answered so far.
        """
        self._waiting[i] = Waiting(
            rid=str(i),
            number=i,
            arrived_ms=self._arrived_ps[i] / PS_PER_MS,
            prompt_tokens=fill_tokens,
            ttft_slo_ms=self._requests.ttft_slo_ms,
            preemptions=preemptions,
            namespace=self._requests.namespace(i).encode(),
        )
        if preemptions and self._side.own_order:
            # It keeps its place: those that came later stand behind it.
            self._waiting.move_to_end(i, last=False)

    def remove(self, i: int) -> None:
        """It is admitted."""
        del self._waiting[i]
        self._seen.pop(i, None)

    def ordered(self, now_ps: int) -> list[int]:
        """Those that a pass looks at, the first first."""
        if not self._waiting:
            return []
        count = min(len(self._waiting), self._window)
        window = list(islice(self._waiting.items(), count))
        if self._side.order == "lpm" and count <= _LPM_UP_TO:
            for i, one in window:
                path = self._contents.matched(i)
                self._cache.touch(path)
                one.prefix_tokens = sum(node.tokens for node in path)
        elif self._side.own_order:
            for i, one in window:
                self._predict(i, one)
        jobs = [one for _, one in window]
        return [window[place][0] for place in self._order.order(jobs, now_ps / PS_PER_MS)]

    def touch_prefixes(self) -> None:
        """Once a pass: now and then SGLang asks what is cached of those that wait longest."""
        if self._side.order == "lpm":
            return
        if self._touches % _TOUCH_EVERY == 0 and self._contents.shared:
            for i in reversed(list(islice(self._waiting, _TOUCHED))):
                self._cache.touch(self._contents.matched(i))
        self._touches += 1

    def _predict(self, i: int, one: Waiting) -> None:
        """What its prefill will take. Kept as long as the tree stays as it is for this prompt."""
        cache = self._cache
        seen = self._seen.get(i)
        if seen is not None and cache.unchanged(*seen):
            return
        contents = self._contents.of(i)
        path = cache.matched(contents)
        after = contents[len(path)] if len(path) < len(contents) else None
        self._seen[i] = path[-1] if path else None, after, cache.donor_changes
        prefix = min(sum(node.tokens for node in path), one.prompt_tokens - 1)
        swapped = self._swaps.of(i)
        reused = 0 if swapped is not None else self._contents.elsewhere_tokens(i, prefix)
        one.prefix_tokens = prefix
        spared = round(reused * (1 - self._side.recompute_ratio))
        one.reused_tokens = spared
        rows = max(1, one.prompt_tokens - prefix - spared)
        if swapped is not None:
            behind = one.prompt_tokens - swapped.tokens - min(prefix, swapped.begin)
            rows = max(1, min(rows, behind))
        one.effective_ms = self._costs.prefill_ms(rows, rows * one.prompt_tokens)

"""Swapping: a preempted request's keys and values wait in host memory instead of being recomputed.

    preempted                   copied                          admitted again
    row |prefix|===own===|  ->  host |===own===|            ->  row |prefix|===own===|x
        held until copied            if there is room               found, copied back, computed

What is copied is what preempting gives back: everything behind the part of the prefix that other
requests hold as well. The rest of the prefix could stay in the tree, but memory is short, and its
leaves are what is evicted next; a copy that begins behind a hole is worth nothing. What is found in
the tree at the return is not copied back.

The last token is always computed anew: its logits are wanted. So with the overlap scheduler the
step that may still be running when a request is preempted loses nothing.

Two ways lead here. Stock SGLang retracts when memory has run out: the copy is waited for, and the
slots are free at once. :func:`preempt` retracts before that: the request leaves its row and its
lock on the tree behind, the copy runs beside the next steps, and :meth:`Swapping.step` gives both
back when it is done. An allocation that would fail meanwhile waits for these copies first.

Whatever goes wrong costs a recomputation, as in stock SGLang, and is counted with its reason.

Tensor-parallel ranks copy their own heads each. What they decide hangs on no rank's clock: copies
are waited for at fixed steps, ranks ask each other whether all succeeded, and the cost of either
way, which each rank would measure for itself, is not asked.

Seams: ``schedule_batch.release_req``, ``ScheduleBatch.release_req``, ``Req.detach_kv``,
``ReqToTokenPool.free``, ``BasePrefixCache.free_kv_row``, ``Scheduler.get_next_batch_to_run``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult

from sglang_kvshare.engine.branches import depth_of, exact_ancestor, path_tokens
from sglang_kvshare.engine.eligibility import is_special
from sglang_kvshare.engine.host_copies import Copier, Enqueued, Job
from sglang_kvshare.engine.host_memory import Extent
from sglang_kvshare.engine.ranks import Ranks
from sglang_kvshare.engine.state import RequestState, state_of
from sglang_kvshare.engine.tenant_nodes import tenant_of
from sglang_kvshare.scheduling.host_pool import HostPool
from sglang_kvshare.scheduling.preemption_cost import PreemptionCost, Way

logger = logging.getLogger(__name__)

#: Steps after which a copy of one of several ranks is waited for.
RANKS_WAIT_STEPS = 2
#: A copy that takes longer is given up: the device, or a disk that host memory was moved to, hangs.
MOST_SECONDS = 10.0
#: Tokens of the copies that measure the bandwidth at the start.
_MEASURED_TOKENS = (64, 512)


@dataclass(eq=False)
class _Left:
    """What a request left behind that its copy still reads: its row, its lock on the tree, and the
    tokens that are free or evictable once both are given back."""

    kv: Any
    lock: Any
    tokens: int


@dataclass(eq=False)
class HostCopy:
    """One preempted request's positions ``[start, end)``.

    Attributes:
        number: its key in the pool.
        handle: SGLang's name of the request.
        lasting: of its state (:meth:`RequestState.lasting`).
        tenants: whose text it is, as far as tenants are told apart.
        due_s: of the retention's clock; part of it is past its time then.
        job: what must be done before its memory is given back.
        held: copied out, and there to be copied back.
        gone: nobody gets it any more.
        left: see :class:`_Left`.
        begun_s: by this process's clock.
        steps: of the scheduler, since it was begun.
        loaded_at: where the tree's part of the prefix ended when it was copied back.
        missed: why it was not, when that was tried.
    """

    number: int
    handle: Any
    state: RequestState
    start: int
    end: int
    extents: list[Extent]
    lasting: Mapping[str, Any]
    tenants: frozenset[str]
    due_s: float
    job: Job | Enqueued
    held: bool = False
    gone: bool = False
    left: _Left | None = None
    begun_s: float = field(default_factory=time.monotonic)
    steps: int = 0
    loaded_at: int | None = None
    missed: str = ""

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass
class Swapping:
    """Owner of all host copies of one scheduler process; all methods are for its thread.

    Args:
        cache: the tree.
        copier: ``None`` for no swapping.
        pool: accounts for the copier's memory.
        cost: learns from every copy.
        way: ``auto``, or one for all (``preempt`` of the configuration).
        agree: whether all ranks say yes; called by all of them in the same order.
        ranks: that hold parts of the same keys and values.
    """

    cache: Any
    copier: Copier | None = None
    pool: HostPool = field(default_factory=lambda: HostPool(0))
    cost: PreemptionCost = field(default_factory=lambda: PreemptionCost(1))
    way: str = "auto"
    agree: Callable[[bool], bool] = Ranks().all_say
    ranks: int = 1

    def __post_init__(self) -> None:
        self._count = 0
        #: Those that a request may still get, in the order of their coming.
        self._copies: dict[Any, HostCopy] = {}
        #: Those that nobody gets, whose memory is still being read or written.
        self._ending: list[HostCopy] = []
        #: A request is being preempted whose slots need not be free at once.
        self._beside = False

    # --- what there is ---------------------------------------------------------------------------

    @property
    def used_tokens(self) -> int:
        return self.pool.used_tokens

    @property
    def copying(self) -> list[HostCopy]:
        """Copies out that are not done, oldest first."""
        return [copy for copy in self._copies.values() if not copy.held]

    @property
    def pending_tokens(self) -> int:
        """Tokens that are free or evictable as soon as their copies are done."""
        return sum(copy.left.tokens for copy in self.copying if copy.left is not None)

    def predicted_ms(self, req: Any) -> float:
        """What preempting a running request and resuming it is predicted to take; infinite where
        nothing was measured yet."""
        return self.way_of(req).ms

    def ready(self, req: Any) -> bool:
        """Whether the request may be admitted. While it is being copied it waits, for that takes
        less time than computing it again."""
        copy = _copy_of(req)
        return copy is None or copy.held

    def left_rows(self) -> dict[str, Any]:
        """The ``ReqKvInfo`` of each row that was left behind, for SGLang's own accounting."""
        return {
            f"kvshare-{copy.number}": copy.left.kv
            for copy in self._copies.values()
            if copy.left is not None
        }

    def way_of(self, req: Any) -> Way:
        """How to preempt ``req``, if either way is open to it."""
        start, end = self._span(req)
        gate = self.cache.gate_of([req]) if self.way == "auto" and self.ranks == 1 else None
        if gate is None or not gate.cost.known:
            # Nothing to compare with.
            way = "recompute" if self.way in ("recompute", "stock") else "swap"
            return Way(way, math.inf, math.inf)
        queued = sum(copy.tokens for copy in self.copying) * self.cost.bytes_per_token
        return self.cost.choose(
            end, gate.cost, prefix_tokens=start, reusable_tokens=start, queued_bytes=queued
        )

    def measure(self) -> None:
        """Copy a little both ways, so that the first decision rests on this machine. Call it while
        no request is in the pool."""
        if self.copier is None:
            return
        slots = torch.arange(
            1, self.cache.token_to_kv_pool_allocator.size, device=self.copier.device
        )
        for tokens in _MEASURED_TOKENS:
            tokens = min(tokens, len(slots), self.copier.memory.free_tokens)
            if tokens <= 0:
                return
            extents = self.copier.memory.take(tokens)
            try:
                for _ in range(2):
                    # The first touches new memory.
                    out = self.copier.out(slots[:tokens], extents)
                    if not out.wait(MOST_SECONDS) or not out.succeeded:
                        raise RuntimeError("the first copy failed") from out.error
                    back = self.copier.back(extents, 0, slots[:tokens])
                    back.wait(MOST_SECONDS)
            finally:
                self.copier.memory.give(extents)
            size = tokens * self.cost.bytes_per_token
            self.cost.observe_out(size, out.ms)
            self.cost.observe_in(size, back.ms)

    # --- out -------------------------------------------------------------------------------------

    def swap_out(self, req: Any) -> None:
        """Copy a request that is about to be preempted, or leave it to be recomputed."""
        state = state_of(req)
        if self.copier is None or self.pool.capacity_tokens == 0 or state is None:
            return
        try:
            copy = self._begin(req, state)
            if copy is not None and not self._beside:
                self.settle(copy)
        except Exception:
            logger.exception("KVShare could not swap request %s out; it is recomputed", req.rid)
            self.cache.fault("swap")
            self.cache.metrics.swap_fallback("copy_failed")
            self.finished(state)

    def keeps(self, req: Any) -> bool:
        """Whether a copy of a request waits for it, or is being made."""
        return _copy_of(req) is not None

    def _begin(self, req: Any, state: RequestState) -> HostCopy | None:
        if state.host_copy is not None:
            # Nobody came for it.
            self.drop(state.host_copy)
        if not self._swappable(req, state):
            return None
        start, end = self._span(req)
        if end <= start or self.way_of(req).way != "swap":
            return None
        self._count += 1
        number = self._count
        if not self.pool.reserve(str(number), end - start):
            self.cache.metrics.swap_fallback("pool_full")
            return None
        # Never fails: any free tokens will do, and the pool counts the same ones.
        extents = self.copier.memory.take(end - start)
        row = self.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end]
        tenants, due_s = self._whose(req, state, start)
        copy = HostCopy(
            number=number,
            handle=req.cache_request_handle,
            state=state,
            start=start,
            end=end,
            extents=extents,
            lasting=state.lasting(),
            tenants=tenants,
            due_s=due_s,
            job=self._out(row.to(torch.int64, copy=True), extents),
        )
        state.host_copy = self._copies[copy.handle] = copy
        return copy

    def _span(self, req: Any) -> tuple[int, int]:
        """The positions that would be copied, in whole pages."""
        page = self.cache.page_size
        return held_by_others(req.last_node), (req.seqlen - 1) // page * page

    def _out(self, slots: torch.Tensor, extents: list[Extent]) -> Job:
        """A copy that cannot even begin fails as any other: with several ranks all of them must
        come to ask each other."""
        try:
            return self.copier.out(slots, extents)
        except Exception as error:
            job = Job()
            job.error = error
            return job

    def _swappable(self, req: Any, state: RequestState) -> bool:
        """Whether the request's values are its own, whole, and of today's weights."""
        return (
            state.reported
            and req.kv.holds_kv
            and req.kv.kv_committed_len >= req.seqlen - 1
            and not req.finished()
            and req.to_finish is None
            and not is_special(req)
            and state.generation == self.cache.generation
            and self.cache.retention.may_publish(req, state)
        )

    def _whose(self, req: Any, state: RequestState, start: int) -> tuple[frozenset[str], float]:
        """The tenants of a copy's text, and when the first part of it is past its time."""
        nodes, node = self.cache.retention.nodes, req.last_node
        tenants, due_s = {state.tenant}, math.inf
        while node.parent is not None and path_tokens(node) > start:
            tenants.add(tenant_of(node))
            due_s = min(due_s, nodes.due_s(node))
            node = node.parent
        return frozenset(name for name in tenants if name is not None), due_s

    def claim(self, req: Any) -> bool:
        """A preempted request gives its row back: whether it is kept until the copy is done."""
        copy = _copy_of(req)
        if not self._beside or copy is None or copy.held:
            return False
        tokens = private_tokens(req)
        copy.left = _Left(req.detach_kv(), req.lock, tokens)
        req.lock = None
        self.cache.on_release(req, checkpointed=False)
        return True

    def settle(self, copy: HostCopy) -> None:
        """Wait until a copy out is done; it is there from then on, or gone."""
        copy.job.wait(max(0.0, copy.begun_s + MOST_SECONDS - time.monotonic()))
        if not self.agree(copy.job.succeeded):
            if copy.job.error is not None:
                logger.error("KVShare could not copy to host memory", exc_info=copy.job.error)
            self.cache.fault("swap")
            self.drop(copy, "copy_failed")
            return
        copy.held = True
        self._give_row(copy)
        self.cost.observe_out(copy.tokens * self.cost.bytes_per_token, copy.job.ms)
        self.cache.metrics.swapped("out", copy.tokens)

    def step(self) -> bool:
        """A step of the scheduler begins: what is done is done.

        Returns:
            whether any slots were given back.
        """
        waited_for = self.pending_tokens
        for copy in self.copying:
            copy.steps += 1
            if copy.steps >= RANKS_WAIT_STEPS if self.ranks > 1 else self._over(copy):
                self.settle(copy)
        self._end()
        return self.pending_tokens < waited_for

    def _over(self, copy: HostCopy) -> bool:
        """It is done, or has taken so long that it is given up."""
        return copy.job.done() or time.monotonic() - copy.begun_s > MOST_SECONDS

    def make_room(self, tokens: int) -> int:
        """Wait for copies whose slots are needed now; returns the tokens that this freed."""
        if self._beside:
            return 0
        free = self.cache.token_to_kv_pool_allocator.available_size
        before = free()
        for copy in self.copying:
            if free() - before >= tokens:
                break
            if copy.left is not None:
                self.settle(copy)
        return int(free() - before)

    def _give_row(self, copy: HostCopy) -> None:
        """As ``release_kv_cache`` of SGLang does for a request."""
        left, copy.left = copy.left, None
        if left is None:
            return
        self.cache.free_kv_row(left.kv, [(left.kv.cache_protected_len, left.kv.kv_allocated_len)])
        self.cache.unlock(left.lock)
        self.cache.req_to_token_pool.free(SimpleNamespace(kv=left.kv))
        left.kv.mark_kv_released()

    # --- back ------------------------------------------------------------------------------------

    def promised(self, found: MatchResult, tokens: int, state: RequestState) -> MatchResult:
        """``found`` with what can be copied back behind it, of a prompt whose prefix may have
        ``tokens``; changes nothing."""
        copy, prefix = state.host_copy, found.device_prefix_len
        if copy is None or not copy.held:
            return found
        end = min(copy.end, tokens) // self.cache.page_size * self.cache.page_size
        if not copy.start <= prefix < end:
            return found
        return found._replace(host_hit_length=end - prefix)

    def beats_branch(self, exact: MatchResult, state: RequestState) -> bool:
        """Whether a copy goes on exactly where a branch would be an approximation."""
        copy, prefix = state.host_copy, exact.device_prefix_len
        if copy is None or not copy.held or not copy.start <= prefix < copy.end:
            return False
        exact_until = copy.lasting["exact_until"]
        return exact_until is None or prefix < exact_until

    def load(self, req: Any, tokens: int) -> int:
        """Copy back what was promised behind ``req.prefix_len``, all of it or nothing.

        Returns:
            ``tokens``, or 0: they are computed.
        """
        copy = _copy_of(req)
        if copy is None or not copy.held or copy.loaded_at is not None:
            return 0
        allocator = self.cache.token_to_kv_pool_allocator
        allocator.evict_to_free_tokens(self.cache, tokens)
        slots = allocator.alloc(tokens)
        if slots is None:
            copy.missed = "no_slots"
            return 0
        try:
            job = self.copier.back(copy.extents, req.prefix_len - copy.start, slots)
        except Exception:
            logger.exception("KVShare could not copy request %s back; it is recomputed", req.rid)
            self.cache.fault("swap")
            job = None
        if not self.agree(job is not None):
            allocator.free(slots)
            self.drop(copy, "load_failed")
            return 0
        copy.job, copy.loaded_at = job, req.prefix_len
        copy.state.restored_slots = slots
        if not isinstance(job, Enqueued):
            self._observe_in(copy)
        return tokens

    def resume(self, req: Any, state: RequestState) -> bool:
        """A request was admitted: whether its own values are in its row again.

        If not, and there is a copy, it is not needed any more.
        """
        copy = state.host_copy
        if copy is None:
            return False
        if copy.loaded_at is None:
            self.drop(copy, self._why_not(copy, int(req.prefix_len)))
            return False
        _, branch_tokens = exact_ancestor(req.last_node)
        state.go_on(copy.lasting, copy.loaded_at - branch_tokens, depth_of(req.last_node))
        self.cache.metrics.swapped("in", int(req.prefix_len) - copy.loaded_at)
        self.drop(copy)
        return True

    def _why_not(self, copy: HostCopy, prefix_tokens: int) -> str:
        if prefix_tokens < copy.start:
            return "prefix_gone"
        # With nothing missed, the tree had it all.
        return copy.missed

    def restored(self, req: Any, path: torch.Tensor) -> torch.Tensor:
        """``path`` and, behind the prefix on it, the slots that were copied back; once."""
        state = state_of(req)
        if state is None or state.restored_slots is None:
            return path
        slots, state.restored_slots = state.restored_slots, None
        return torch.cat([path[: req.prefix_len - len(slots)], slots])

    # --- the end of a copy -----------------------------------------------------------------------

    def drop(self, copy: HostCopy, reason: str = "") -> None:
        """Nobody gets it any more: device memory is free at once, host memory when nothing reads
        or writes it.

        Args:
            reason: what a recomputation in its place is counted under; empty for none.
        """
        if copy.gone:
            return
        copy.gone = True
        self._copies.pop(copy.handle, None)
        copy.state.host_copy = None
        if reason:
            self.cache.metrics.swap_fallback(reason)
        copy.job.cancel()
        self._give_row(copy)
        if isinstance(copy.job, Job):
            copy.job = self._overwritten(copy)
        self._ending.append(copy)
        self._end()

    def _end(self) -> None:
        waiting, self._ending = self._ending, []
        for copy in waiting:
            if self.ranks > 1:
                copy.job.wait(MOST_SECONDS)
            if copy.job.done() and isinstance(copy.job, Enqueued):
                self._observe_in(copy)
                last = self._overwritten(copy)
                copy.job = Job() if last is copy.job else last
            if copy.job.done():
                self.copier.memory.give(copy.extents)
                self.pool.release(str(copy.number))
            else:
                self._ending.append(copy)

    def _overwritten(self, copy: HostCopy) -> Job | Enqueued:
        """The last job of a copy. What a tenant's text was in does not wait for another one's to
        be overwritten."""
        return self.copier.zero(copy.extents) if copy.tenants else copy.job

    def _observe_in(self, copy: HostCopy) -> None:
        assert copy.loaded_at is not None
        size = (copy.end - copy.loaded_at) * self.cost.bytes_per_token
        self.cost.observe_in(size, copy.job.ms)

    def ended(self, handle: Any) -> None:
        """A request that was waiting has been aborted."""
        copy = self._copies.get(handle)
        if copy is not None:
            self.drop(copy)

    def finished(self, state: RequestState) -> None:
        if state.host_copy is not None:
            self.drop(state.host_copy)

    def drop_all(self) -> None:
        """No copy serves any more: other weights."""
        for copy in list(self._copies.values()):
            self.drop(copy, "dropped")

    def forget(self, tenant: str) -> int:
        """Drop and overwrite what holds text of ``tenant``; returns its tokens."""
        theirs = [copy for copy in self._copies.values() if tenant in copy.tenants]
        for copy in theirs:
            self.drop(copy, "dropped")
        self._wait()
        return sum(copy.tokens for copy in theirs)

    def expire(self, now_s: float) -> None:
        for copy in list(self._copies.values()):
            if now_s >= copy.due_s:
                self.drop(copy, "dropped")

    def clear(self) -> None:
        """The pool was emptied: rows and locks that were left behind are gone with it."""
        for copy in list(self._copies.values()):
            copy.left = None
            self.drop(copy, "dropped")
        self._wait()

    def _wait(self) -> None:
        for copy in self._ending:
            copy.job.wait(MOST_SECONDS)
        self._end()

    # --- preempting before memory is short -------------------------------------------------------

    def preempt_beside(self, batch: Any, index: int) -> None:
        """Take request ``index`` of ``batch`` off its row, which is kept until it is copied."""
        self._beside = True
        try:
            # Nothing is evicted for the others: memory is not short yet.
            batch.release_req(index, 0)
        finally:
            self._beside = False


def _copy_of(req: Any) -> HostCopy | None:
    state = state_of(req)
    return None if state is None else state.host_copy


def private_tokens(req: Any) -> int:
    """Tokens that are free or evictable once a running request gives its KV back: its own slots,
    and what of its prefix nobody else holds."""
    return int(req.kv.kv_allocated_len) - held_by_others(req.last_node)


def held_by_others(node: Any) -> int:
    """Tokens of the path to ``node``, which one request is about to let go, that stay locked."""
    while node.parent is not None and node.lock_ref < 2:
        node = node.parent
    return path_tokens(node)


def swapping_of(tree_cache: Any) -> Swapping | None:
    """``None`` where stock SGLang's tree cache serves."""
    return getattr(tree_cache, "swapping", None)


def asked_by_sglang() -> bool:
    """Whether SGLang asks the tree cache itself: the patch ``backup-on-retract`` is applied."""
    return hasattr(BasePrefixCache, "backup_on_retract")


def release_req(original: Any, *, req: Any, tree_cache: Any, **kwargs: Any) -> Any:
    """Hook of ``schedule_batch.release_req``: every preemption of SGLang's.

    ``offload_kv=False``: the caller wants the values computed again (new weights), or the request
    is aborted.
    """
    swapping = swapping_of(tree_cache)
    if swapping is not None and kwargs.get("offload_kv", True):
        swapping.swap_out(req)
    return original(req=req, tree_cache=tree_cache, **kwargs)


def preempt(scheduler: Any, batch: Any, index: int) -> bool:
    """Preempt request ``index`` of the running ``batch`` before memory is short, and queue it.

    Call it behind admission (``get_new_batch_prefill``) and before ``prepare_for_decode``, where
    SGLang itself retracts: a request that were admitted in the same step would get the output of
    the step that is still running.

    Returns:
        whether its values are being copied; otherwise they will be recomputed, and its slots are
        free already.
    """
    req = batch.reqs[index]
    swapping = swapping_of(batch.tree_cache)
    if swapping is None:
        batch.release_req(index, 0)
    else:
        swapping.preempt_beside(batch, index)
    batch.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i != index])
    batch.batch_is_full = False
    scheduler._add_request_to_queue(req, is_retracted=True)
    return _copy_of(req) is not None


def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of ``Scheduler.get_next_batch_to_run``."""
    swapping = swapping_of(self.tree_cache)
    if swapping is not None:
        try:
            if swapping.step():
                # Nobody leaves the batch for that, which is when SGLang looks again.
                self.running_batch.batch_is_full = False
        except Exception:
            logger.exception("KVShare could not look after its host copies")
            self.tree_cache.fault("swap")
    return original(self, *args, **kwargs)


def build_swapping(cache: Any, runner: Any, config: Any, ranks: int, group: Any) -> Swapping:
    """Swapping for one scheduler process, its bandwidth measured.

    Args:
        config: ``host_pool_mb`` and ``preempt`` are read.
        ranks, group: tensor-parallel ones, and their process group on CPUs.
    """
    if config.preempt not in ("auto", "swap") or config.host_pool_mb == 0:
        return Swapping(cache)
    on_cpu = str(runner.device) == "cpu"
    copier = Copier(
        runner.token_to_kv_pool,
        config.host_pool_mb << 20,
        None if on_cpu else runner.forward_stream,
    )
    swapping = Swapping(
        cache,
        copier,
        HostPool(copier.capacity_tokens),
        PreemptionCost(copier.bytes_per_token),
        config.preempt,
        Ranks(cpu_group=None if ranks == 1 else group).all_say,
        ranks,
    )
    begin = time.perf_counter()
    try:
        swapping.measure()
        measured = True
    except Exception:
        logger.exception("KVShare cannot copy to host memory: preempted requests are recomputed")
        measured = False
    if not swapping.agree(measured):
        return Swapping(cache)
    logger.info(
        "KVShare swaps to %d MB of host memory, %s tokens; measured in %.0f ms",
        config.host_pool_mb,
        f"{copier.capacity_tokens:,}",
        (time.perf_counter() - begin) * 1e3,
    )
    return swapping

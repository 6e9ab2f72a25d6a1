"""SGLang's own scheduler in this process, one turn of its event loop at a time.

    caller    submit ... step() ----------------------> look at anything ... step() ---->
    thread    (waits)    | one turn of the real loop |  (waits)              | one turn |

The loop is not copied: it runs in a thread of its own, and waits where it is about to receive
requests, which is where SGLang lets its scripted tests in. Only the sockets are replaced, by
lists; requests still pass through the wire format. Between two turns the thread stands still, so
that its state may be read and changed without a lock.

SGLang reads its platform and its test switches when it is imported, and builds one scheduler a
process: import nothing of it before, and give every scheduler a process of its own
(:mod:`kvshare_eval.live.process` makes that cheap).

Seams: ``Scheduler.init_ipc_channels``, ``init_idle_sleeper`` and
``maybe_init_scripted_scheduler_hook`` (overridden), ``run_event_loop`` (called),
``runtime_context.publish`` (as in ``run_scheduler_process``).
"""

from __future__ import annotations

import gc
import os
import pickle
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_kvshare.config import (
    ENV_PREFIX,
    ENV_SWITCH,
    ENV_TENANT_SECRET,
    KVShareConfig,
    option_fields,
)

#: A turn that takes longer hangs.
TURN_SECONDS = 120.0
#: Variables of the surrounding session that would change what runs here.
_FOREIGN = ("KVSHARE", "SGLANG")


def prepare(kvshare: KVShareConfig) -> None:
    """Ask for KVShare in this process's environment, as one does for ``sglang.Engine``.

    Must run before SGLang is imported, which reads the platform and the checks then; the settings
    are read when a scheduler is made.
    """
    foreign = {name for name in os.environ if name.startswith(_FOREIGN)}
    # Read for the tenants of `kvshare` alone.
    for name in foreign - {ENV_TENANT_SECRET}:
        del os.environ[name]
    os.environ |= {
        "SGLANG_PLATFORM": "kvshare_cpu",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        "HF_HUB_OFFLINE": "1",
        ENV_SWITCH: "1",
    }
    for option in option_fields():
        value = getattr(kvshare, option.name)
        if value != option.default:
            os.environ[ENV_PREFIX + option.name.upper()] = str(value)


@dataclass(frozen=True)
class Finished:
    """What a client would have got.

    Attributes:
        ids: output tokens.
        logprobs: log-probability of each, where they were asked for.
        reason: ``length``, ``stop`` or ``abort``.
        report: ``cached_tokens_details.kvshare``; ``None`` for a request that was aborted before
            it ran.
    """

    rid: str
    ids: tuple[int, ...]
    reason: str
    message: str = ""
    logprobs: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    report: Mapping[str, Any] | None = None


class _Inbox:
    """Both ends of a zmq socket, with either encoding that SGLang uses (msgpack or pickle)."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()

    def send(self, data: bytes, flags: int = 0) -> None:
        self._messages.append(data)

    def recv(self, flags: int = 0) -> bytes:
        if not self._messages:
            import zmq

            raise zmq.Again
        return self._messages.popleft()

    def send_pyobj(self, message: Any, flags: int = 0, protocol: int = -1) -> None:
        self.send(pickle.dumps(message, protocol))

    def recv_pyobj(self, flags: int = 0) -> Any:
        return pickle.loads(self.recv(flags))

    def clear(self) -> None:
        self._messages.clear()


@dataclass
class _Outbox:
    """A ``SenderWrapper`` that keeps what it is to send."""

    messages: list[Any] = field(default_factory=list)

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        self.messages.append(output)


class _Stop(BaseException):
    """Ends the thread; SGLang catches ``Exception``."""


class _Gate:
    """Where the loop waits for the caller; called by SGLang as its scripted-test hook."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._stopping = False
        self.fault: BaseException | None = None
        #: Called with every batch before it runs.
        self.on_batch: Callable[[Any], None] = lambda batch: None

    # The two methods that SGLang calls.

    def step(self) -> None:
        self._arrived.release()
        self._go.acquire()
        if self._stopping:
            raise _Stop

    def on_run_batch(self, batch: Any) -> None:
        self.on_batch(batch)

    # What the caller does.

    def await_arrival(self) -> None:
        if not self._arrived.acquire(timeout=TURN_SECONDS):
            raise TimeoutError(f"one turn of the scheduler took more than {TURN_SECONDS:.0f} s")
        if self.fault is not None:
            raise self.fault

    def open(self, *, stop: bool = False) -> None:
        self._stopping = stop
        self._go.release()

    def run(self, loop: Callable[[], None]) -> None:
        """The thread's body."""
        try:
            loop()
        except _Stop:
            pass
        except BaseException as error:
            self.fault = error
        self._arrived.release()


class LiveScheduler:
    """A scheduler over the model in ``model``; keyword arguments are those of ``ServerArgs``.

    Only one can be made in a process.
    """

    def __init__(self, model: Path | str, kvshare: KVShareConfig, **server_args: Any) -> None:
        prepare(kvshare)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        args = ServerArgs(
            model_path=str(model),
            skip_tokenizer_init=True,
            # Between two turns there may be a debugger, or hypothesis.
            watchdog_timeout=1e9,
            **{"log_level": "error", "random_seed": 1, **server_args},
        )
        args.resolve_once()
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self._gate = _Gate()
        self._inbox = _Inbox()
        self._outbox = _Outbox()
        self._parts: dict[str, list[Any]] = {}
        self.scheduler = _scheduler_class()(
            args, PortArgs.init_new(args), self._gate, self._inbox, self._outbox
        )
        assert self.cache.config == kvshare, self.cache.config
        self.args = args
        self.model = str(model)
        self.turns = 0
        self.finished: dict[str, Finished] = {}
        self.replies: list[Any] = []
        self._thread: threading.Thread | None = None
        self._start()
        # SGLang collects garbage at every flush; what a start leaves need not be visited again.
        gc.collect()
        gc.freeze()

    # --- what there is to look at ---------------------------------------------------------

    @property
    def cache(self) -> Any:
        return self.scheduler.tree_cache

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    @property
    def rows(self) -> Any:
        return self.scheduler.req_to_token_pool

    @property
    def idle(self) -> bool:
        return bool(self.scheduler.is_fully_idle())

    @property
    def paused(self) -> bool:
        return bool(self.scheduler._engine_paused)

    def requests(self) -> Iterator[Any]:
        """Every ``Req`` that the scheduler knows, once."""
        scheduler, seen = self.scheduler, set()
        places = [scheduler.waiting_queue, scheduler.running_batch.reqs]
        places += [batch.reqs for batch, _ in scheduler.result_queue]
        if scheduler.last_batch is not None:
            places.append(scheduler.last_batch.reqs)
        if scheduler.chunked_req is not None:
            places.append([scheduler.chunked_req])
        for req in (req for place in places for req in place):
            if id(req) not in seen:
                seen.add(id(req))
                yield req

    # --- what a client and an operator do ---------------------------------------------------

    def submit(
        self,
        rid: str,
        ids: Sequence[int],
        max_new_tokens: int,
        *,
        kvshare: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        extra_key: str | None = None,
        tenant: str | None = None,
        logprobs: bool = False,
        logprob_start_len: int = -1,
        stop: Sequence[int] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """One greedy completion, received in the next turn.

        Args:
            tenant: whose it is, as the HTTP process says; the salt does not follow from it here.
            stop: tokens that end the answer.
            sampling: further parameters of SGLang's ``SamplingParams``.

        Raises:
            RequestError: a setting in ``kvshare`` is not allowed.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        custom: dict[str, Any] = {"kvshare": dict(kvshare)} if kvshare else {}
        if tenant is not None:
            custom["kvshare_tenant"] = tenant
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            ignore_eos=not stop,
            stop_token_ids=list(stop) or None,
            custom_params=custom or None,
            **(sampling or {}),
        )
        params.normalize(None)
        params.verify(self.scheduler.model_config.vocab_size)
        self.send(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text="",
                input_ids=array("q", ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=logprobs,
                logprob_start_len=logprob_start_len,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                cache_salt=cache_salt,
                extra_key=extra_key,
            )
        )

    def send(self, message: Any) -> None:
        """Anything that SGLang's front end may send, received in the next turn."""
        from sglang.srt.managers.io_struct import sock_send

        sock_send(self._inbox, message)

    def step(self, turns: int = 1) -> None:
        """Run the loop's body ``turns`` times; whatever it raises is raised here."""
        for _ in range(turns):
            self._gate.open()
            self._gate.await_arrival()
            self.turns += 1
            self._collect()

    def ask(self, message: Any) -> Any:
        """Send a control message and return the reply of the turn that receives it."""
        self.replies.clear()
        self.send(message)
        self.step()
        return self.replies.pop() if self.replies else None

    def abort(self, rid: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.send(AbortReq(rid=rid))

    def flush(self) -> bool:
        """Empty the cache, as ``/flush_cache`` does: refused while a request is in flight."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        return bool(self.ask(FlushCacheReqInput()).success)

    def update_weights(self, model: Path | str) -> bool:
        """Load the weights of another folder, as ``/update_weights_from_disk`` does."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        reply = self.ask(UpdateWeightFromDiskReqInput(model_path=str(model), load_format="auto"))
        self.model = str(model)
        return bool(reply.success)

    def pause(self, mode: str) -> None:
        """``in_place`` or ``retract``."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.ask(PauseGenerationReqInput(mode=mode))

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self.ask(ContinueGenerationReqInput())

    def retract_next(self) -> None:
        """Have the next decode step send requests back to the queue (``SGLANG_TEST_RETRACT``)."""
        from sglang.srt.managers import scheduler as module

        module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = True, 1

    def retract_no_more(self) -> None:
        from sglang.srt.managers import scheduler as module

        module.TEST_RETRACT = False

    def evict(self, tokens: int) -> int:
        """Evict from the tree as an allocation that needs ``tokens`` would; returns how many."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def drain(self, limit: int = 5000) -> None:
        """Turn until nothing is in flight.

        Raises:
            AssertionError: it takes more than ``limit`` turns.
        """
        for _ in range(limit):
            self.step()
            if self.idle:
                return
        queued = [req.rid for req in self.scheduler.waiting_queue]
        raise AssertionError(f"not idle after {limit} turns; queued: {queued}")

    def reset(self) -> None:
        """A scheduler as after its start, whatever state it is in; weights stay as they are."""
        self.close()
        scheduler = self.scheduler
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        self.retract_no_more()
        scheduler.waiting_queue.clear()
        scheduler.result_queue.clear()
        scheduler._deferred_input_requests.clear()
        scheduler.grammar_manager.clear()
        scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        scheduler.last_batch = scheduler.cur_batch_for_debug = None
        scheduler.chunked_req = scheduler._pending_chunked_abort_req = None
        scheduler._engine_paused, scheduler._pause_started_at = False, None
        scheduler.forward_ct = 0
        scheduler.new_token_ratio_tracker.reset()
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()
        self._inbox.clear()
        self._outbox.messages.clear()
        self._parts.clear()
        self.finished.clear()
        self.replies.clear()
        self._start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            if self._thread.is_alive():
                self._gate.open(stop=True)
            self._thread.join(TURN_SECONDS)
            assert not self._thread.is_alive(), "the scheduler's thread does not end"
            self._thread = None

    def _start(self) -> None:
        on_batch = self._gate.on_batch
        # A new one: the semaphores of one that ended by a fault are out of step.
        self._gate.__init__()  # type: ignore[misc]
        self._gate.on_batch = on_batch
        self._thread = threading.Thread(
            target=self._gate.run, args=(self.scheduler.run_event_loop,), daemon=True
        )
        self._thread.start()
        self._gate.await_arrival()

    def on_batch(self, listener: Callable[[Any], None]) -> None:
        """Have ``listener`` called with every batch before it runs."""
        self._gate.on_batch = listener

    # --- what comes back --------------------------------------------------------------------

    def _collect(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

        messages, self._outbox.messages = self._outbox.messages, []
        for message in messages:
            if isinstance(message, BatchTokenIDOutput):
                for at, rid in enumerate(message.rids):
                    self._take(message, at, rid)
            elif isinstance(message, AbortReq):
                # Ended in the queue, before anything ran or between two runs of it.
                reason = message.finished_reason or {}
                self._finish(Finished(message.rid, (), "abort", str(reason.get("message", ""))))
            else:
                self.replies.append(message)

    def _take(self, message: Any, at: int, rid: str) -> None:
        """Join the parts of one request's output."""
        parts = self._parts.setdefault(rid, [[], []])
        parts[0] += message.output_ids[at]
        if message.output_token_logprobs_val:
            parts[1] += message.output_token_logprobs_val[at]
        reason = message.finished_reasons[at]
        if reason is None:
            return
        details = (message.cached_tokens_details or {at: None})[at] or {}
        self._finish(
            Finished(
                rid=rid,
                ids=tuple(parts[0]),
                logprobs=tuple(parts[1]),
                reason=reason["type"],
                message=str(reason.get("message") or ""),
                prompt_tokens=message.prompt_tokens[at],
                cached_tokens=message.cached_tokens[at],
                retractions=(message.retraction_counts or {at: 0})[at],
                report=details.get("kvshare"),
            )
        )

    def _finish(self, finished: Finished) -> None:
        self._parts.pop(finished.rid, None)
        assert finished.rid not in self.finished, f"{finished.rid} ended twice"
        self.finished[finished.rid] = finished


def _scheduler_class() -> type:
    """SGLang's scheduler with lists for sockets; made late, for hooks change its base."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels

    class ListeningScheduler(Scheduler):
        def __init__(self, args: Any, ports: Any, gate: _Gate, inbox: _Inbox, out: _Outbox):
            self._live = (gate, inbox, out)
            super().__init__(args, ports)

        def init_ipc_channels(self, port_args: Any) -> None:
            _, inbox, outbox = self._live
            self.ipc_channels = SchedulerIpcChannels(
                recv_from_tokenizer=inbox,
                recv_from_rpc=_Inbox(),
                send_to_tokenizer=outbox,
                send_to_detokenizer=outbox,
                send_metrics_from_scheduler=None,
            )
            self.recv_from_tokenizer = inbox
            self.load_snapshot_writer = None

        def init_idle_sleeper(self) -> None:
            self.idle_sleeper = None

        def maybe_init_scripted_scheduler_hook(self) -> None:
            self.scripted_scheduler_hook = self._live[0]

    return ListeningScheduler

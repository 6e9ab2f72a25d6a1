"""Every adapter computes what the attention in PyTorch computes: one model, one plan, fp32.

The scheduler, the model, the pool and the narrowing are the real ones. FlashInfer's adapter runs
over the stand-in of its wrapper; virtual requests run over SGLang's own ``torch_native`` backend,
which plans and attends to a batch of entries as it does to one of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvshare_eval.live.process import in_a_process

pytestmark = pytest.mark.engine

#: fp32, sums in another order.
ROUNDING = 1e-4
#: Settings under which rows are dropped before layer 0, after a probe pass, and at check layers.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "seams": {"selector": "seams", "recompute_ratio": 0.2},
    "query": {"selector": "query", "recompute_ratio": 0.3},
    "check layer": {"selector": "deviation", "recompute_ratio": 0.3},
}
ADAPTERS = ("runs", "mask", "two parts", "virtual requests", "virtual requests, in groups")


@dataclass(frozen=True)
class Told:
    """What two requests of one batch were told.

    Attributes:
        tokens, logprobs: of both, one after the other.
        plans: how often the adapter planned; 0 for the one in PyTorch.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reused_tokens: int
    reasons: tuple[str, ...]
    plans: int


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Told]:
    return in_a_process(run_all, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_computes_what_the_attention_in_pytorch_computes(told, adapter, settings):
    plain, found = told["torch", settings], told[adapter, settings]
    assert found.plans > 0
    assert found.reused_tokens == plain.reused_tokens > 60
    assert found.reasons == plain.reasons
    assert found.tokens == plain.tokens
    assert found.logprobs == pytest.approx(plain.logprobs, abs=ROUNDING)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_wrong_adapter_would_be_seen(told, settings):
    """Control: one in which a row sees one key less."""
    plain, wrong = told["torch", settings], told["one key less", settings]
    assert wrong.reused_tokens == plain.reused_tokens
    differences = [abs(a - b) for a, b in zip(wrong.logprobs, plain.logprobs, strict=True)]
    assert max(differences) > 100 * ROUNDING


def run_all(folder: Path) -> dict[tuple[str, str], Told]:
    import torch
    from live_machine import tiny

    from kvshare_eval.live.scheduler import LiveScheduler
    from sglang_kvshare.config import KVShareConfig

    torch.set_num_threads(1)
    live = LiveScheduler(
        tiny(0).write(folder),
        KVShareConfig(
            min_run_tokens=8, min_saved_tokens=1, seam_tokens=2, tail_tokens=2, gate="off"
        ),
        max_total_tokens=1024,
        disable_overlap_schedule=True,
        max_running_requests=6,
    )
    try:
        worker = live.scheduler.tp_worker
        parts, backend = worker.kvshare_parts, worker.model_runner.attn_backend
        seen = {}
        for name, make in adapters(backend).items():
            for settings, wish in SETTINGS.items():
                with make() as (rows, plans):
                    worker.kvshare_parts = replace(parts, row_attention=rows)
                    seen[name, settings] = ask(live, wish, plans)
        return seen
    finally:
        live.close()


def ask(live: Any, wish: Mapping[str, Any], plans: Callable[[], int]) -> Told:
    """A donor, then two prompts that hold its passages in other orders, in one batch."""
    from live_machine import PASSAGES

    assert live.flush()
    live.finished.clear()
    donor = [token for passage in PASSAGES[:-1] for token in passage]
    live.submit("donor", [1, 2, 3, *donor, 4], 1)
    live.drain()
    batches: list[int] = []
    live.on_batch(lambda batch: batches.append(len(batch.reqs)))
    orders = {"a": (4, 2, 3), "b": (3, 1, 4)}
    for rid, order in orders.items():
        prompt = [token for number in order for token in [5, *PASSAGES[number]]]
        live.submit(rid, [6, *prompt, 7, 8, 9], 4, kvshare=wish, logprobs=True)
    live.drain()
    live.on_batch(lambda batch: None)
    assert batches[0] == 2, batches
    answers = [live.finished[rid] for rid in orders]
    return Told(
        tokens=tuple(token for answer in answers for token in answer.ids),
        logprobs=tuple(value for answer in answers for value in answer.logprobs),
        reused_tokens=sum(answer.report["reused_tokens"] for answer in answers),
        reasons=tuple(answer.report["reason"] for answer in answers),
        plans=plans(),
    )


def adapters(backend: Any) -> dict[str, Callable[[], Any]]:
    """Context managers that yield an adapter and a count of its plans."""
    import torch
    from flashinfer_stand_in import BatchPrefillWithPagedKVCacheWrapper, made

    from sglang_kvshare.attention.launches import in_runs, in_two_parts, with_mask
    from sglang_kvshare.engine import flashinfer_rows
    from sglang_kvshare.engine.flashinfer_rows import FlashInferRows
    from sglang_kvshare.engine.row_attention import PositionMaskRows
    from sglang_kvshare.engine.virtual_requests import EntryLimits, VirtualRequests

    backend.prefill_split_tile_size = None
    workspace = torch.empty(16, dtype=torch.uint8)

    @contextmanager
    def plain() -> Iterator[Any]:
        yield PositionMaskRows(), lambda: 0

    @contextmanager
    def one_key_less() -> Iterator[Any]:
        class Less(PositionMaskRows):
            def attend(self, narrowed: Any, rows: Any) -> Any:
                kept = narrowed.kept
                less = replace(kept, row_positions=(kept.row_positions - 1).clip(0))
                return super().attend(replace(narrowed, kept=less), rows)

        yield Less(), lambda: 0

    def flashinfer(form: Callable[..., Any], **more: int) -> Callable[[], Any]:
        @contextmanager
        def make() -> Iterator[Any]:
            made()
            rows = FlashInferRows(
                backend,
                lambda: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2"),
            )
            wrappers = BatchPrefillWithPagedKVCacheWrapper.made
            with patch.object(
                flashinfer_rows, "choose", lambda p, counts, **_: form(p, counts, **more)
            ):
                yield rows, lambda: sum(wrapper.plans for wrapper in wrappers)

        return make

    def virtual(capacity: int | None) -> Callable[[], Any]:
        @contextmanager
        def make() -> Iterator[Any]:
            rows = VirtualRequests(backend, EntryLimits(groups=100), Never())
            group, plans = rows._group, []

            def counted(*args: Any) -> Any:
                plans.append(args)
                return group(*args)

            with (
                patch.object(rows, "_group", counted),
                patch.object(rows, "_capacity", lambda: capacity),
            ):
                yield rows, lambda: len(plans)

        return make

    return {
        "torch": plain,
        "one key less": one_key_less,
        "runs": flashinfer(in_runs),
        "mask": flashinfer(with_mask, block_rows=4),
        "two parts": flashinfer(in_two_parts, block_rows=4),
        "virtual requests": virtual(None),
        "virtual requests, in groups": virtual(2),
    }


class Never:
    """Nothing is to be over the limits here."""

    def attend(self, narrowed: Any, rows: Any) -> Any:
        raise AssertionError("the entries were refused")

    def end(self) -> None:
        """There is nothing to let go of."""

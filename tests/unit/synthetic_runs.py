"""Run directories with known content, written as the runners write them."""

from __future__ import annotations

import numpy as np

from kvshare_eval.quality.record import Divergence, QualityRecord
from kvshare_eval.run_dir import RunDir
from kvshare_eval.serving.record import RequestRecord, WindowRecord

METHODS = ("full", "no_context", "exact_prefix", "none", "seams@0.1")
#: Mean KL of each method, relative to no repair, and the chance that an answer is right.
KL_SCALE = {"exact_prefix": 0.0, "none": 1.0, "seams@0.1": 0.5}
RIGHT = {"full": 0.8, "no_context": 0.1, "exact_prefix": 0.8, "none": 0.5, "seams@0.1": 0.75}
COMPUTED = {"full": 1.0, "no_context": 1.0, "exact_prefix": 0.9, "none": 0.1, "seams@0.1": 0.2}


def quality_record(task, group, case, method, *, score=1.0, kl=0.1, gold=True, computed=0.5):
    computed_tokens = round(1000 * computed)
    has_divergence = method not in ("full", "no_context")
    return QualityRecord(
        key=f"{task}/{group}/{case}/{method}",
        task=task,
        group=group,
        case=case,
        method=method,
        settings={},
        prompt_tokens=1000,
        answer="an answer",
        same_as_full=False,
        gold=("an answer",) if gold else (),
        metric="f1",
        scores={"f1": score} if gold else {},
        divergence=Divergence((kl, kl), (True, kl < 0.2), (0.9, 0.9)) if has_divergence else None,
        report={
            "prefix_tokens": 0,
            "reused_tokens": 1000 - computed_tokens,
            "recomputed_tokens": 0,
            "new_tokens": computed_tokens,
        },
    )


def quality_run(
    path,
    *,
    tasks=("squad:passages=4", "gsm8k"),
    groups=12,
    cases=3,
    methods=METHODS,
    gold=True,
    seed=0,
    kl_scale=None,
    right=None,
    settings=None,
):
    """Write a run; the cases are the same for the same seed, whatever the methods are."""
    scale, chance = KL_SCALE | (kl_scale or {}), RIGHT | (right or {})
    given = {"model": "tiny", "tasks": list(tasks), "methods": list(methods), "seed": seed}
    with RunDir(
        path, kind="quality", command="kvshare eval quality", settings=given | (settings or {})
    ) as run:
        for t, task in enumerate(tasks):
            for g in range(groups):
                for c in range(cases):
                    random = np.random.default_rng((seed, t, g, c))
                    base, luck = float(random.lognormal(-3, 1)), float(random.random())
                    for method in methods:
                        noise = float(random.lognormal(0, 0.3))
                        run.append(
                            quality_record(
                                task,
                                f"g{g}",
                                f"c{c}",
                                method,
                                score=float(luck < chance.get(method, 0.5)),
                                kl=base * noise * scale.get(method, 1.0),
                                gold=gold,
                                computed=COMPUTED.get(method, 0.5),
                            ).to_dict()
                        )
    return path


def serving_run(
    path,
    *,
    workloads=("rag:share=0.8",),
    rates=(1.0, 2.0),
    sides=("stock", "off", "reuse"),
    repeats=3,
    requests=40,
    factors=None,
    slo=True,
    seed=0,
    settings=None,
):
    """Write a run in which TTFT is 100 ms for stock, times a factor for a side and the rate.

    ``workloads`` may be a mapping to their own rates.
    """
    factor = {"stock": 1.0, "off": 1.05, "reuse": 0.4} | (factors or {})
    given = {"model": "tiny", "sides": list(sides), "seed": seed}
    if slo:
        given["slo"] = {"ttft_ms": 250.0, "tbt_ms": 50.0}
    with RunDir(
        path, kind="serving", command="kvshare eval serving", settings=given | (settings or {})
    ) as run:
        for workload in workloads:
            share = float(workload.partition("share=")[2] or 0.5)
            for rate in workloads[workload] if isinstance(workloads, dict) else rates:
                for repeat in range(repeats):
                    machine = float(np.random.default_rng((seed, repeat)).lognormal(0, 0.1))
                    for s, side in enumerate(sides):
                        key = f"{workload}/{side}/{rate}/{repeat}"
                        random = np.random.default_rng((seed, repeat, s, int(10 * (rate or 0))))
                        speed = factor[side] * machine * (1 - 0.5 * share * (side == "reuse"))
                        for record in _window(key, speed, rate, requests, random):
                            run.append(record.to_dict())
                        run.append(
                            WindowRecord(
                                key=key,
                                workload=workload,
                                side=side,
                                rate=rate,
                                reusable_share=share,
                                prompt_tokens=1000,
                                repeat=repeat,
                                seconds=requests / (rate or 1.0) + speed,
                                scheduler_cpu_s=0.1 * requests * speed,
                                kv_tokens_peak=5000,
                                kv_bytes_peak=5000 * 2**10,
                            ).to_dict()
                        )
    return path


def _window(key, speed, rate, requests, random):
    for number in range(requests):
        ttft = 100 * speed * (rate or 0.5) * float(random.lognormal(0, 0.2))
        reused = 0 if "/reuse/" not in key else 700
        failed = number == requests - 1
        yield RequestRecord(
            key=f"{key}/{number}",
            window=key,
            number=number,
            due_ms=0.0,
            sent_ms=0.1,
            ttft_ms=None if failed else ttft,
            tbt_ms=() if failed else (20.0, 25.0),
            e2e_ms=None if failed else ttft + 45,
            prompt_tokens=1000,
            output_tokens=0 if failed else 3,
            cached_tokens=100,
            report={}
            if "/stock/" in key
            else {
                "prefix_tokens": 100,
                "reused_tokens": reused,
                "recomputed_tokens": 0,
                "new_tokens": 900 - reused,
            },
            error="refused" if failed else None,
        )

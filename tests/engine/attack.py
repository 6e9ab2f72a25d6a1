"""A tenant that wants to know what another one has cached, in the real scheduler.

It is strong: it may choose its prompts, is told after each guess what was right, sees every figure
that a response holds, and has the machine for itself while it measures time.
"""

from __future__ import annotations

import logging
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from server_configs import TENANT_SECRET, TENANTS
from tiny_models import MODELS

from kvshare_eval.live.scheduler import Finished, LiveScheduler
from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.tenant_requests import assign
from sglang_kvshare.tenants import ENV_SECRET, TenantBook

VOCAB = 1000
#: Asks at a prompt's end, so that what is guessed may be matched.
END = [3, 1, 4]


@dataclass
class World:
    """A scheduler with tenants, and the dice of one attack."""

    live: LiveScheduler
    book: TenantBook
    dice: random.Random
    sent: int = 0

    def text(self, tokens: int) -> list[int]:
        return [self.dice.randrange(VOCAB) for _ in range(tokens)]


@dataclass
class Guesses:
    """What an attack came to.

    Attributes:
        right: guesses that were right, of ``asked``.
        told: every distinct thing that the attacker was told, by what it had asked.
        seconds: of answers to right and to wrong guesses.
    """

    asked: int = 0
    right: int = 0
    told: dict[str, set[tuple[Any, ...]]] = field(default_factory=dict)
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def note(self, question: str, answer: Finished) -> tuple[Any, ...]:
        figures = figures_of(answer)
        self.told.setdefault(question, set()).add(figures)
        return figures


def figures_of(answer: Finished) -> tuple[Any, ...]:
    """Every figure of a response that does not belong to its text."""
    report = tuple(sorted((answer.report or {}).items()))
    return answer.prompt_tokens, answer.cached_tokens, answer.retractions, answer.reason, report


def world(folder: Path, **settings: Any) -> World:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ[ENV_SECRET] = TENANT_SECRET
    config = KVShareConfig(
        tenants=str(TENANTS), similar_donors=True, min_saved_tokens=1, **settings
    )
    live = LiveScheduler(
        MODELS["llama"].write(folder / "model"),
        config,
        max_total_tokens=1 << 16,
        max_running_requests=8,
        # Long prompts are cut, unless their plan says that they need not be.
        chunked_prefill_size=512,
    )
    book = TenantBook.read(TENANTS, {ENV_SECRET: TENANT_SECRET})
    return World(live, book, random.Random(7))


def ask(here: World, who: str, ids: list[int], *, keep: bool = False) -> tuple[Finished, float]:
    """One request, as the HTTP process hands it on; its answer and the seconds that it took."""
    rid = submit(here, who, ids, keep=keep)
    begin = time.perf_counter()
    while rid not in here.live.finished:
        here.live.step()
    seconds = time.perf_counter() - begin
    here.live.drain()
    return here.live.finished[rid], seconds


def submit(here: World, who: str, ids: list[int], *, keep: bool = False) -> str:
    obj = SimpleNamespace(sampling_params={}, cache_salt=None, extra_key=None, session_params=None)
    request = SimpleNamespace(headers={"Authorization": f"Bearer key-{who}"}, scope={})
    assign(here.book, obj, request, starting=False)
    here.sent += 1
    rid = f"{who}-{here.sent}"
    here.live.submit(
        rid,
        ids,
        1,
        kvshare={"publish": keep},
        cache_salt=obj.cache_salt,
        tenant=obj.sampling_params["custom_params"]["kvshare_tenant"],
    )
    return rid


# --- the attacks ----------------------------------------------------------------------------------


def by_counters(here: World, attacker: str, trials: int = 40) -> Guesses:
    """Has ``alice`` cached this text, or another one? A coin decides."""
    found = Guesses()
    for _ in range(trials):
        assert here.live.flush()
        secret, decoy = here.text(96), here.text(96)
        coin = here.dice.random() < 0.5
        ask(here, "alice", secret if coin else decoy, keep=True)
        edited = [(t + 1) % VOCAB if i % 12 == 5 else t for i, t in enumerate(secret)]
        probes = {
            "as a prefix": secret,
            "its beginning": secret[:40],
            "elsewhere": [7, 7, 7, *secret],
            "its end": [7, 7, *secret[40:]],
            "edited": edited,
            "edited, elsewhere": [7, 7, 7, *edited],
        }
        seen = [
            found.note(name, ask(here, attacker, [*ids, *END])[0]) for name, ids in probes.items()
        ]
        hits = any(figures[1] or dict(figures[4])["reused_tokens"] for figures in seen)
        # Without a hit it cannot do better than to throw a coin of its own: "not cached" is right
        # where hits would have shown.
        guess = True if hits else (False if sees_hits(attacker) else here.dice.random() < 0.5)
        found.asked += 1
        found.right += guess == coin
    return found


def sees_hits(attacker: str) -> bool:
    """Whether no hit means something: to whoever may share with the victim."""
    return attacker == "alice"


def token_by_token(here: World, attacker: str, secrets: int = 3, tokens: int = 24) -> Guesses:
    """Of two tokens, which comes next in ``alice``'s text? All before is known."""
    found = Guesses()
    for _ in range(secrets):
        assert here.live.flush()
        secret = here.text(16 + tokens)
        ask(here, "alice", [*secret, *END], keep=True)
        for known in range(16, 16 + tokens):
            right = secret[known]
            wrong = (right + 1 + here.dice.randrange(VOCAB - 1)) % VOCAB
            order = [right, wrong] if here.dice.random() < 0.5 else [wrong, right]
            worth = []
            for token in order:
                start = [] if known % 2 else [7, 7]
                answer, _ = ask(here, attacker, [*start, *secret[:known], token, *END])
                figures = found.note(f"{known} known", answer)
                report = dict(figures[4])
                worth.append(figures[1] + report["reused_tokens"] + report["recomputed_tokens"])
            best = order[0] if worth[0] > worth[1] else order[1]
            if worth[0] == worth[1]:
                best = order[here.dice.randrange(2)]
            found.asked += 1
            found.right += best == right
    return found


def by_time(here: World, attacker: str, pairs: int = 30, tokens: int = 1200) -> Guesses:
    """Of two long texts, which one has ``alice`` cached? The faster answer says so, if any does."""
    found = Guesses()
    for _ in range(pairs):
        assert here.live.flush()
        cached, other = here.text(tokens), here.text(tokens)
        ask(here, "alice", cached, keep=True)
        order = [True, False] if here.dice.random() < 0.5 else [False, True]
        took = {}
        for right in order:
            answer, took[right] = ask(here, attacker, [*(cached if right else other), *END])
            found.seconds[0 if right else 1].append(took[right])
            found.note("text", answer)
        found.asked += 1
        found.right += took[True] < took[False]
    return found


def order_of(here: World, *, cached: bool) -> list[str]:
    """Who runs first of a stranger's cold prompt and, behind it, one of alice's, which has hits
    where her text is ``cached``."""
    assert here.live.flush()
    secret = here.text(400)
    ask(here, "alice", secret if cached else here.text(400), keep=True)
    ran: list[str] = []

    def note(batch: Any) -> None:
        ran.extend(req.rid.split("-")[0] for req in batch.reqs if req.rid not in seen)
        seen.update(req.rid for req in batch.reqs)

    seen: set[str] = set()
    here.live._gate.on_batch = note
    submit(here, "mallory", here.text(400))
    submit(here, "alice", [*secret, *END])
    here.live.drain()
    here.live._gate.on_batch = lambda batch: None
    return ran


# --- in a process of its own ----------------------------------------------------------------------


def attacks(folder: Path) -> dict[str, dict[str, Guesses] | list[list[str]]]:
    """Every attack by a stranger and, as the control, by the victim's own tenant."""
    here = world(folder, gate="off", recompute_ratio=0.0, selector="seams")
    try:
        told: dict[str, Any] = {
            attack.__name__: {who: attack(here, who) for who in ("mallory", "alice")}
            for attack in (by_counters, token_by_token, by_time)
        }
        told["order"] = [order_of(here, cached=cached) for cached in (False, True)]
        return told
    finally:
        here.live.close()


def gates(folder: Path) -> dict[str, Any]:
    """What the measuring gate of each tenant knows after one of them has reused a lot."""
    here = world(folder, gate="measured", recompute_ratio=0.0, selector="seams")
    try:
        secret, other = here.text(300), here.text(300)
        before = [figures_of(ask(here, "mallory", other[:n])[0]) for n in (60, 120, 240, 300)]
        for round_ in range(60):
            keep = round_ < 2
            ids = (
                secret
                if keep
                else [9, 9, *secret[: 40 + 60 * (round_ % 5)], *here.text(2 + round_)]
            )
            ask(here, "alice", ids, keep=keep)
            if round_ % 3 == 0:
                ask(here, "alice", here.text(64 << round_ % 4))
        after = [figures_of(ask(here, "mallory", other[:n])[0]) for n in (60, 120, 240, 300)]
        gate = here.live.cache._gates
        known = {
            who: gate.of({here.book.may_share(who)}).known for who in ("alice", "mallory", "pat")
        }
        return {"known": known, "before": before, "after": after}
    finally:
        here.live.close()

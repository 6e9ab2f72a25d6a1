"""``kvshare verify URL``: prove on a running server that reuse happens, is right, and stays apart.

Six requests, each greedy, with log-probabilities, in salts that this run makes up, so that nothing
of it serves anybody else:

    salt A   donor      [ intro ][==== passage ====][ question ]
             default    [ another, longer intro ][==== passage ====][ other question ]
    salt B   donor      as in A
             ratio 1    the prompt of `default`, everything recomputed
    salt C   stranger   the prompt of `default`; no donor here
    any      off        the prompt of `default`, nothing taken from the cache

``ratio 1`` must answer as ``off`` does; by how much ``default`` differs is shown, not judged.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_kvshare.verify.client import (
    ANSWER_TOKENS,
    TIMEOUT_SECONDS,
    Answer,
    Client,
    VerifyError,
    request_body,
)
from sglang_kvshare.verify.difference import Difference, compare, describe
from sglang_kvshare.verify.prompts import Prompts, make_prompts

PASSAGE_TOKENS = 512
#: Largest allowed difference of a log-probability at ratio 1, by the dtype that the server runs.
#: A narrowed forward adds in another order than a full one; a wrong one is off by whole units.
TOLERANCES = {"float32": 1e-3}
HALF_TOLERANCE = 0.25
#: Sources whose tokens come from the cache.
_CACHED = ("prefix", "approximate_prefix", "reused", "recomputed")


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verification:
    """What was found; ``to_dict`` is what ``--json`` prints."""

    url: str
    model: str
    dtype: str
    tolerance: float
    prompts_made_of: str
    checks: tuple[Check, ...]
    answers: Mapping[str, Answer] = field(repr=False)
    default: Difference
    ratio_1: Difference
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "url": self.url,
            "model": self.model,
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "prompts_made_of": self.prompts_made_of,
            "checks": [asdict(check) for check in self.checks],
            "default_ratio_against_off": asdict(self.default),
            "ratio_1_against_off": asdict(self.ratio_1),
            "requests": {
                name: {
                    "report": dict(answer.report or {}),
                    "ttft_ms": answer.ttft_ms,
                    "output_ids": list(answer.ids),
                    "text": answer.text,
                }
                for name, answer in self.answers.items()
            },
            "notes": list(self.notes),
        }


def verify(
    url: str,
    *,
    api_key: str | None = None,
    passage_tokens: int = PASSAGE_TOKENS,
    tolerance: float | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Verification:
    """Send the requests of this module's docstring and judge them.

    Args:
        url: the server, ``http://host:port``.
        passage_tokens: length of the passage that is reused.
        tolerance: largest log-probability difference at ratio 1; by default, see
            :data:`TOLERANCES`.
        timeout: seconds that the server may be silent.

    Raises:
        VerifyError: the server cannot be asked, or does not run KVShare.
    """
    client = Client(url, api_key, timeout)
    info = client.get("/server_info")
    if not isinstance(info, Mapping) or "model_path" not in info:
        raise VerifyError(f"no SGLang server at {client.url}: /server_info names no model")
    room = int(info.get("max_req_input_len") or passage_tokens + 200) - 200
    if room < passage_tokens:
        raise VerifyError(
            f"{client.url} takes prompts of at most {room + 200} tokens; "
            f"ask for a shorter passage: --tokens {max(room, 1)}"
        )
    rank = {"routed_dp_rank": 0} if int(info.get("dp_size") or 1) > 1 else {}
    dtype = str(info.get("dtype"))
    if tolerance is None:
        tolerance = TOLERANCES.get(dtype, HALF_TOLERANCE)
    prompts = make_prompts(
        client,
        passage_tokens,
        random.Random(secrets.randbits(64)),
        tokenizer=not info.get("skip_tokenizer_init"),
    )

    def ask(
        ids: Sequence[int],
        salt: str,
        settings: Mapping[str, Any] | None,
        tokens: int = ANSWER_TOKENS,
    ) -> Answer:
        body = request_body(ids, salt=salt, settings=settings, answer_tokens=tokens)
        return client.generate(body | rank)

    salt_a, salt_b, salt_c, salt_off = (f"kvshare-verify-{secrets.token_hex(12)}" for _ in "abcd")
    approximate = {"reuse": "approximate"}
    donor = ask(prompts.donor, salt_a, None, 1)
    if donor.report is None:
        raise VerifyError(
            f"{client.url} runs SGLang without KVShare: start it with --kvshare "
            "(for sglang.Engine: KVSHARE=1)"
        )
    answers = {"donor": donor, "default": ask(prompts.prompt, salt_a, approximate)}
    answers["donor again"] = ask(prompts.donor, salt_b, None, 1)
    answers["ratio 1"] = ask(prompts.prompt, salt_b, {**approximate, "recompute_ratio": 1})
    answers["stranger"] = ask(prompts.prompt, salt_c, approximate)
    answers["off"] = ask(prompts.prompt, salt_off, {"reuse": "off"})
    default = compare(answers["off"], answers["default"], tolerance)
    ratio_1 = compare(answers["off"], answers["ratio 1"], tolerance)
    return Verification(
        url=client.url,
        model=str(info["model_path"]),
        dtype=dtype,
        tolerance=tolerance,
        prompts_made_of=prompts.made_of,
        checks=_judge(answers, prompts, ratio_1, tolerance),
        answers=answers,
        default=default,
        ratio_1=ratio_1,
        notes=_notes(donor),
    )


def _judge(
    answers: Mapping[str, Answer], prompts: Prompts, ratio_1: Difference, tolerance: float
) -> tuple[Check, ...]:
    default, full, off = answers["default"], answers["ratio 1"], answers["off"]
    reused = default.count("reused")
    sums = {
        name: sum(answer.count(source) for source in (*_CACHED, "new"))
        for name, answer in answers.items()
    }
    wrong = [
        name
        for name, total in sums.items()
        if total != len(prompts.donor if name.startswith("donor") else prompts.prompt)
    ]
    foreign = sum(answers["stranger"].count(source) for source in _CACHED)
    taken = sum(off.count(source) for source in _CACHED)
    return (
        Check(
            "a passage is reused at another offset",
            reused > 0,
            f"{reused} tokens reused (the passage has {prompts.passage_tokens}), "
            f"{default.count('recomputed')} recomputed"
            if reused
            else f"nothing reused, reason: {default.reason}{_hint(default)}",
        ),
        Check(
            "ratio 1 answers as reuse off does",
            full.count("recomputed") > 0
            and full.count("reused") == 0
            and ratio_1.within(tolerance),
            f"{full.count('recomputed')} matched tokens recomputed; {describe(ratio_1)}; "
            f"allowed: the same text, log-probabilities within {tolerance:g}"
            if full.count("recomputed")
            else f"nothing was matched, reason: {full.reason}{_hint(full)}",
        ),
        Check(
            "another salt gets nothing",
            foreign == 0,
            f"{foreign} tokens from the cache of other salts",
        ),
        Check("reuse off takes nothing", taken == 0, f"{taken} tokens from the cache"),
        Check(
            "every prompt's counts sum to its length",
            not wrong,
            f"not so: {', '.join(wrong)}" if wrong else f"in all {len(answers)} reports",
        ),
    )


def _hint(answer: Answer) -> str:
    hints = {
        "below_minimum": "ask for a longer passage: --tokens",
        "gate_closed": "ask for a longer passage: --tokens",
        "no_match": "the server looks for longer runs than --tokens, or evicted the donor at once",
        "donor_evicted": "the cache is too full; try again when the server is less busy",
        "ok": "this server recomputes every reused token (recompute_ratio)",
        "force_miss": "the server was started with SGLANG_RADIX_FORCE_MISS",
    }
    hint = hints.get(answer.reason, "see docs/configuration.md, and the server's log")
    return f" ({hint})"


def _notes(donor: Answer) -> tuple[str, ...]:
    """The donor was sent without settings: its reason tells the server's default."""
    if donor.reason in ("off", "exact_prefix"):
        return (
            f"this server's default is reuse = {donor.reason}: a request gets more only when it "
            'says custom_params.kvshare.reuse = "approximate", as the requests here did',
        )
    return ()

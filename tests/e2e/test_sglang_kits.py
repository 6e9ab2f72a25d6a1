"""SGLang's own yardsticks: its kits, unchanged, against servers in every reuse mode.

The kits were written for other caches too, and some of what they assert contradicts a mode by
definition; then the test says which contract it checks instead, and why. ``make test`` asks one
server for all modes by request (the tap adds the setting); ``make kits`` starts a server for each
mode with its flags, and runs more and larger rounds.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import sglang_kits as kits
from server import Server, ServerConfig
from server_configs import EAGER
from sglang_kits import Sizes
from tap import Tap
from tiny_models import MODELS

from kvshare_eval.passages import load_passages

pytestmark = pytest.mark.e2e

Settings = Mapping[str, Any] | None
#: What a request says to get the mode; ``stock`` can say nothing.
MODES: dict[str, Settings] = {
    "off": {"reuse": "off"},
    "exact_prefix": {"reuse": "exact_prefix"},
    "approximate": {"reuse": "approximate"},
    "ratio_1": {"reuse": "approximate", "recompute_ratio": 1},
    "stock": None,
}
#: Modes that must give what a full computation gives.
EXACT = ("off", "exact_prefix", "ratio_1", "stock")

SMALL = Sizes(
    radix_nodes=12,
    radix_chunk_tokens=48,
    clients=3,
    rounds=3,
    turn_tokens=96,
    answer_tokens=8,
    kl_prompts=5,
    kl_prompt_tokens=112,
    kl_answer_tokens=6,
    filler_times=30,
)
LARGE = Sizes(
    radix_nodes=60,
    radix_chunk_tokens=64,
    clients=6,
    rounds=4,
    turn_tokens=160,
    answer_tokens=24,
    kl_prompts=16,
    kl_prompt_tokens=240,
    kl_answer_tokens=32,
    # 4,000 tokens: the whole 8,000 take a CPU close to the two minutes that the kit waits.
    filler_times=kits.FILLER_TIMES // 2,
)
#: Log-probabilities in fp32 through two batches of different shape (SGLang's own tests on GPUs
#: allow 2e-3 and more in bf16).
KL_EXACT = 1e-8
KL_APPROXIMATE = 0.1
#: Chunks, so that the prompts of one batch find each other.
TINY = ("--max-total-tokens", "8192", "--chunked-prefill-size", "192")
PAGES = ("--page-size", "16", "--disable-overlap-schedule")
REAL = ("--max-total-tokens", "16384", "--chunked-prefill-size", "128")
#: Threads that wait for each other cost more than they give on the tiny model.
ONE_THREAD = (("OMP_NUM_THREADS", "1"),)
STOCK = (("SGLANG_PLATFORM", "kvshare_cpu"),)


@dataclass(frozen=True)
class Bench:
    """One server and what runs against it.

    Attributes:
        modes: name of the mode, and what each request says to get it (``None``: nothing).
        real: the real model; else a tiny one with the real model's tokenizer.
    """

    config: ServerConfig
    modes: Mapping[str, Settings]
    seeds: Sequence[int] = (1, 2)
    sizes: Sizes = SMALL
    real: bool = False
    server: Server | None = field(default=None, compare=False)
    model: Path = Path()
    tokenizer: Any = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return self.server.url

    @property
    def page_size(self) -> int:
        return self.config.page_size

    @contextmanager
    def tap(self, mode: str, seed: int = 0, *, count_found: bool = False) -> Iterator[Tap]:
        """An empty cache, and a tap that keeps what comes back; afterwards the server is well."""
        assert self.server is not None
        self.server.flush()
        try:
            with Tap(self.url, settings=self.modes[mode], count_found=count_found) as tap:
                yield tap
            self.server.assert_healthy()
            check_reports(tap.answers, mode)
        except BaseException as error:
            error.add_note(f"mode {mode}, seed {seed}, server {self.config.name}")
            raise

    def runs(self) -> Iterator[tuple[str, int]]:
        return ((mode, seed) for seed in self.seeds for mode in self.modes)


def server_config(name: str, *flags: str, kvshare: bool = True, tiny: bool = True) -> ServerConfig:
    env = (*(ONE_THREAD if tiny else ()), *(() if kvshare else STOCK))
    flags = (*flags, *(TINY if tiny else REAL), *(EAGER if kvshare else ()))
    return ServerConfig(name, "llama", flags, env, kvshare=kvshare, tokenizer=True)


def by_flag(mode: str) -> tuple[str, ...]:
    settings = MODES[mode]
    assert settings is not None
    return tuple(
        part
        for key, value in settings.items()
        for part in (f"--kvshare-{key.replace('_', '-')}", str(value))
    )


ASKED = {mode: settings for mode, settings in MODES.items() if settings is not None}
FULL = pytest.mark.kits_full


def benches(*, real: bool) -> list[Any]:
    """The server of ``make test``, asked for every mode; then those of ``make kits``."""
    model, tiny = ("real" if real else "tiny"), not real
    small = [Bench(server_config(f"{model}-asked", tiny=tiny), ASKED, real=real)]
    seeds = (1,) if real else (1, 2, 3, 4, 5)
    large = [
        Bench(
            server_config(
                f"{model}-{mode}",
                *(() if mode == "stock" else by_flag(mode)),
                *pages,
                kvshare=mode != "stock",
                tiny=tiny,
            ),
            {mode: None},
            seeds,
            LARGE,
            real,
        )
        for mode in MODES
        for pages in (((), PAGES) if tiny and mode in ("approximate", "ratio_1") else ((),))
    ]
    return [
        *(pytest.param(bench, id=bench.config.name, marks=FULL if real else ()) for bench in small),
        *(
            pytest.param(bench, id=f"{bench.config.name}-page{bench.page_size}", marks=FULL)
            for bench in large
        ),
    ]


@pytest.fixture(scope="class")
def bench(request, model_folder, tokenizer, tmp_path_factory):
    asked: Bench = request.param
    folder = tmp_path_factory.mktemp(asked.config.name)
    model = model_folder if asked.real else tiny_model(model_folder, folder / "model")
    server = Server(asked.config, model, folder / "server.log")
    yield replace(asked, server=server, model=model, tokenizer=tokenizer)
    server.stop()


def tiny_model(real: Path, folder: Path) -> Path:
    """Random weights behind the real tokenizer: the kits send text, and ids up to 31,999."""
    replace(MODELS["llama"], vocab=49152).write(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(real / name, folder)
    return folder


def check_reports(answers: Sequence[Mapping[str, Any]], mode: str) -> None:
    """What the mode promises for every answer, whatever the kit asserts."""
    for answer in answers:
        meta = answer["meta_info"]
        report = (meta.get("cached_tokens_details") or {}).get("kvshare")
        if mode == "stock":
            assert report is None
            continue
        names = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "new_tokens")
        prefix, reused, recomputed, new = (report[name] for name in names)
        assert prefix + reused + recomputed + new == meta["prompt_tokens"], report
        assert prefix == meta["cached_tokens"], report
        assert new >= 1, report
        assert mode != "off" or prefix == 0, report
        assert mode in ("approximate", "ratio_1") or reused == recomputed == 0, report
        assert mode == "approximate" or reused == 0, report


def found_tokens(answers: Sequence[Mapping[str, Any]]) -> int:
    """Prompt tokens found beyond the exact prefix, computed again or not."""
    reports = [answer["meta_info"]["cached_tokens_details"]["kvshare"] for answer in answers]
    return sum(report["reused_tokens"] + report["recomputed_tokens"] for report in reports)


def random_texts(tokenizer: Any, seed: int, count: int, tokens: int) -> list[str]:
    """Texts of at least ``tokens`` tokens without a common run that is long enough for reuse."""
    rng = random.Random(seed)
    words = range(1000, 40_000)
    return [tokenizer.decode(rng.choices(words, k=2 * tokens)) for _ in range(count)]


def shared_texts(pool: Sequence[str], starts: Sequence[str], seed: int) -> list[str]:
    """All passages of ``pool`` in another order behind each start."""
    rng = random.Random(seed)
    return [" ".join([start, *rng.sample(pool, k=len(pool))]) for start in starts]


def shared_random_texts(tokenizer: Any, seed: int, count: int, tokens: int) -> list[str]:
    pool = random_texts(tokenizer, seed, 1 + tokens // 32, 16)
    return shared_texts(pool, random_texts(tokenizer, seed + 1, count, 2), seed)


def prompts_of(bench: Bench, texts: Sequence[str]) -> list[list[int]]:
    return [bench.tokenizer.encode(text)[: bench.sizes.kl_prompt_tokens] for text in texts]


def outputs(tap: Tap) -> list[list[int]]:
    return [answer["output_ids"] for answer in tap.answers]


@pytest.mark.parametrize("bench", benches(real=False), indirect=True)
class TestTinyModel:
    """What needs no answer that makes sense: caches, counters, log-probabilities."""

    #: The radix kit's answers, from the first exact mode that gave them; other servers' too.
    expected: dict[tuple[int, int, Sizes], list[list[int]]] = {}  # noqa: RUF012

    @pytest.mark.parametrize("alphabet_tokens", [32_000, 5])
    def test_radix_cache_kit(self, bench, alphabet_tokens):
        """The kit asserts that the server answers; the answers of all exact modes are the same."""
        differ = False
        for mode, seed in bench.runs():
            with bench.tap(mode, seed) as tap:
                kits.radix_cache(tap.url, seed, bench.sizes, alphabet_tokens)
            assert len(tap.answers) > bench.sizes.radix_nodes
            outputs = [answer["output_ids"] for answer in tap.answers]
            if mode in EXACT:
                key = (alphabet_tokens, seed, bench.sizes)
                assert self.expected.setdefault(key, outputs) == outputs, mode
            elif alphabet_tokens < 10:
                assert found_tokens(tap.answers) > 0
                differ |= outputs != self.expected.get((alphabet_tokens, seed, bench.sizes))
        # Positive control of the comparison: an approximation shows.
        assert differ or alphabet_tokens > 10 or "approximate" not in bench.modes

    def test_cache_hit_kit_without_common_passages(self, bench, tmp_path):
        """Nothing to approximate: all modes but ``off`` give the kit its hits as it counts them."""
        for mode, seed in bench.runs():
            # The kit draws twice from its data set; from a large one nothing comes twice.
            texts = random_texts(bench.tokenizer, seed, 1000, bench.sizes.turn_tokens)
            arguments = (bench.model, texts, seed, bench.sizes, tmp_path)
            with bench.tap(mode, seed) as tap:
                if mode != "off":
                    result = kits.cache_hit(tap.url, *arguments)
                    assert result["overall"]["cache_hit_rate"] > 0.5
                    continue
                # By contract nothing is taken from the cache, and that is what the kit is to see:
                # it stops at the first turn that should have hit. So it fails where no cache is.
                with pytest.raises(AssertionError):
                    kits.cache_hit(tap.url, *arguments)
                assert len(tap.answers) == 2 * bench.sizes.clients

    def test_cache_hit_kit_over_common_passages(self, bench, tmp_path):
        """Conversations that begin with the same passages in another order, so that all but the
        first rest on reused values. SGLang's ``cached_tokens`` is the exact prefix alone, so what
        was found in any way is shown to the kit as cached; later questions are too short to be
        found themselves, so that only the history counts."""
        for mode, seed in bench.runs():
            if mode == "off":
                continue
            texts = shared_random_texts(bench.tokenizer, seed, 40, bench.sizes.turn_tokens)
            arguments = (bench.model, texts, seed, bench.sizes, tmp_path)
            with bench.tap(mode, seed, count_found=mode == "approximate") as tap:
                # One after the other, so that the second conversation finds the first one's.
                kits.cache_hit(tap.url, *arguments, later_turn_tokens=12, in_flight=1)
            assert mode not in ("approximate", "ratio_1") or found_tokens(tap.answers) > 0

    def test_kl_divergence_kit(self, bench):
        """Against a prefill of the whole text whose log-probabilities are asked for, which KVShare
        computes in full. Over common passages an approximation shows, as it should."""
        for mode, seed in bench.runs():
            size = (bench.sizes.kl_prompts, bench.sizes.kl_prompt_tokens)
            for texts in (random_texts, shared_random_texts):
                prompts = prompts_of(bench, texts(bench.tokenizer, seed, *size))
                arguments = (bench.model, prompts, KL_EXACT, bench.sizes)
                # With reuse off the kit finds none of the hits that it wants before it compares.
                failure = "Too few prefill cache hits: 0/" if mode == "off" else None
                if mode == "approximate" and texts is shared_random_texts:
                    failure = "avg_kl_div="
                with bench.tap(mode, seed) as tap:
                    if failure is None:
                        kits.kl_divergence(tap.url, *arguments)
                        continue
                    with pytest.raises(AssertionError, match=failure):
                        kits.kl_divergence(tap.url, *arguments)

    def test_prefix_cache_branching_kit(self, bench):
        """The kit is for caches that keep a state at chosen points (Mamba): there the second prompt
        cannot hit and makes the third one hit. A radix tree, stock SGLang's too, splits where two
        prompts part, and so serves the second one already: the kit stops there, at the number of
        common tokens. Its third request is sent after that."""
        for mode in bench.modes:
            with bench.tap(mode) as tap:
                kit = kits.prefix_branching(tap.url, bench.page_size)
                stop = r"i=2, cache_hit=True, cached_tokens=0" if mode == "off" else r"i=1"
                with pytest.raises(AssertionError, match=stop):
                    kit.test_prefix_cache_branching()
                if mode != "off":
                    first, second = kit.sent
                    common = first[: common_length(first, second)]
                    kit.send_request_helper(common + "that" * 64)
                ids = [bench.tokenizer.encode(text) for text in kit.sent]
                cached = [answer["meta_info"]["cached_tokens"] for answer in tap.answers]
                assert cached == (
                    [0, 0, 0] if mode == "off" else best_prefixes(ids, bench.page_size)
                )


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def best_prefixes(prompts: Sequence[Sequence[int]], page_size: int) -> list[int]:
    """Tokens that each prompt shares with one before it, in whole pages."""
    shared = [
        max((common_length(prompt, other) for other in prompts[:number]), default=0)
        for number, prompt in enumerate(prompts)
    ]
    return [length // page_size * page_size for length in shared]


@pytest.mark.kits_full
@pytest.mark.parametrize(
    "bench",
    [
        pytest.param(
            Bench(
                server_config("tiny-no-cache", "--disable-radix-cache", kvshare=False),
                {"stock": None},
            ),
            id="tiny-no-cache",
        )
    ],
    indirect=True,
)
class TestWithoutCache:
    """Positive control: where there is nothing to hit, the kit that guards hits fails."""

    def test_cache_hit_kit_fails(self, bench, tmp_path):
        for mode, seed in bench.runs():
            texts = random_texts(bench.tokenizer, seed, 1000, bench.sizes.turn_tokens)
            with bench.tap(mode, seed) as tap:
                with pytest.raises(AssertionError):
                    kits.cache_hit(tap.url, bench.model, texts, seed, bench.sizes, tmp_path)
                assert len(tap.answers) == 2 * bench.sizes.clients


@pytest.mark.parametrize("bench", benches(real=True), indirect=True)
class TestRealModel:
    """What needs answers that make sense."""

    def test_basic_scheduler_stress_kit(self, bench):
        for mode in bench.modes:
            with bench.tap(mode) as tap:
                result = kits.scheduler_stress(tap.url, bench.sizes)
            assert result.testsRun == 3
            assert result.wasSuccessful(), (mode, result.failures, result.errors)

    def test_kl_divergence_kit(self, bench):
        """How far an approximation over real passages is off, in the kit's own measure."""
        if "approximate" not in bench.modes:
            return
        passages = [passage.text[:250] for passage in load_passages()]
        for seed in bench.seeds:
            starts = [f"Conversation {number}." for number in range(bench.sizes.kl_prompts)]
            pool = passages[seed : seed + 2 + bench.sizes.kl_prompt_tokens // 60]
            prompts = prompts_of(bench, shared_texts(pool, starts, seed))
            arguments = (bench.model, prompts)
            with bench.tap("approximate", seed, count_found=True) as tap:
                kits.kl_divergence(tap.url, *arguments, KL_APPROXIMATE, bench.sizes)
            assert found_tokens(tap.answers) > 0
            # Positive control, on an empty cache again: it is an approximation, and the kit sees
            # that.
            with (
                bench.tap("approximate", seed, count_found=True) as tap,
                pytest.raises(AssertionError, match="avg_kl_div="),
            ):
                kits.kl_divergence(tap.url, *arguments, KL_EXACT, bench.sizes)

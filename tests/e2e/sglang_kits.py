"""SGLang's own test kits, from its wheel, at the sizes of a CPU.

Every kit runs its own code. A size that is a parameter is given; one that is a constant is set from
outside, which the function that does so explains.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import unittest
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

#: Of kl_test_utils, for data sets that would be downloaded: what the kit would look for.
_KL_PROMPTS = "{model}_{tokens}_{samples}"
FILLER = "the quick brown fox jumps over the lazy dog. "
FILLER_TIMES = 800


@dataclass(frozen=True)
class Sizes:
    """How much of each kit runs; in brackets what it ships with.

    Attributes:
        radix_nodes: prompts of the random tree (400).
        radix_chunk_tokens: longest piece that a prompt adds to its parent's, and longest answer but
            for the root's (256).
        clients: conversations that go on at the same time (8).
        rounds: turns of each (3).
        turn_tokens: of every question (256).
        answer_tokens: of every answer (32).
        kl_prompts: prompts whose log-probabilities are compared (32).
        kl_prompt_tokens: their length (1,500 to 4,500).
        kl_answer_tokens: log-probabilities compared per prompt (512).
        filler_times: sentences of the long prompt, ten tokens each (800).
    """

    radix_nodes: int
    radix_chunk_tokens: int
    clients: int
    rounds: int
    turn_tokens: int
    answer_tokens: int
    kl_prompts: int
    kl_prompt_tokens: int
    kl_answer_tokens: int
    filler_times: int


def load(name: str) -> ModuleType:
    """Import ``sglang.test.<name>`` on a machine without an accelerator."""
    # `sglang.benchmark` imports every data set that it knows, and one of them Hugging Face's
    # `datasets`, which SGLang does not require. No kit comes near that one.
    stand_in = ModuleType("datasets")
    stand_in.load_dataset = None  # type: ignore[attr-defined]
    missing = find_spec("datasets") is None
    if missing:
        sys.modules["datasets"] = stand_in
    try:
        # Read once, at the first import.
        with mock.patch.dict("os.environ", {"SGLANG_PLATFORM": "kvshare_cpu"}):
            return import_module(f"sglang.test.{name}")
    finally:
        if missing:
            del sys.modules["datasets"]


def radix_cache(url: str, seed: int, sizes: Sizes, alphabet_tokens: int = 32_000) -> None:
    """A random tree of prompts in one request, each a run of equal tokens longer than its parent.

    The kit calls its own generator without arguments, so they are bound from outside; the 217
    tokens of the root's answer stay.

    Args:
        alphabet_tokens: different tokens to choose from. As shipped nearly every run has a token of
            its own, and nothing is met twice but prefixes; of a few, runs come back everywhere.
    """
    kit = load("kits.radix_cache_server_kit")
    smaller = functools.partial(
        kit.gen_radix_tree, num_nodes=sizes.radix_nodes, chunk_len=sizes.radix_chunk_tokens
    )
    rng = random.Random(seed)

    class Chosen:
        """What the kit uses of :mod:`random`."""

        choice, shuffle = rng.choice, rng.shuffle

        @staticmethod
        def randint(low: int, high: int) -> int:
            return rng.randint(low, alphabet_tokens - 1 if high == 31_999 else high)

    with (
        mock.patch.object(kit, "gen_radix_tree", smaller),
        mock.patch.object(kit, "random", Chosen),
    ):
        kit.run_radix_attention_test(url)


def cache_hit(
    url: str,
    tokenizer: Path,
    texts: Sequence[str],
    seed: int,
    sizes: Sizes,
    folder: Path,
    later_turn_tokens: int = 0,
    in_flight: int = 64,
) -> dict[str, Any]:
    """Conversations over ``texts``, which take the place of a data set to download (ShareGPT).

    Args:
        later_turn_tokens: of every question after the first; 0: as long as that.
        in_flight: conversations that ask at the same time.
    """
    data_set = folder / "sharegpt.json"
    turns = [[{"value": text}, {"value": ""}] for text in texts]
    data_set.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    result: dict[str, Any] = load("kits.cache_hit_kit").run_multiturn_cache_hit_test(
        url,
        str(tokenizer),
        num_clients=sizes.clients,
        num_rounds=sizes.rounds,
        request_length=sizes.turn_tokens,
        output_length=sizes.answer_tokens,
        sub_question_input_length=later_turn_tokens,
        max_parallel=in_flight,
        dataset_path=str(data_set),
        seed=seed,
    )
    return result


def kl_divergence(
    url: str, tokenizer: Path, prompts: Sequence[Sequence[int]], threshold: float, sizes: Sizes
) -> None:
    """Log-probabilities after hits on cached prompts and on cached answers, against a prefill.

    ``prompts`` go where the kit keeps what it has read of a data set (LongBench) before.
    """
    utils = load("kl_test_utils")

    class Kit(load("kits.kl_divergence_kit").KLDivergenceMixin):  # type: ignore[misc]
        base_url = url
        model = str(tokenizer)
        kl_div_thres = threshold
        kl_div_max_samples = len(prompts)
        kl_div_prefill_max_new_tokens = sizes.kl_answer_tokens
        kl_div_decode_max_new_tokens = sizes.kl_answer_tokens

    name = _KL_PROMPTS.format(
        model=tokenizer, tokens=utils.DEFAULT_PROMPT_TOKENS, samples=utils.DEFAULT_NUM_SAMPLES
    )
    cached = {name: [list(prompt) for prompt in prompts]}
    with mock.patch.dict(utils._cached_input_ids, cached):
        Kit.test_input_output_logprobs_match_prefill_cache_hit()
        Kit.test_input_output_logprobs_match_decode_cache_hit()


def prefix_branching(url: str, page_size: int) -> type:
    """The kit's class; ``sent`` holds the texts that it sent so far."""
    requests = import_module("requests")

    class Kit(load("kits.prefix_cache_branching_kit").PrefixCacheBranchingMixin):  # type: ignore[misc]
        base_url = url
        cache_chunk_size = page_size
        sent: list[str]

        @classmethod
        def flush_cache(cls) -> None:
            cls.sent = []
            requests.post(url + "/flush_cache", timeout=60).raise_for_status()

        @classmethod
        def send_request_helper(cls, text: str) -> Any:
            cls.sent.append(text)
            return super().send_request_helper(text)

    return Kit


def scheduler_stress(url: str, sizes: Sizes) -> unittest.TestResult:
    """Streaming, eight requests at once, and a long prompt; questions that a real model answers.

    The length of the long prompt is a constant inside the kit's test, so it is cut on its way out.
    """
    shorter = FILLER * sizes.filler_times

    class Kit(load("kits.basic_scheduler_stress_kit").BasicSchedulerStressMixin, unittest.TestCase):  # type: ignore[misc]
        base_url = url
        process = None

        def _stress_generate(self, prompt: str, max_new_tokens: int) -> str:
            prompt = prompt.replace(FILLER * FILLER_TIMES, shorter)
            # The model here is tuned for dialogue: to a bare question it says nothing at all.
            prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            answer: str = super()._stress_generate(prompt, max_new_tokens)
            return answer

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Kit).run(result)
    return result

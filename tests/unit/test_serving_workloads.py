"""What the serving workloads send, against a slow count of what could be reused."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.loaders.traces import TraceRequest, load_trace
from kvshare_eval.serving.tokens import Corpus, Tokens, kv_bytes_per_token
from kvshare_eval.serving.workloads import Load, find_workload, workloads

pytestmark = pytest.mark.unit

#: The shortest run that KVShare reuses by default.
RUN = 16

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,480,10
2023-11-16 18:17:04.4799600,318,8
2023-11-16 18:17:13.9799600,11,27
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 900, "hash_ids": [0, 1, 3]},
    {"timestamp": 4000, "input_length": 700, "output_length": 7, "hash_ids": [8, 1]},
]


def encode(text: str, known: dict[str, int] = {}) -> list[int]:  # noqa: B006
    """A word is a token; the numbers of new words count on."""
    return [known.setdefault(word, 1_000 + len(known)) for word in text.split()]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "azure_llm_2023_conv.csv.gz").write_bytes(gzip.compress(AZURE.encode()))
    lines = "".join(json.dumps(row) + "\n" for row in MOONCAKE)
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text(lines)
    return Corpus(encode, 50_000, DataSource(folder=tmp_path))


def make(corpus: Corpus, text: str, count: int = 12, name: str = "w") -> Load:
    workload, options = find_workload(text)
    return workload.make(Tokens(corpus, name), count, **options)


def could_be_reused(load: Load) -> list[int]:
    """Oracle: tokens of each prompt in runs of 16 that stand in a prompt before it."""
    seen: set[tuple[int, ...]] = set()
    found: list[int] = []
    for prompt in [*load.warm_up, *(one.prompt for one in load.requests)]:
        runs = [tuple(prompt[i : i + RUN]) for i in range(len(prompt) - RUN + 1)]
        covered = {at + j for at, run in enumerate(runs) if run in seen for j in range(RUN)}
        found.append(len(covered))
        seen.update(runs)
    return found[len(load.warm_up) :]


EXACT = (
    "rag",
    "rag:prompt_tokens=2500,share=0.9",
    "rag:share=0.25,pool=3",
    "rag:share=0",
    "shared_prefix:prefixes=3",
    "agent:steps=3,trimmed=0",
    "agent:trimmed=1",
    "no_reuse",
    "trace:max_tokens=400",
    "trace:name=mooncake_conversation_trace,scale=0.25",
)


@pytest.mark.parametrize("text", EXACT)
def test_the_reusable_share_is_what_an_index_could_find(corpus: Corpus, text: str) -> None:
    load = make(corpus, text)
    truth = [one.reusable_tokens for one in load.requests]
    assert could_be_reused(load) == truth
    sent = sum(len(one.prompt) for one in load.requests)
    assert load.reusable_share == pytest.approx(sum(truth) / sent)


def test_support_counts_the_articles_and_leaves_the_questions_out(corpus: Corpus) -> None:
    load = make(corpus, "support", 30)
    for one, found in zip(load.requests, could_be_reused(load), strict=True):
        assert one.reusable_tokens == 798  # three articles of 266
        assert 798 <= found <= 798 + 24


def test_the_oracle_tells_workloads_apart(corpus: Corpus) -> None:
    """Control: the same count on prompts that share nothing, and on the same prompt twice."""
    load = make(corpus, "no_reuse", 2)
    assert could_be_reused(load) == [0, 0]
    twice = Load((), (load.requests[0], load.requests[0]))
    assert could_be_reused(twice) == [0, 1000]


@pytest.mark.parametrize("text", [*EXACT, "support"])
def test_prompts_follow_from_the_name_alone(corpus: Corpus, text: str) -> None:
    load = make(corpus, text)
    assert load == make(corpus, text)
    prompts = [one.prompt for one in load.requests] + list(load.warm_up)
    other = make(corpus, text, name="another window")
    everything = prompts + [one.prompt for one in other.requests] + list(other.warm_up)
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("text", [one for one in EXACT if "agent" not in one and "tr" not in one])
def test_prompts_have_the_asked_length_and_start_with_new_text(corpus: Corpus, text: str) -> None:
    load = make(corpus, text)
    wanted = find_workload(text)[1].get("prompt_tokens", 1000)
    assert {len(one.prompt) for one in load.requests} == {wanted} == {load.prompt_tokens}
    if "prefix" not in text:
        # Stock SGLang finds nothing: this is what the sides are to be told apart by.
        heads = [one.prompt[:1] for one in load.requests]
        assert len(set(heads)) > len(heads) // 2


def test_rag_draws_from_a_pool_that_is_larger_than_a_prompt(corpus: Corpus) -> None:
    load = make(corpus, "rag", 40)
    library = [tuple(passage) for passage in corpus.passages(8, 200)]
    orders = {
        tuple(sorted((_find(one.prompt, passage), i) for i, passage in enumerate(library)))
        for one in load.requests
    }
    drawn = [[i for at, i in order if at >= 0] for order in orders]
    assert {len(one) for one in drawn} == {4}
    assert {i for one in drawn for i in one} == set(range(8))
    assert len({tuple(one) for one in drawn}) > 30


def _find(prompt: tuple[int, ...], passage: tuple[int, ...]) -> int:
    places = range(len(prompt) - len(passage) + 1)
    return next((i for i in places if prompt[i : i + len(passage)] == passage), -1)


def test_agents_grow(corpus: Corpus) -> None:
    load = make(corpus, "agent:sessions=2,steps=3,trimmed=0", 6)
    lengths = [len(one.prompt) for one in load.requests]
    assert lengths == [468, 468, 734, 734, 1000, 1000]
    assert [one.reusable_tokens > 0 for one in load.requests] == [False] * 2 + [True] * 4


def test_the_corpus_goes_on_where_its_text_ends(corpus: Corpus) -> None:
    many = corpus.passages(80, 100)
    assert corpus.passages(80, 100) == many
    assert {len(passage) for passage in many} == {100}
    assert len({tuple(passage) for passage in many}) == 80
    assert (
        list(itertools.chain(*many))[: len(corpus.text) // 100 * 100]
        == corpus.text[: len(corpus.text) // 100 * 100]
    )


def test_an_azure_trace(corpus: Corpus) -> None:
    assert list(load_trace(corpus.data, "azure_llm_2023_conv")) == [
        TraceRequest(0.0, 480, 10),
        TraceRequest(0.5, 318, 8),
        TraceRequest(10.0, 11, 27),
    ]
    load = make(corpus, "trace:speed=2,max_tokens=400,scale=0.5,seconds=4,max_output_tokens=9")
    assert [(one.due_s, len(one.prompt), one.output_tokens) for one in load.requests] == [
        (0.0, 240, 9),
        (0.25, 159, 8),
    ]


def test_a_mooncake_trace_repeats_its_blocks(corpus: Corpus) -> None:
    source = list(load_trace(corpus.data, "mooncake_conversation_trace"))
    assert source[1] == TraceRequest(2.0, 1100, 900, (0, 1, 3))
    load = make(corpus, "trace:name=mooncake_conversation_trace,max_tokens=1200")
    first, second, third = (one.prompt for one in load.requests)
    assert len(first) == 1200
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:1100]
    # The same block at another place, which KVShare finds as well.
    assert third[512:] == second[512:700]
    assert [one.reusable_tokens for one in load.requests] == [0, 1024, 188]
    skipped = make(corpus, "trace:name=mooncake_conversation_trace,skip=1")
    assert [one.due_s for one in skipped.requests] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rg", "unknown workload 'rg': did you mean 'rag'"),
        ("rag:shares=1", "unknown option of workload rag 'shares': did you mean 'share'"),
        ("rag:prompt_tokens=many", "'many' is no int"),
        ("rag:share=1", "share=1: must be at least 0 and below 1"),
        ("rag:share=-0.1", "share=-0.1: must be"),
        ("rag:pool=0.5", "pool=0.5: must be at least 1"),
        ("rag:prompt_tokens=0", "prompt_tokens=0"),
        ("agent:tool_share=0.999", "new_tokens"),
        ("support:articles=0", "articles=0"),
        ("shared_prefix:prefixes=0", "prefixes=0"),
        ("trace:name=nothing", "unknown trace 'nothing': allowed are azure"),
        (
            "trace:name=azure_llm_2023_code",
            "are the files AzureLLMInferenceTrace_code.csv",
        ),
        ("trace:speed=0", "must be above 0"),
        ("trace:skip=99", "no request after the first 99"),
    ],
)
def test_what_cannot_be_made_is_said(corpus: Corpus, text: str, message: str) -> None:
    with pytest.raises(EvalError, match=message.replace("[", r"\[")):
        make(corpus, text)


def test_a_trace_needs_a_folder_and_its_own_format(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="in a data folder"):
        load_trace(DataSource(), "azure_llm_2023_conv")
    (tmp_path / "azure_llm_2023_conv.csv").write_text("a,b\n1,2\n")
    with pytest.raises(EvalError, match="TIMESTAMP"):
        list(load_trace(DataSource(folder=tmp_path), "azure_llm_2023_conv"))


def test_all_workloads_are_there() -> None:
    names = ["agent", "no_reuse", "rag", "shared_prefix", "support", "trace"]
    assert list(workloads()) == names
    assert [name for name, one in workloads().items() if one.arrivals] == ["trace"]


@pytest.mark.parametrize(
    ("config", "dtype", "wanted"),
    [
        # SmolLM2-135M: 30 layers, 3 KV heads of 64.
        (
            {"num_hidden_layers": 30, "num_key_value_heads": 3, "hidden_size": 576,
             "num_attention_heads": 9, "torch_dtype": "bfloat16"},
            "auto",
            30 * 2 * 3 * 64 * 2,
        ),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}, "float32", 512),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}, "fp8_e4m3", 128),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}, "auto", None),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8,
                          "dtype": "float16"}}, "auto", 32),
    ],
)  # fmt: skip
def test_kv_bytes(tmp_path: Path, config: dict[str, Any], dtype: str, wanted: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(str(tmp_path), dtype) == wanted
    assert kv_bytes_per_token("some/hub-name", dtype) is None

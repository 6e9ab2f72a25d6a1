"""A sentence model's sketches: of which text, of which model, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.engine.embedder import (
    EmbeddingSketcher,
    check_embedder,
    load_embedder,
)
from sglang_kvshare.engine.similar_donors import similar_donors
from sglang_kvshare.engine.support import Unsupported
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.semantic_index import SemanticIndex, SimilaritySettings
from sglang_kvshare.matching.sketch import Sketcher, TokenRarity, Windows, windows_of

pytestmark = pytest.mark.unit

WORDS = 60
VOCABULARY = {f"w{number}": number for number in range(WORDS)} | {"[PAD]": 60, "[UNK]": 61}
SPECIAL = VOCABULARY["[PAD]"]
SIZE = 8
REMEDY = "pip install 'sglang-kvshare[embedder]'"


def tokenizer():
    made = Tokenizer(WordLevel(VOCABULARY, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


class MeanPooled:
    """A small BERT, and the mean of its last layer over what is no padding."""

    max_seq_length = 64

    def __init__(self):
        torch.manual_seed(5)
        self.tokenizer = tokenizer()
        self.model = BertModel(
            BertConfig(
                vocab_size=len(VOCABULARY),
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                pad_token_id=SPECIAL,
                max_position_embeddings=64,
            ),
            add_pooling_layer=False,
        ).eval()
        self.texts: list[list[str]] = []
        self.threads: list[int] = []

    def parameters(self):
        return self.model.parameters()

    def encode(self, sentences, **options):
        self.texts.append(sentences)
        self.threads.append(torch.get_num_threads())
        batch = self.tokenizer(sentences, padding=True, return_tensors="pt")
        with torch.inference_mode():
            rows = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"][:, :, None]
        return ((rows * mask).sum(1) / mask.sum(1)).numpy()

    def write(self, folder):
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return str(folder)


@pytest.fixture(scope="module")
def bert():
    return MeanPooled()


def sketcher(model, size=SIZE):
    return EmbeddingSketcher(model, tokenizer(), size_tokens=size)


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, WORDS, count)


def text_of(part):
    return " ".join(f"w{token}" for token in part.tolist())


def cosine(rows, others):
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    return (rows * others).sum(1) / lengths


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 40, 43])
def test_a_sketch_is_the_embedding_of_the_text_of_its_window(bert, count):
    ids = tokens(count)
    windows, sketches = sketcher(bert).sketch(ids, TokenRarity())
    expected = windows_of(count, SIZE)
    assert windows.start.tolist() == expected.start.tolist()
    assert windows.end.tolist() == expected.end.tolist()
    assert sketches.shape == (len(windows), 24)
    assert sketches.dtype == np.float32
    assert np.linalg.norm(sketches, axis=1) == pytest.approx(1, abs=1e-5)
    for row, start, end in zip(sketches, windows.start, windows.end, strict=True):
        alone = bert.encode([text_of(ids[start:end])])
        assert cosine(row[None], alone) == pytest.approx(1, abs=1e-5)


def test_all_windows_go_through_the_model_at_once_and_only_those_that_are_wanted(bert):
    ids, made = tokens(40), sketcher(bert)
    every, sketches = made.sketch(ids, TokenRarity())
    bert.texts.clear()
    wanted = np.arange(len(every)) % 3 == 1
    some, again = made.sketch(ids, TokenRarity(), every.only(wanted))
    [asked] = bert.texts
    assert asked == [text_of(ids[a:b]) for a, b in zip(some.start, some.end, strict=True)]
    assert some.start.tolist() == every.start[wanted].tolist()
    np.testing.assert_allclose(again, sketches[wanted], atol=1e-5)
    # The same question, the same answer, to the last bit.
    assert (made.sketch(ids, TokenRarity())[1] == sketches).all()
    bert.texts.clear()
    nothing = made.sketch(ids, TokenRarity(), Windows(some.start[:0], some.end[:0]))
    assert (len(nothing[0]), nothing[1].shape, bert.texts) == (0, (0, 24), [])


def test_windows_without_text_are_left_out(bert):
    ids = tokens(24)
    ids[:8] = SPECIAL
    windows, sketches = sketcher(bert).sketch(ids, TokenRarity())
    assert windows.start.tolist() == windows_of(24, SIZE).start.tolist()[1:]
    assert len(sketches) == len(windows)
    # Some special tokens are left out of the text, and no window with them.
    half = bert.encode([text_of(ids[8:12])])
    assert cosine(sketches[:1], half) == pytest.approx(1, abs=1e-5)


def test_it_runs_in_one_thread_and_gives_the_others_back(bert, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        made = sketcher(bert)
        bert.threads.clear()
        made.sketch(tokens(9), TokenRarity())
        assert bert.threads == [1]
        assert torch.get_num_threads() == 3

        def fail(sentences, **options):
            raise RuntimeError("injected")

        monkeypatch.setattr(bert, "encode", fail)
        with pytest.raises(RuntimeError, match="injected"):
            made.sketch(tokens(9), TokenRarity())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_values_that_are_not_finite_are_an_error(bert, monkeypatch):
    made, encode = sketcher(bert), bert.encode
    monkeypatch.setattr(bert, "encode", lambda sentences, **options: encode(sentences) * np.nan)
    with pytest.raises(ValueError, match="not finite"):
        made.sketch(tokens(9), TokenRarity())


def test_similar_donors_are_found_with_it(bert):
    """And each text's own donor is the nearest, of a random model too."""
    runs = RunIndex(2048, 16)
    similar = SemanticIndex(
        runs, sketcher(bert, 16), SimilaritySettings(min_similarity=0.5, donors=1)
    )
    texts = [tokens(48, seed) for seed in range(12)]
    for number, text in enumerate(texts):
        slots = np.arange(number * 48, number * 48 + 48)
        runs.insert(number, b"a", text, slots, -1, position=0)
        similar.insert(b"a", text, slots)
    right = 0
    for number, text in enumerate(texts):
        changed = text.copy()
        changed[5::10] = (changed[5::10] + 1) % WORDS
        for span in similar.find(changed, b"a", np.zeros(48, dtype=np.bool_)):
            assert (changed[span.start : span.end] == text_at(texts, span.slots)).all()
            right += int(span.slots[0] // 48 == number) * span.length
    assert right > 0.6 * 12 * 48
    assert similar.find(texts[0], b"b", np.zeros(48, dtype=np.bool_)) == []


@pytest.mark.parametrize(("wanted", "gate"), [(0.0, (0.6, 0.7)), (0.25, (0.25, 0.25))])
def test_the_gate_is_what_suits_the_sketches_unless_one_is_wanted(bert, wanted, gate):
    config, runs = KVShareConfig(min_similarity=wanted), RunIndex(64, 16)
    for made, expected in zip((Sketcher(np.eye(8)), sketcher(bert)), gate, strict=True):
        similar = similar_donors(runs, config, made, pytest.fail)
        assert similar.settings.min_similarity == expected


def text_at(texts, slots):
    return np.concatenate(texts)[slots]


# --- what is loaded, and what is refused ----------------------------------------------------------


def test_without_the_extra_the_start_is_refused_in_one_sentence(monkeypatch):
    check_embedder("")
    monkeypatch.setattr("sglang_kvshare.engine.embedder.PACKAGE", "no_such_package")
    check_embedder("")
    for refuse in (check_embedder, lambda name: load_embedder(name, tokenizer(), SIZE)):
        with pytest.raises(Unsupported) as refusal:
            refuse("all-MiniLM-L6-v2")
        assert str(refusal.value) == (
            f"embedder='all-MiniLM-L6-v2' needs a package that is missing: {REMEDY}"
        )


@pytest.mark.parametrize("name", ["/no/such/folder", "./no-such-folder", "~/no-such-folder"])
def test_a_folder_that_is_not_there_is_refused_before_anything_is_loaded(name, monkeypatch):
    monkeypatch.setattr("sglang_kvshare.engine.embedder.PACKAGE", "numpy")
    with pytest.raises(Unsupported, match="is no folder: allowed are") as refusal:
        check_embedder(name)
    assert f"embedder={name!r}" in str(refusal.value)
    assert REMEDY in str(refusal.value)


def test_a_folder_that_is_there_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr("sglang_kvshare.engine.embedder.PACKAGE", "numpy")
    check_embedder(str(tmp_path))


def test_a_package_that_cannot_be_imported_is_refused_too(monkeypatch, tmp_path):
    monkeypatch.setattr("sglang_kvshare.engine.embedder.PACKAGE", "numpy")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(Unsupported, match="cannot be loaded as a sentence model") as refusal:
        load_embedder(str(tmp_path), tokenizer(), SIZE)
    assert REMEDY in str(refusal.value)


def extra():
    pytest.importorskip("sentence_transformers", reason=f"the extra is not installed: {REMEDY}")


def test_a_folder_is_loaded_with_sentence_transformers(bert, tmp_path):
    extra()
    folder = bert.write(tmp_path)
    before = torch.get_rng_state()
    made = load_embedder(folder, tokenizer(), SIZE)
    assert (torch.get_rng_state() == before).all(), "the server's samples are what they were"
    assert made.dims == 24
    # The pooler that the folder lacks is drawn at random, and nobody asks it.
    drawn = 4 * (24 * 24 + 24)
    assert made.nbytes == sum(weight.nbytes for weight in bert.parameters()) + drawn
    ids = tokens(43)
    windows, sketches = made.sketch(ids, TokenRarity())
    expected, mine = sketcher(bert).sketch(ids, TokenRarity())
    assert windows.start.tolist() == expected.start.tolist()
    np.testing.assert_allclose(sketches, mine, atol=1e-4)
    other = load_embedder(folder, tokenizer(), SIZE).sketch(ids, TokenRarity())[1]
    assert (other == sketches).all(), "as on another rank"


def test_what_is_no_sentence_model_is_refused(bert, tmp_path, monkeypatch):
    extra()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), "no-such-name-of-a-model"):
        with pytest.raises(Unsupported) as refusal:
            load_embedder(name, tokenizer(), SIZE)
        assert str(refusal.value).startswith(f"embedder={name!r} cannot be loaded as")
        assert REMEDY in str(refusal.value)
        assert "\n" not in str(refusal.value)
    folder = bert.write(tmp_path / "bert")
    with pytest.raises(Unsupported, match="reads 64 tokens at most: sketch_tokens=65 is more"):
        load_embedder(folder, tokenizer(), 65)
    with pytest.raises(Unsupported, match="skip-tokenizer-init"):
        load_embedder(folder, None, SIZE)
    load_embedder(folder, tokenizer(), 64)

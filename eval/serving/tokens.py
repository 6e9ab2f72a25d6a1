"""Token ids to make prompts of: passages of the repository, and text that nobody has ever sent."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kvshare_eval.errors import EvalError
from kvshare_eval.loaders import DataSource
from kvshare_eval.passages import load_passages


@dataclass(frozen=True)
class Corpus:
    """What stays the same over a run.

    Attributes:
        encode: text to token ids, without special tokens.
        vocabulary: number of token ids.
        data: where workloads find data sets.
    """

    encode: Callable[[str], Sequence[int]]
    vocabulary: int
    data: DataSource = field(default_factory=DataSource)

    @property
    def word_ids(self) -> range:
        """The word-like part: behind single bytes and special tokens, before the rare ones."""
        return range(min(1_000, self.vocabulary // 4), min(40_000, self.vocabulary * 4 // 5))

    @cached_property
    def text(self) -> list[int]:
        """The repository's passages, one after the other."""
        return [token for one in load_passages() for token in self.encode(one.text + "\n\n")]

    def passages(self, count: int, tokens: int) -> list[list[int]]:
        """The same pieces of equal length in every call; made of words where the text ends."""
        whole = len(self.text) // tokens if tokens else 0
        cut = [self.text[i * tokens : (i + 1) * tokens] for i in range(min(count, whole))]
        for index in range(len(cut), count):
            rng = random.Random(f"passage {index} of {tokens} tokens")
            cut.append(rng.choices(self.word_ids, k=tokens))
        return cut


class Tokens:
    """A source of prompts for one window: the same prompts for the same name.

    Args:
        corpus: the text.
        name: decides everything that is drawn; windows that must not repeat each other have
            different names.
    """

    def __init__(self, corpus: Corpus, name: str) -> None:
        self.corpus = corpus
        self.rng = random.Random(name)

    def new(self, count: int) -> list[int]:
        """Words at random: long runs of them stand in no other prompt."""
        return self.rng.choices(self.corpus.word_ids, k=count)

    def passages(self, count: int, tokens: int) -> list[list[int]]:
        return self.corpus.passages(count, tokens)

    def spread(self, pieces: Sequence[Sequence[int]], new_tokens: int) -> list[int]:
        """The pieces, new text before each of them and twice as much at the end."""
        gap = new_tokens // (len(pieces) + 2)
        prompt: list[int] = []
        for piece in pieces:
            prompt += self.new(gap)
            prompt += piece
        return prompt + self.new(new_tokens - gap * len(pieces))


def load_corpus(model: str, data: DataSource) -> Corpus:
    """With the tokenizer of a model folder or of a model on the hub.

    Raises:
        EvalError: there is no tokenizer that the ``tokenizers`` library reads.
    """
    # Not transformers: importing it takes many seconds, and nothing here needs a chat template.
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    try:
        reader = (
            Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(model)
        )
    except Exception as error:  # the library raises bare Exceptions
        raise EvalError(f"model {model}: no tokenizer.json that can be read: {error}") from None
    return Corpus(
        encode=lambda text: list(reader.encode(text, add_special_tokens=False).ids),
        vocabulary=reader.get_vocab_size(),
        data=data,
    )


def kv_bytes_per_token(model: str, kv_dtype: str) -> int | None:
    """Keys and values of all layers for one token, from the model's ``config.json``.

    Args:
        model: the model's folder; a hub name gives ``None``.
        kv_dtype: of the pool, as the server resolved it; ``auto`` is the model's own.
    """
    file = Path(model) / "config.json"
    if not file.exists():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    name = config.get("dtype") or config.get("torch_dtype") if kv_dtype == "auto" else kv_dtype
    size = next((size for part, size in _ITEM_BYTES.items() if part in str(name)), None)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    layers = config.get("num_hidden_layers")
    if size is None or not heads or not layers:
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * layers * heads * head_dim * size)


_ITEM_BYTES = {"fp8": 1, "float8": 1, "bfloat16": 2, "bf16": 2, "float16": 2, "float32": 4}

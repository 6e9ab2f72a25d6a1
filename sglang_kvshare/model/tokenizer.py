"""From a GGUF file's vocabulary to `tokenizer.json`: the byte-level BPE of the SmolLM models."""

from typing import Any

from sglang_kvshare.model.errors import ModelError

# GGUF's token types that do not come out of merging bytes.
_CONTROL = 3
_USER_DEFINED = 4


def build_tokenizer(metadata: dict[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` that gives the ids of the file's vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(
            f"The GGUF file has a tokenizer of kind {kind[0]}/{kind[1]}; "
            "only gpt2/smollm can be converted."
        )
    if metadata.get("tokenizer.ggml.add_bos_token"):
        raise ModelError("The GGUF file's tokenizer adds a first token; it cannot be converted.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ModelError("The GGUF file's vocabulary holds a token twice.")
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]

    # No unknown token, as upstream: the few bytes that SmolLM's vocabulary lacks are dropped.
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """The ids of the begin, end and padding tokens, as far as the file names them."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {
        name: int(metadata[f"tokenizer.ggml.{key}_token_id"])
        for name, key in keys.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json`, with the chat template."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # The general class: it takes `tokenizer.json` as it is, in any version of transformers.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(metadata["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for name, index in special_ids(metadata).items():
        config[name.removesuffix("_id")] = tokens[index]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is not None:
        config["unk_token"] = tokens[unknown]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config

"""A stand-in for SGLang with KVShare whose model is a toy that a test can work out itself."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from serving_stub import Stub

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
END = 0
#: What the tokens that the toy says read like; the first one ends an answer and has no text.
PIECES = ("", " blue", " 7", " the", " river", " 12", "\n", " stone", " of", " no", " 3", " red")


@dataclass(frozen=True)
class Toy:
    """The next token's distribution is a function of the whole sequence, drawn by its checksum.

    Attributes:
        seed: another seed, another model.
        end: added to the logit of the token that ends an answer.
        shift: how far reuse without repair moves the logits.
    """

    seed: int = 0
    end: float = 1.0
    shift: float = 1.5

    def logprobs(self, ids: Sequence[int], disturbed: float = 0.0) -> list[float]:
        """Of every token, after ``ids``; ``disturbed`` is the share that was not recomputed."""
        draw = np.random.default_rng([self.seed, zlib.crc32(repr(list(ids)).encode())])
        logits = 2 * draw.normal(size=len(PIECES))
        logits[END] += self.end
        logits += disturbed * self.shift * draw.normal(size=len(PIECES))
        return [float(x) for x in logits - np.log(np.exp(logits).sum())]

    def greedy(
        self, ids: Sequence[int], longest: int, stop: Sequence[str] = (), disturbed: float = 0.0
    ) -> tuple[list[int], str]:
        """Tokens, with the one that ended it, and the text, without it and without a stop text."""
        answer: list[int] = []
        while len(answer) < longest:
            told = self.logprobs([*ids, *answer], disturbed)
            answer.append(told.index(max(told)))
            text = "".join(PIECES[token] for token in answer)
            places = [text.index(each) for each in stop if each in text]
            if places:
                return answer, text[: min(places)]
            if answer[-1] == END:
                break
        return answer, "".join(PIECES[token] for token in answer)


@dataclass
class ToyServer(Stub):
    """Answers ``/generate`` as SGLang with KVShare does, all requests at once.

    Attributes:
        toy: the model.
        delay_s: how long each request takes.
        lives: answers that it gives before it dies; ``None`` for an unlimited number.
        published: prompts that stay in the cache, by salt.
        most_in_flight: requests at the same time.
        server_info: what ``/server_info`` says.
        headers: of the last request.
        reply: replaces what is answered, if it is set.
    """

    toy: Toy = field(default_factory=Toy)
    lives: int | None = None
    published: dict[str | None, list[list[int]]] = field(default_factory=dict)
    most_in_flight: int = 0
    server_info: dict[str, Any] = field(
        default_factory=lambda: {
            "version": "0.5.23",
            "dtype": "float32",
            "served_model_name": "/secret/place/toy",
            "max_total_num_tokens": 4096,
            "host": "secret-host",
        }
    )
    headers: dict[str, str] = field(default_factory=dict)
    reply: web.Response | None = None
    _in_flight: int = 0

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.server_info)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.headers = dict(request.headers)
        if self.lives is not None:
            if self.lives == 0:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            self.lives -= 1
        self.bodies.append(body)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            if self.reply is not None:
                return web.Response(text=self.reply.text, status=self.reply.status)
            return self._answer(body)
        finally:
            self._in_flight -= 1

    def _answer(self, body: dict[str, Any]) -> web.Response:
        ids, sampling = body["input_ids"], body["sampling_params"]
        wanted = sampling.get("custom_params", {}).get("kvshare", {})
        if wanted.get("selector", "seams") != "seams":
            said = f"selector: {wanted['selector']!r} is unknown; allowed are seams"
            return web.json_response({"error": {"message": said}}, status=400)
        start = body.get("logprob_start_len", len(ids))
        report = self._report(ids, start, body.get("cache_salt"), wanted)
        moved = report["reused_tokens"] > 0
        disturbed = 1 - wanted.get("recompute_ratio", 0) if moved else 0.0
        answer, text = self.toy.greedy(
            ids, sampling["max_new_tokens"], sampling.get("stop", ()), disturbed
        )
        if wanted.get("publish", True):
            self.published.setdefault(body.get("cache_salt"), []).append(ids)
        ended = {"type": "stop" if answer[-1] == END else "length"}
        meta: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": len(answer)}
        meta |= {"finish_reason": ended, "cached_tokens": report["prefix_tokens"]}
        meta["cached_tokens_details"] = {"device": report["prefix_tokens"], "kvshare": report}
        if body.get("return_logprob"):
            whole = [*ids, *answer]
            for side, places in (
                ("input", range(start, len(ids))),
                ("output", range(len(ids), len(whole))),
            ):
                told = [self.toy.logprobs(whole[:place], disturbed) for place in places]
                meta |= self._logprobs(side, told, whole[places.start : places.stop], body)
        return web.json_response({"text": text, "output_ids": answer, "meta_info": meta})

    @staticmethod
    def _logprobs(
        side: str, told: list[list[float]], tokens: list[int], body: dict[str, Any]
    ) -> dict[str, Any]:
        def top(step: list[float]) -> list[list[Any]]:
            order = sorted(range(len(step)), key=lambda token: -step[token])
            return [[step[token], token, None] for token in order[: body["top_logprobs_num"]]]

        def of(step: list[float]) -> list[list[Any]]:
            return [[step[token], token, None] for token in body.get("token_ids_logprob") or ()]

        # The prompt's own tokens need not be among those that the toy can say.
        chosen: list[list[Any]] = [
            [step[token] if token < len(step) else -math.inf, token, None]
            for step, token in zip(told, tokens, strict=True)
        ]
        tops: list[Any] = [top(step) for step in told]
        named: list[Any] = [of(step) for step in told]
        if side == "input" and told:
            # SGLang tells nothing of the first one: what precedes it is not looked at.
            chosen[0][0], tops[0], named[0] = None, None, None
        return {
            f"{side}_token_logprobs": chosen,
            f"{side}_top_logprobs": tops,
            f"{side}_token_ids_logprobs": named,
        }

    def _report(
        self, ids: list[int], start: int, salt: str | None, wanted: dict[str, Any]
    ) -> dict[str, Any]:
        reuse = wanted.get("reuse", "approximate")
        donors = self.published.get(salt, []) if reuse != "off" else []
        limit = min(start, len(ids) - 1)
        prefix = max((_common(ids, donor, limit) for donor in donors), default=0)
        matched = 0
        if reuse == "approximate" and (start >= len(ids) or wanted.get("approximate_logprobs")):
            held = {token for donor in donors for token in donor}
            matched = sum(token in held for token in ids[prefix:limit])
        recomputed = round(matched * wanted.get("recompute_ratio", 0))
        return {
            "prefix_tokens": prefix,
            "reused_tokens": matched - recomputed,
            "recomputed_tokens": recomputed,
            "new_tokens": len(ids) - prefix - matched,
            "donors": int(matched > 0),
            "decision": "reuse" if matched else "none",
            "reason": "ok" if matched else reuse,
        }


def make_tokenizer(folder: Path, chat_template: str | None) -> Any:
    """A small BPE tokenizer of real text, in a folder as a model has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from kvshare_eval.passages import load_passages

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<system>", "<user>", "<assistant>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((passage.text for passage in load_passages()), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _common(ids: Sequence[int], donor: Sequence[int], limit: int) -> int:
    pairs = zip(ids[:limit], donor, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(limit, len(donor)))

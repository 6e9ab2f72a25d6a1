"""A server's answer against the reference, step by step along the server's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from reference import Reference, Row, spared_positions
from server import Answer, Server


def copy_of(row: Row) -> Row:
    """Decoding grows a row; the reference keeps the rows of donors."""
    return Row(list(row.tokens), list(row.keys), list(row.values), row.logits)


def largest_difference(
    answer: Answer, reference: Reference, row: Row, refresh: Sequence[Sequence[int]] = ()
) -> float:
    """Of the log-probabilities that the server gave (its best 20 at every step).

    Also checks that the server chose the best token, but for ties. ``refresh``: positions that are
    recomputed beside each decoded token.
    """
    row = copy_of(row)
    worst = 0.0
    assert answer.ids
    steps = zip(answer.ids, answer.logprobs, answer.top, strict=True)
    for number, (token, chosen, top) in enumerate(steps):
        expected = row.logprobs()
        assert top[token] == chosen
        worst = max(worst, *(abs(float(expected[i]) - value) for i, value in top.items()))
        assert float(expected[token]) >= float(expected.max()) - 2e-3
        reference.decode(row, token, refresh[number] if number < len(refresh) else ())
    return worst


def difference(one: Answer, other: Answer) -> float:
    """Largest difference of the chosen tokens' log-probabilities; the tokens must be the same."""
    assert one.ids == other.ids
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def expected_spared(server: Server, matches, prompt_tokens: int, ratio: float | None):
    """What the server's own flags say about which rows are spared."""
    flag = server.config.flag
    return spared_positions(
        matches,
        prompt_tokens,
        ratio=flag("--kvshare-recompute-ratio", 0.05) if ratio is None else ratio,
        seam_tokens=flag("--kvshare-seam-tokens", 8),
        tail_tokens=flag("--kvshare-tail-tokens", 8),
    )


def narrow_layer(server: Server) -> int:
    return server.config.flag("--kvshare-narrow-layer", 0)

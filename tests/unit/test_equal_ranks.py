"""Two ranks that saw the same requests plan the same, whatever their hash seeds are.

A rank is a process of its own; what it plans is written out and compared.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_kvshare.matching.gaps import GapSettings
from sglang_kvshare.matching.planner import Behind, plan_reuse
from sglang_kvshare.matching.reuse_edges import ReuseEdges
from sglang_kvshare.matching.run_index import RunIndex
from sglang_kvshare.matching.semantic_index import SemanticIndex, SimilaritySettings
from sglang_kvshare.matching.sketch import Sketcher

pytestmark = pytest.mark.unit

POOL, VOCABULARY = 6_000, 400
NAMESPACES = (b"a", b"b", b"published")
ANCHORS = (900_000, 900_001)


def plans(seed: int, swapped: int = -1) -> list[str]:
    """Every plan of a rank's life as a line.

    Args:
        swapped: the step at which this rank, unlike the others, loses some donors.
    """
    random = np.random.default_rng(seed)
    runs = RunIndex(POOL, 8)
    table = np.random.default_rng(7).standard_normal((VOCABULARY, 24)).astype(np.float32)
    similar = SemanticIndex(
        runs, Sketcher(table, size_tokens=16, dims=16), SimilaritySettings(min_similarity=0.3)
    )
    edges = ReuseEdges(runs, 64)
    passages = [random.integers(0, VOCABULARY, random.integers(20, 90)) for _ in range(12)]
    free, cached, told, before = list(range(POOL)), [], [], []

    def text() -> np.ndarray:
        parts = [random.integers(0, VOCABULARY, random.integers(0, 9))]
        for number in random.choice(len(passages), random.integers(1, 4)):
            passage = passages[int(number)].copy()
            edits = random.random(passage.shape[0]) < 0.03
            passage[edits] = random.integers(0, VOCABULARY, int(edits.sum()))
            parts += [passage, random.integers(0, VOCABULARY, random.integers(0, 5))]
        return np.concatenate(parts)

    def leave(slots: np.ndarray) -> None:
        similar.remove(slots)
        runs.remove(slots)
        edges.slots_gone(slots)

    for step in range(120):
        namespace = NAMESPACES[int(random.choice(3, p=(0.6, 0.25, 0.15)))]
        tokens = text()
        while len(free) < tokens.shape[0]:
            oldest = cached.pop(0)
            leave(oldest)
            free += oldest.tolist()
        slots = np.array(free[: tokens.shape[0]])
        del free[: tokens.shape[0]]
        runs.insert(step, namespace, tokens, slots, -1)
        similar.insert(namespace, tokens, slots)
        cached.append(slots)
        if step == swapped:
            leave(np.concatenate(cached[-8:]))
        asked = NAMESPACES[int(random.integers(2))]
        anchor, prompt = ANCHORS[int(random.integers(2))], text()
        if before and random.random() < 0.4:
            asked, anchor, prompt = before[int(random.integers(len(before)))]
        before.append((asked, anchor, prompt))
        plan = plan_reuse(
            runs,
            np.append(prompt, 1),
            0,
            asked,
            8,
            similar=similar,
            behind=Behind(edges, anchor),
            gaps=GapSettings(),
            shared=(b"published",),
        )
        edges.used(anchor, asked, plan.spans)
        spans = [(s.start, s.source, s.slots.tolist(), s.kind, s.continues) for s in plan.spans]
        told.append(f"{plan.edge_tokens} {spans}")
    return told


def digest(told: list[str]) -> str:
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def of_a_rank(hash_seed: int, swapped: int = -1) -> str:
    here = Path(__file__).parent
    code = f"import test_equal_ranks as t; print(t.digest(t.plans(3, {swapped})))"
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(here)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def test_ranks_with_one_history_make_equal_plans():
    told = plans(3)
    assert sum(line.count("exact_run") for line in told) > 50
    assert sum(line.count("semantic") for line in told) > 50
    assert sum(not line.startswith("0 ") for line in told) > 5, "edges were asked"
    assert of_a_rank(1) == of_a_rank(2) == digest(told)


def test_a_rank_that_lost_donors_is_found_out():
    """The control: the comparison sees a few sequences less."""
    assert of_a_rank(1, swapped=60) != of_a_rank(1)

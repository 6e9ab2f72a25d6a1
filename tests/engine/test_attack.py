"""One tenant probes another's text, by every figure that it is told and by time: it guesses."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest, mannwhitneyu

from kvshare_eval.live.process import in_a_process

pytestmark = pytest.mark.engine

#: A pure guesser is taken for an attacker once in so many runs.
CHANCE = 1e-3


@pytest.fixture(scope="module")
def attacks(tmp_path_factory):
    return in_a_process(run, "attacks", tmp_path_factory.mktemp("attacks"))


def run(name, folder):
    import attack

    return getattr(attack, name)(folder)


ATTACKS = ("by_counters", "token_by_token", "by_time")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_strangers_success_is_that_of_guessing(attacks, attack):
    guesses = attacks[attack]["mallory"]
    assert guesses.asked >= 30
    assert binomtest(guesses.right, guesses.asked).pvalue > CHANCE, guesses
    # Whatever it asks, it is told the same: nothing in it depends on what others have cached.
    for question, told in guesses.told.items():
        assert len(told) == 1, (question, told)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_same_attack_succeeds_where_reuse_is_shared(attacks, attack):
    """The positive control: inside the victim's own namespace."""
    guesses = attacks[attack]["alice"]
    assert guesses.right >= 0.9 * guesses.asked, guesses
    assert binomtest(guesses.right, guesses.asked).pvalue < 1e-6
    assert any(len(told) > 1 for told in guesses.told.values())


def test_every_probe_of_the_control_tells_the_texts_apart(attacks):
    """So that no kind of probe is there for nothing: prefixes, runs and similar donors."""
    told = attacks["by_counters"]["alice"].told
    assert len(told) == 6
    for question, figures in told.items():
        assert len(figures) > 1, question


def test_time_tells_a_stranger_nothing(attacks):
    right, wrong = attacks["by_time"]["mallory"].seconds
    assert mannwhitneyu(right, wrong).pvalue > CHANCE
    right, wrong = attacks["by_time"]["alice"].seconds
    assert mannwhitneyu(right, wrong).pvalue < 1e-6


def test_anothers_hits_move_no_request(attacks):
    without, with_hits = attacks["order"]
    assert without == with_hits == ["mallory", "alice"]


def test_what_one_tenant_has_measured_decides_for_no_other(tmp_path):
    told = in_a_process(run, "gates", tmp_path)
    assert told["known"] == {"alice": True, "mallory": False, "pat": False}
    assert told["before"] == told["after"]

"""Lengths of answers in the scheduler process: bounds, faults, the file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_kvshare.scheduling.jobs import Waiting
from sglang_kvshare.scheduling.length_estimate import LengthEstimator

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("sglang_cpu")]


class Prompts:
    def __init__(self, told=(), fails=False):
        self.told, self.fails, self.added = told, fails, []

    def neighbours(self, namespace, prompt):
        if self.fails:
            raise RuntimeError("broken")
        return self.told

    def add(self, namespace, prompt, tokens, tenant):
        self.added.append((namespace, len(prompt), tokens, tenant))


def request(prompt=50, output=0, most=400, ignore_eos=False):
    params = SimpleNamespace(max_new_tokens=most, ignore_eos=ignore_eos)
    return SimpleNamespace(
        origin_input_ids=list(range(prompt)), output_ids=[1] * output, sampling_params=params
    )


def job(namespace=b"a"):
    from sglang_kvshare.engine.schedule import Job

    return Job(None, Waiting("r", 1, 0.0, 50, namespace=namespace))


def lengths(prompts=None, path=None, estimator=None, faults=None):
    from sglang_kvshare.engine.lengths import Lengths

    on_fault = (lambda step: None) if faults is None else faults.append
    estimator = LengthEstimator() if estimator is None else estimator
    return Lengths(estimator, prompts, (0.95, 0.001), path, on_fault)


def read(path):
    from sglang_kvshare.engine.lengths import read_estimator

    return read_estimator(path, isolated=False)


def learn(told, answers, namespace=b"a"):
    for tokens in answers:
        each = job(namespace)
        told.left_tokens(request(), each, 0.0)
        told.answered(request(output=tokens), each, None)


def test_a_bound_follows_the_answers_and_is_never_below_one_token():
    told = lengths()
    first = told.left_tokens(request(), job(), 0.0)
    assert first == 400
    learn(told, [20, 22, 19, 21] * 10)
    each = job()
    assert 20 <= told.left_tokens(request(), each, 0.0) <= 40
    # What outgrows its bound gets another one, up to its own limit.
    assert 1 <= told.left_tokens(request(output=60), each, 0.0) <= 340
    assert told.left_tokens(request(output=400), each, 0.0) == 1
    assert told.left_tokens(request(output=5, ignore_eos=True), each, 0.0) == 395


def test_a_bound_is_renewed_before_it_is_reached():
    told = lengths()
    learn(told, [80] + [20, 22, 19, 21] * 15)
    each = job()
    bound = told.left_tokens(request(), each, 0.0, 2)
    upper = each.estimate.upper_tokens
    assert bound == upper < 80
    assert told.left_tokens(request(output=upper - 3), each, 0.0, 2) == 3
    # The one that got as far went on to 80.
    assert told.left_tokens(request(output=upper - 2), each, 0.0, 2) > 40
    # The control: without looking ahead the old bound holds to its end.
    assert told.left_tokens(request(output=upper - 2), each, 0.0) == 2


def test_what_is_expected_is_no_more_than_the_bound():
    told = lengths()
    learn(told, [20, 40, 60, 80] * 10)
    each = job()
    bound = told.left_tokens(request(), each, 0.0)
    assert 1 <= told.expected_left_tokens(request(), each) <= bound
    assert told.expected_left_tokens(request(output=399), each) == 1
    assert told.expected_left_tokens(request(output=10), job()) == 390


def test_less_is_reserved_at_a_high_rate():
    told = lengths()
    learn(told, list(range(10, 210)))
    idle, busy = (told.left_tokens(request(), job(), rate) for rate in (0.0, 900.0))
    assert busy < idle


def test_similar_prompts_are_asked_and_given_up_after_a_fault():
    prompts, faults = Prompts(told=(7, 7, 7)), []
    told = lengths(prompts, faults=faults)
    each = job()
    told.left_tokens(request(), each, 0.0)
    assert each.asked.neighbours == (7, 7, 7)
    told.answered(request(output=9), each, "alice")
    assert prompts.added == [(b"a", 50, 9, "alice")]
    prompts.fails = True
    each = job()
    assert told.left_tokens(request(), each, 0.0) > 0
    told.left_tokens(request(), job(), 0.0)
    assert faults == ["lengths"]


def test_what_was_learnt_outlives_a_restart(tmp_path):
    path = tmp_path / "lengths.json"
    told = lengths(path=path)
    told.save_when_due(0.0)
    assert not path.exists()
    learn(told, [20, 22, 19, 21] * 10)
    told.save_when_due(1.0)
    told.wait()
    bound = told.left_tokens(request(), job(), 0.0)
    learn(told, [300] * 40)
    # Once a minute.
    told.save_when_due(2.0)
    again = lengths(estimator=read(path))
    assert again.left_tokens(request(), job(), 0.0) == bound
    told.save_when_due(61_000.0)
    told.wait()
    again = lengths(estimator=read(path))
    assert again.left_tokens(request(), job(), 0.0) > bound
    assert [each.name for each in tmp_path.iterdir()] == ["lengths.json"]


@pytest.mark.parametrize("content", ["", "{}", '{"version": 99}', "[1]"])
def test_a_file_that_cannot_be_read_costs_what_it_knew(content, tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(content)
    told = lengths(estimator=read(path))
    assert told.left_tokens(request(), job(), 0.0) == 400


def test_a_file_that_cannot_be_written_is_no_trouble(tmp_path):
    told = lengths(path=tmp_path / "no" / "folder" / "lengths.json")
    learn(told, [20])
    told.save_when_due(1.0)
    told.wait()
    learn(told, [20])
    told.save_when_due(100_000.0)

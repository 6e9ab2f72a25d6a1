"""What a request may say, and the errors it gets."""

from __future__ import annotations

import pytest

from sglang_kvshare.config import KVShareConfig
from sglang_kvshare.request import (
    RequestError,
    RequestOptions,
    ReuseReport,
    parse_request_options,
)

pytestmark = pytest.mark.unit
CONFIG = KVShareConfig(reuse="exact_prefix", recompute_ratio=0.25)


def parse(**given):
    return parse_request_options({"kvshare": given}, CONFIG)


@pytest.mark.parametrize("params", [None, {}, {"kvshare": None}, {"kvshare": {}}, {"other": 1}])
def test_a_request_that_says_nothing_gets_the_server_defaults(params):
    assert parse_request_options(params, CONFIG) == RequestOptions(
        "exact_prefix", 0.25, CONFIG.selector
    )


def test_each_value_is_taken():
    assert parse(
        reuse="approximate", recompute_ratio=1, selector="seams", ttft_slo_ms=200, tbt_slo_ms=1.5
    ) == RequestOptions("approximate", 1.0, "seams", ttft_slo_ms=200.0, tbt_slo_ms=1.5)
    assert not parse(publish=False).publish
    assert parse(approximate_logprobs=True).approximate_logprobs
    assert parse(recompute_ratio=0).recompute_ratio == 0.0
    assert parse(check_layers=3).check_layers == "3"
    assert parse(check_layers="1, 4").check_layers == "1,4"
    assert parse(attention="check_layer").attention == "check_layer"
    assert parse(recompute_error=0.1, max_deviation=0.5).recompute_error == 0.1


def test_what_decides_over_quality_tells_branches_apart():
    """Values computed with other settings are another approximation."""
    plain = parse().quality
    for given in (
        {"selector": "dhd"},
        {"recompute_ratio": 0.3},
        {"recompute_error": 0.1},
        {"attention": "check_layer"},
        {"check_layers": 2},
        {"max_deviation": 0.5},
    ):
        assert parse(**given).quality != plain
    assert parse(publish=False, ttft_slo_ms=5).quality == plain


def test_whether_anything_may_be_spared():
    assert parse(recompute_ratio=0.3).spares
    assert not parse(recompute_ratio=1).spares
    assert parse(recompute_ratio=1, recompute_error=0.5).spares
    assert not parse(selector="all", recompute_ratio=0.3).spares
    assert parse(selector="none", recompute_ratio=1).spares


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reuse": "on"}, "reuse='on': allowed are off, exact_prefix, approximate"),
        ({"reuse": None}, "reuse=None: allowed are"),
        ({"selector": "best"}, "selector='best': allowed are all, contribution, "),
        ({"attention": "query"}, "attention='query': allowed are probe_pass, check_layer"),
        ({"check_layers": 0}, "check_layers=0: allowed are ascending layer numbers from 1 on"),
        ({"check_layers": [1, 2]}, "check_layers=[1, 2]: allowed are ascending layer numbers"),
        ({"recompute_error": 2}, "recompute_error=2: allowed are numbers from 0 to 1"),
        ({"max_deviation": -1}, "max_deviation=-1: allowed are numbers from 0 to inf"),
        ({"recompute_ratio": -0.1}, "recompute_ratio=-0.1: allowed are numbers from 0 to 1"),
        ({"recompute_ratio": 1.01}, "from 0 to 1"),
        ({"recompute_ratio": "0.5"}, "from 0 to 1"),
        ({"recompute_ratio": True}, "from 0 to 1"),
        ({"recompute_ratio": float("nan")}, "from 0 to 1"),
        ({"publish": 0}, "publish=0: allowed are true and false"),
        ({"approximate_logprobs": None}, "approximate_logprobs=None: allowed are true and false"),
        ({"ttft_slo_ms": 0}, "ttft_slo_ms=0: allowed are milliseconds above 0"),
        ({"tbt_slo_ms": float("inf")}, "milliseconds above 0"),
        ({"tbt_slo_ms": "fast"}, "milliseconds above 0"),
        ({"recompute_ration": 0.5}, "did you mean 'recompute_ratio'"),
    ],
)
def test_a_bad_value_names_the_field_and_what_is_allowed(given, message):
    with pytest.raises(RequestError) as error:
        parse(**given)
    assert message in str(error.value)
    assert "custom_params.kvshare." in str(error.value)


@pytest.mark.parametrize("value", [[], "off", 1, True])
def test_anything_but_an_object_is_refused(value):
    with pytest.raises(RequestError, match="must be an object"):
        parse_request_options({"kvshare": value}, CONFIG)


@pytest.mark.parametrize("value", ["off", ["kvshare"], 7, True])
def test_custom_params_that_are_no_object_are_refused(value):
    with pytest.raises(RequestError, match="custom_params must be an object"):
        parse_request_options(value, CONFIG)


def test_the_report_counts_the_whole_prompt_and_is_plain_data():
    report = ReuseReport(1, 2, 3, 4, decision="reuse", reason="ok", donors=1)
    assert report.prompt_tokens == 10
    assert set(report.to_dict()) == {
        "prefix_tokens",
        "reused_tokens",
        "recomputed_tokens",
        "new_tokens",
        "refreshed_tokens",
        "donors",
        "decision",
        "reason",
        "selector",
        "computed_rows",
    }

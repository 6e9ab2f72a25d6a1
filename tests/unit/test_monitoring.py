"""The files for Prometheus and Grafana: well-formed, and in step with the code and with SGLang."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from sglang_kvshare.engine.metrics import SERIES, SOURCES, STEPS, exported_names
from sglang_kvshare.request import REASONS

pytestmark = pytest.mark.unit
FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
METRIC = re.compile(r"\b(?:kvshare|sglang):\w+")


def read(name: str):
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((FOLDER / "dashboard.json").read_text())


@pytest.fixture(scope="module")
def dashboard_queries(dashboard):
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return queries + [
        variable["query"]["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]


@pytest.fixture(scope="module")
def rules():
    (group,) = read("alerts.yaml")["groups"]
    return group["rules"]


@pytest.fixture(scope="module")
def queries(dashboard_queries, rules):
    return dashboard_queries + [rule["expr"] for rule in rules]


def test_every_metric_asked_for_is_exported(queries):
    asked = {name for query in queries for name in METRIC.findall(query)}
    ours = {name for name in asked if name.startswith("kvshare:")}
    assert len(ours) > 10
    assert ours <= exported_names()
    package = importlib.util.find_spec("sglang").submodule_search_locations[0]
    collector = (Path(package) / "srt" / "observability" / "metrics_collector.py").read_text()
    theirs = {re.sub("_(bucket|sum|count)$", "", name) for name in asked - ours}
    assert theirs == {"sglang:time_to_first_token_seconds"}
    for name in theirs:
        assert f'"{name}"' in collector


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_every_exported_metric_is_on_the_dashboard(dashboard_queries, series):
    assert any(re.search(rf"{series.name}(_\w+)?\{{", query) for query in dashboard_queries)


def test_labels_that_are_asked_for_exist(queries):
    values = {
        "decision": {decision for reason in REASONS for decision in reason.decisions},
        "reason": {reason.name for reason in REASONS},
        "source": set(SOURCES),
        "step": set(STEPS),
    }
    selectors = [s for query in queries for s in re.findall(r"\{([^}]*)\}", query)]
    for name, operator, value in re.findall(r'(\w+)(=~?)"([^"]*)"', " ".join(selectors)):
        if name in values:
            wanted = value.split("|") if operator == "=~" else [value]
            assert set(wanted) <= values[name], (name, value)
        else:
            assert (name, operator) in {("instance", "=~"), ("model_name", "=~")}, name


def test_brackets_of_every_query_match(queries):
    for query in queries:
        bare = re.sub(r'"[^"]*"', "", query)
        for opening, closing in ("()", "[]", "{}"):
            assert bare.count(opening) == bare.count(closing), query


def test_panels_have_titles_explanations_and_places_of_their_own(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_compose_file_mounts_files_that_are_there_where_they_are_looked_for():
    services = read("compose.yaml")["services"]
    mounts = {}
    for service in services.values():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                assert (FOLDER / source).is_file(), source
                mounts[target] = source
    prometheus, grafana = services["prometheus"], services["grafana"]
    (config,) = (c for c in prometheus["command"] if c.startswith("--config.file="))
    assert mounts[config.partition("=")[2]] == "./prometheus.yaml"
    assert all(rule_file in mounts for rule_file in read("prometheus.yaml")["rule_files"])
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounts[home] == "./dashboard.json"
    (provider,) = read("grafana/dashboards.yaml")["providers"]
    assert Path(home).parent == Path(provider["options"]["path"])


def test_grafana_asks_the_prometheus_of_the_compose_file(dashboard):
    (source,) = read("grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (chosen,) = (v for v in dashboard["templating"]["list"] if v["type"] == "datasource")
    assert chosen["current"]["value"] == source["uid"]
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"


def test_each_alert_is_explained(rules):
    operating = (FOLDER.parents[1] / "docs" / "operating.md").read_text()
    named = re.findall(r"^\| `(KVShare\w+)` \|", operating, re.MULTILINE)
    assert named == [rule["alert"] for rule in rules]
    for rule in rules:
        assert rule["annotations"]["summary"]

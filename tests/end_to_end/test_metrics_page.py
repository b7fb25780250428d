"""What a live cluster publishes: the dashboard finds all it asks for, under load too, and the dead leave no series."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from live_cluster import LiveCluster, wait_until
from otlp_collector import Collector
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from twinpool.cluster.metrics import STAGES

DASHBOARD = json.loads((ROOT / "docs" / "dashboards" / "twinpool.json").read_text())
FAKE = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 64}}
OF_PROMETHEUS = {"job", "instance"}  # labels that it adds when it scrapes
FUNCTIONS = {"sum", "max", "rate", "histogram_quantile", "by"}
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}(\[[^\]]*\])?")
MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path, collector: Collector) -> Iterator[LiveCluster]:
    """Its router sends traces, too."""
    spec = {
        "prompt": {**FAKE, "num_workers": 1},
        "completion": FAKE,
        "router": {"otlp_endpoint": collector.url},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with LiveCluster(tiny_llama, spec) as cluster:
            yield cluster


def scrape(cluster: LiveCluster) -> list[Metric]:
    """Return the page parsed; fails when a series or a family is there twice."""
    found = list(text_string_to_metric_families(cluster.client.get("/metrics").raise_for_status().text))
    series = [(s.name, tuple(sorted(s.labels.items()))) for family in found for s in family.samples]
    assert len(series) == len(set(series))
    assert len(found) == len({family.name for family in found})
    return found


def value(found: list[Metric], name: str, **labels: str) -> float:
    return sum(s.value for f in found for s in f.samples if s.name == name and labels.items() <= s.labels.items())


def ask(cluster: LiveCluster, number: int) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True}
    if number % 2:
        assert list(cluster.stream([number + 4] * 40, **fields))
    else:
        cluster.complete([number + 4] * 40, **fields)


def test_pages_scraped_under_load_parse_and_add_up(cluster: LiveCluster) -> None:
    """Regression (another router): labels that differed between the pools broke the scrape."""
    before = scrape(cluster)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ask, cluster, number) for number in range(40)]
        while not all(future.done() for future in futures):
            scrape(cluster)
        for future in futures:
            future.result()
    wait_until(lambda: value(scrape(cluster), "twinpool_running_requests") == 0, 10, "all counted")
    after = scrape(cluster)

    def rise(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert rise("twinpool_requests_total", endpoint="completions", outcome="finished") == 40
    assert rise("twinpool_output_tokens_total") == 40 * 40
    assert rise("twinpool_inter_token_latency_seconds_count") == 40 * 39
    stages = ("queue", "grant", "prefill_queue", "prefill", "return")
    sum_s = sum(rise("twinpool_stage_seconds_sum", stage=stage) for stage in stages)
    assert rise("twinpool_stage_seconds_count", stage="transfer") == 40
    # The HTTP side accepts a request before the dispatcher does, and has its first token after it.
    assert 0 < sum_s <= rise("twinpool_time_to_first_token_seconds_sum")
    assert rise("twinpool_kv_bytes_total") >= rise("twinpool_kv_hidden_bytes_total") > 0


@dataclass(frozen=True)
class Query:
    panel: str
    expr: str

    def selectors(self) -> Iterator[tuple[str, list[tuple[str, str, str]], bool]]:
        """Yield each metric that is asked for, with its matchers, and whether a range of it is taken."""
        for name, matchers, of_range in SELECTOR.findall(self.expr):
            parsed = MATCHER.findall(matchers)
            assert re.sub(r"[\s,]", "", MATCHER.sub("", matchers)) == "", f"{self.panel}: {matchers}"
            yield name, parsed, bool(of_range)


QUERIES = [Query(p["title"], t["expr"]) for p in DASHBOARD["panels"] for t in p.get("targets", [])]


def known_series(found: list[Metric]) -> dict[str, tuple[str, list[dict[str, str]]]]:
    """Return the type and the label sets of every name that can be asked for."""
    known: dict[str, tuple[str, list[dict[str, str]]]] = {}
    for family in found:
        for suffix in SUFFIXES.get(family.type, ()):
            name = family.name + suffix
            known[name] = (family.type, [s.labels for s in family.samples if s.name == name])
    return known


def check_matchers(query: Query, labels: list[dict[str, str]], matchers: list[tuple[str, str, str]]) -> None:
    for label, operator, wanted in matchers:
        if label in OF_PROMETHEUS:
            assert wanted == f"${label}"
            continue
        values = {each[label] for each in labels if label in each}
        assert values, f"{query.panel}: no label {label!r}"
        wanted_values = options(wanted[1:]) if wanted.startswith("$") else wanted.split("|")
        if operator != "!=":
            assert set(wanted_values) <= values, f"{query.panel}: {label} is one of {sorted(values)}"


def options(variable: str) -> list[str]:
    (found,) = [v for v in DASHBOARD["templating"]["list"] if v["name"] == variable]
    return [option["value"] for option in found["options"]]


def test_the_dashboard_asks_for_what_there_is(cluster: LiveCluster) -> None:
    """Every metric, label and label value of every query exists in the page of a live cluster that served something."""
    ask(cluster, 1)
    known = known_series(scrape(cluster))
    assert len(QUERIES) > 40
    for query in QUERIES:
        selectors = list(query.selectors())
        assert selectors, query
        asked_labels: set[str] = set()
        for name, matchers, of_range in selectors:
            assert name in known, f"{query.panel}: there is no {name}"
            kind, labels = known[name]
            assert labels, f"{query.panel}: {name} has no series"
            assert of_range == (kind != "gauge"), f"{query.panel}: {name} is a {kind}"
            check_matchers(query, labels, matchers)
            asked_labels |= {label for each in labels for label in each}
        for group in re.findall(r"by \(([^)]*)\)", query.expr):
            grouped = set(re.split(r",\s*", group))
            assert grouped <= asked_labels | OF_PROMETHEUS, f"{query.panel}: {grouped}"


def test_the_dashboard_uses_histograms_as_such() -> None:
    """Quantiles over the buckets' `le`, means as sum over count; no name stands outside a selector."""
    for query in QUERIES:
        bare = re.sub(r"by \([^)]*\)", "by", SELECTOR.sub("", query.expr))
        assert set(re.findall(r"[a-zA-Z_:]\w*", bare)) <= FUNCTIONS, query
        for name, matchers, _ in query.selectors():
            labels = {label for label, _, _ in matchers}
            if name.endswith("_bucket"):
                assert "le" in labels or re.search(r"histogram_quantile\([\d.]+, sum by \(le[,)]", query.expr), query
            if name.endswith("_seconds_sum"):
                assert name.removesuffix("_sum") + "_count" in query.expr, query


def test_the_dashboard_can_be_imported() -> None:
    """A data source to choose, used everywhere; ids that differ; panels that do not overlap; every variable defined."""
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own
        if panel["type"] != "row":
            sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD)))
    assert used <= variables
    assert {panel["title"] for panel in panels if panel["type"] == "row"} >= {
        "Hand-off from PROMPT to COMPLETION workers"
    }


def test_a_live_request_is_traced_from_its_timeline(cluster: LiveCluster, collector: Collector) -> None:
    """The spans are as long as the stages that the answer itself tells, within the clock's grain."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    body = {"model": cluster.model, "prompt": [5] * 40, "max_tokens": 10, "ignore_eos": True, "timing": True}
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    timing = cluster.client.post("/v1/completions", json=body, headers=headers).raise_for_status().json()["timing"]

    def spans() -> list[Any]:
        return [span for span in collector.spans if span.trace_id.hex() == trace_id]

    wait_until(lambda: len(spans()) == 1 + len(STAGES), 10, "the spans of the request")
    length_s = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in spans()}
    assert {stage: length_s[stage] for stage in STAGES} == pytest.approx(
        {stage: max(timing[f"{stage}_s"], 0.0) for stage in STAGES}, abs=1e-6
    )
    assert length_s[f"text_completion {cluster.model}"] >= timing["end_s"]


def test_a_worker_that_is_gone_leaves_no_series(cluster: LiveCluster) -> None:
    assert value(scrape(cluster), "twinpool_worker_blocks", worker="completion-1") == 64
    cluster.kill("completion-1", signal.SIGTERM)
    wait_until(lambda: cluster.worker("completion-1") is None, 10, "the worker gone")
    found = scrape(cluster)
    assert not [s for family in found for s in family.samples if s.labels.get("worker") == "completion-1"]
    assert value(found, "twinpool_workers", role="COMPLETION", state="alive") == 1
    cluster.processes["completion-1"].wait(10)
    cluster.start("completion-1")
    cluster.wait_ready()
    assert value(scrape(cluster), "twinpool_worker_blocks", worker="completion-1") == 64

"""The names that dashboards rely on, and our own dashboard against what `/metrics` has."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.app import render_metrics

from rayllm.api.types import EngineStats
from rayllm.serve.http.metrics import FrontMetrics, ModelFigures, render

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "configs" / "kubernetes" / "grafana-dashboard.json").read_text())
NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_tokens_total",
]
KV_TIERS = {  # name -> field of EngineStats
    "num_cpu_kv_blocks": "num_total_cpu_blocks",
    "num_cpu_kv_blocks_used": "num_used_cpu_blocks",
    "num_cpu_kv_blocks_cached": "num_cached_cpu_blocks",
    "num_swap_preemptions_total": "num_swap_preemptions",
    "swapped_out_blocks_total": "swapped_out_blocks",
    "swapped_in_blocks_total": "swapped_in_blocks",
    "cpu_prefix_cache_queries_total": "cpu_prefix_cache_queries",
    "cpu_prefix_cache_hits_total": "cpu_prefix_cache_hits",
    "prefill_chunk_limit": "prefill_chunk_limit",
}


def samples():
    """Name -> the label names of all samples of an idle server."""
    text = render_metrics("m", EngineStats(), FrontMetrics()).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("rayllm:"), set()).update(sample.labels)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_idle_server_has_every_figure(name):
    known = samples()
    (labels,) = [known[each] for each in (name, f"{name}_count") if each in known]
    assert {"model_name", "engine"} <= labels


def test_figures_of_the_host_tier():
    stats = EngineStats(**{field: 100 + i for i, field in enumerate(KV_TIERS.values())})
    families = text_string_to_metric_families(render_metrics("m", stats, FrontMetrics()).decode())
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert {name: found[f"rayllm:{name}"] for name in KV_TIERS} == {name: 100 + i for i, name in enumerate(KV_TIERS)}


def total(text, name, **labels):
    """The value of the one sample of this name with these labels."""
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == f"rayllm:{name}" and labels.items() <= sample.labels.items()
    ]
    return value


def test_any_server_answers_for_all():
    one, two = FrontMetrics(), FrontMetrics()
    one.histograms["e2e_request_latency_seconds"].observe(0.2)
    for value in (3, 3):
        two.histograms["e2e_request_latency_seconds"].observe(value)
    two.histograms["time_to_first_token_seconds"].observe(999)
    for metrics in (one, two, two):
        metrics.finished["stop"].inc()
    two.count_refusal("queue_full")
    two.count_refusal("not one of them")
    text = render([ModelFigures("m", {}, one, [two.figures(), two.figures()], 1), ModelFigures("n", {}, two, [], 1)])
    assert total(text, "request_success_total", finished_reason="stop", model_name="m", engine="all") == 5
    assert total(text, "request_success_total", finished_reason="stop", model_name="n") == 2
    assert total(text, "request_refused_total", code="queue_full", model_name="m") == 2
    assert total(text, "e2e_request_latency_seconds_count", model_name="m") == 5
    assert total(text, "e2e_request_latency_seconds_sum", model_name="m") == pytest.approx(12.2)
    assert total(text, "e2e_request_latency_seconds_bucket", le="0.3", model_name="m") == 1
    assert total(text, "e2e_request_latency_seconds_bucket", le="5.0", model_name="m") == 5
    assert total(text, "time_to_first_token_seconds_bucket", le="160.0", model_name="m") == 0
    assert total(text, "time_to_first_token_seconds_bucket", le="+Inf", model_name="m") == 2
    assert b"_created" not in text


def test_unknown_figures_of_a_server_make_no_new_ones():
    """One of another version may have more: its names and label values are not taken over."""
    metrics = FrontMetrics()
    more = b'rayllm:request_success_total{finished_reason="new"} 3.0\nrayllm:other_total 1.0\n'
    assert render([ModelFigures("m", {}, metrics, [more], 1)]) == render([ModelFigures("m", {}, metrics, [], 1)])


def test_each_finish_and_refusal_is_there_from_the_start():
    text = render_metrics("m", EngineStats(), FrontMetrics())
    for reason in ("stop", "length", "abort", "error"):
        assert total(text, "request_success_total", finished_reason=reason) == 0
    for code in ("queue_full", "queue_timeout", "first_token_timeout", "request_timeout", "engine_unavailable"):
        assert total(text, "request_refused_total", code=code) == 0


def expressions():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_figures_and_labels_that_exist():
    known = samples()
    asked = set()
    for expression in expressions():
        names = re.findall(r"rayllm:(\w+)\{([^}]*)\}", expression)
        assert names, expression
        for name, selector in names:
            asked.add(name)
            assert name in known, name
            assert set(re.findall(r"(\w+)=~?\"", selector)) <= known[name]
        for label in re.findall(r"by \((\w+)\)", expression):
            assert all(label in known[name] for name, _ in names), expression
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert families >= set(NAMES) | set(KV_TIERS), "the dashboard leaves figures out"


def test_the_documentation_has_a_row_for_every_figure():
    text = (ROOT / "docs" / "operations.md").read_text().partition("### /metrics")[2].partition("\n### ")[0]
    documented = {
        name for row in re.findall(r"^\| (`.*?) \| \w+ \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)", row)
    }
    assert documented == {re.sub("_(bucket|sum|count)$", "", name) for name in samples()}


def test_the_dashboard_can_be_imported():
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert re.search(r"rayllm:(\w+)", variables["model"]["definition"]).group(1) in samples()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = set()
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        places.add((grid["x"], grid["y"]))
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert len(places) == len(ids)
    text = json.dumps(expressions())
    used = set(re.findall(r"\$(\w+)", text))
    assert used <= {"model", "__rate_interval"}
    for expression in expressions():
        assert expression.count("(") == expression.count(")")

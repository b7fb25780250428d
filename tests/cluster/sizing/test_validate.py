"""Predicted against measured: a live run made from closed forms is predicted exactly, and every difference is told."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost_profiles import cost_profile
from twinpool.cluster.cli import build_app
from twinpool.cluster.commands.validate import warn_of_few
from twinpool.cluster.cost_profile import Constant, CostProfile, WorkerCapacity
from twinpool.cluster.costs import CostModel
from twinpool.cluster.launch.roles import Programs
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.bounds import demand_of
from twinpool.cluster.sizing.probing import ProbedWorker
from twinpool.cluster.sizing.recording import LiveRun, Recording, Sighting, join_runs
from twinpool.cluster.sizing.simulate import Pools, Rules
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.validate import (
    Cell,
    Validation,
    is_colocated,
    is_gated,
    load_share,
    pools_of,
    rate_of_load,
    validate,
)
from twinpool.cluster.sizing.validate_report import report
from twinpool.cluster.sizing.workload import Request
from typer.testing import CliRunner

OVERHEAD_S, PER_TOKEN_S, STEP_S = 0.01, 0.001, 0.02
CAPACITY = WorkerCapacity(num_blocks=64, block_size_tokens=32, max_num_seqs=10, max_num_batched_tokens=2048)
FREE = ("prefill_overhead_s", "decode_per_sequence_s", "decode_per_cached_token_s", "transfer_latency_s")


def profile(**constants: float | Constant) -> CostProfile:
    """Return a profile of three constants; everything else costs nothing."""
    values = {"prefill_per_token_s": PER_TOKEN_S, "decode_base_s": STEP_S, "request_overhead_s": OVERHEAD_S}
    free = dict.fromkeys((*FREE, "transfer_s_per_byte"), 0.0)
    return cost_profile(
        prompt=CAPACITY, completion=CAPACITY, kv_bytes_per_token=1000, **{**free, **values, **constants}
    )


def worker(name: str, **changes: Any) -> ProbedWorker:
    role = "PROMPT" if name.startswith("prompt") else "COMPLETION"
    made = ProbedWorker(name, role, "test", "smollm2", "0" * 16, "bfloat16", "model", 1000, 64, 32, 4096, 2048, 10)
    return replace(made, **changes)


WORKERS = [worker("prompt-0"), worker("completion-0")]


def lonely_requests(count: int = 20) -> list[Request]:
    """So far apart that none meets another: their times follow from the constants alone."""
    return [Request(f"r{i}", 2.0 * i, 100 + 5 * i, 2 + i) for i in range(count)]


def sighting(request: Request, slower: float = 1.0, **changes: Any) -> Sighting:
    first_s = request.arrival_s + slower * (OVERHEAD_S + PER_TOKEN_S * request.num_prompt_tokens)
    times = tuple(first_s + slower * STEP_S * i for i in range(request.num_output_tokens))
    timing = {
        **dict.fromkeys(("queue_s", "grant_s", "prefill_queue_s", "num_preemptions", "num_cached_tokens"), 0.0),
        "prefill_s": PER_TOKEN_S * request.num_prompt_tokens,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": request.num_output_tokens,
        "num_attempts": 1,
        "last_kv_s": 0.0,
    }
    return Sighting(
        sent_s=request.arrival_s, token_times_s=times, timing={**timing, **changes.pop("timing", {})}
    ).model_copy(update=changes)


def recording(*slower: float, workers: list[ProbedWorker] = WORKERS) -> Recording:
    requests = lonely_requests()
    runs = [LiveRun([sighting(request, factor) for request in requests], 0.05, 0.001) for factor in slower]
    return join_runs(workers, requests, runs)


def with_first(recorded: Recording, **changes: Any) -> Recording:
    """Return a recording of whose first request something else was seen."""
    first = recorded.requests[0]
    seen = sighting(first.request, **changes)
    return replace(
        recorded, requests=[first.model_copy(update={"runs": (seen, *first.runs[1:])}), *recorded.requests[1:]]
    )


def cells(validation: Validation) -> dict[str, Cell]:
    return {f"{cell.metric} {cell.statistic}": cell for cell in validation.cells}


def test_what_the_noise_hides_is_predicted_at_its_middle() -> None:
    """A per-token cost of at most twice the true one: its bound would predict every prompt too long."""
    hidden = Constant(status="bounded", upper_bound=2 * PER_TOKEN_S, n=9, reason="inside the noise")
    found = validate(recording(1.0), profile(prefill_per_token_s=hidden))
    assert [cell.error for cell in found.cells] == pytest.approx([0.0] * 16, abs=1e-6)


def test_a_run_that_follows_the_cost_model_is_predicted_exactly() -> None:
    found = validate(recording(1.0), profile(), Slo(ttft_s=0.1625))
    assert len(found.cells) == 16
    assert [cell.error for cell in found.cells] == pytest.approx([0.0] * 16, abs=1e-6)
    assert cells(found)["TTFT p50"].live_s == pytest.approx(OVERHEAD_S + PER_TOKEN_S * 145)
    assert found.problems == found.reasons == []
    for per_request in found.per_request:
        assert per_request.num == 20
        assert (per_request.mape, per_request.bias) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert {p.metric: p.pearson for p in found.per_request if p.metric != "TPOT"} == {
        "TTFT": pytest.approx(1.0),
        "E2E": pytest.approx(1.0),
    }
    # TTFT is 0.110 s + 0.005 s i: eleven of twenty are within 0.1625 s
    assert [summary.slo_attainment for summary in (*found.live_summaries, *found.predicted_summaries)] == [0.55, 0.55]


def test_errors_are_signed_and_relative_to_what_was_measured() -> None:
    """Live is a quarter slower than predicted: the prediction is 20 % too short, of every statistic."""
    found = validate(recording(1.25), profile())
    assert [cell.error for cell in found.cells] == pytest.approx([-0.2] * 16, abs=1e-5)
    assert [p.bias for p in found.per_request] == pytest.approx([-0.2] * 3)
    assert [p.mape for p in found.per_request] == pytest.approx([0.2] * 3)


def test_live_values_are_means_over_the_runs_with_half_their_range_beside_them() -> None:
    cell = cells(validate(recording(0.9, 1.1), profile()))["E2E mean"]
    assert cell.error == pytest.approx(0.0, abs=1e-5)
    assert cell.repeatability == pytest.approx(0.1, rel=1e-3)
    assert cells(validate(recording(1.0), profile()))["E2E mean"].repeatability is None


@pytest.mark.parametrize(
    ("predicted_s", "repeatability", "gate", "verdict"),
    [
        (1.09, 0.01, 0.1, "within"),
        (0.91, None, 0.1, "within"),
        (1.11, 0.01, 0.1, "missed"),
        (0.89, None, 0.1, "missed"),
        (1.30, 0.15, 0.1, "noisy"),
        (9.00, 0.00, None, "reported"),
    ],
)
def test_a_gate_binds_only_where_the_live_runs_agree(
    predicted_s: float, repeatability: float | None, gate: float | None, verdict: str
) -> None:
    assert Cell("TTFT", "mean", 1.0, predicted_s, repeatability, gate).verdict == verdict


def test_gates_hold_between_30_and_70_percent_load_only() -> None:
    """The requests come at 0.5 a second; a prompt takes 148 ms on average: 7 % load, and a slow model makes it 35 %."""
    idle = validate(recording(1.25), profile())
    assert idle.load == pytest.approx(0.5 * 0.1475)
    assert not is_gated(idle.load)
    assert idle.reasons == []
    busy = validate(recording(1.25), profile(prefill_per_token_s=5 * PER_TOKEN_S))
    assert is_gated(busy.load)
    gated = {name for name, cell in cells(busy).items() if cell.gate is not None}
    assert gated == {f"{metric} {part}" for metric in ("TTFT", "ITL") for part in ("mean", "p50", "p99")}
    assert any(reason.startswith("TTFT mean is +") for reason in busy.reasons)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": "status 502: worker_failed"}, "1 request failed .r0: status 502"),
        ({"token_times_s": (0.2,)}, r"other token counts .*r0: \(100, 2\), 1 of them seen, instead of \(100, 2\)"),
        ({"timing": {"num_prompt_tokens": 101}}, r"other token counts .*r0: \(101, 2\)"),
        ({"timing": {"num_attempts": 2}}, "more than one attempt.*r0: 2"),
        ({"timing": {"num_cached_tokens": 64}}, "found prompt tokens cached .r0: 64"),
    ],
)
def test_a_request_that_did_not_run_as_simulated_fails_the_validation(changes: dict[str, Any], words: str) -> None:
    found = validate(with_first(recording(1.0), **changes), profile())
    assert len(found.problems) == 1
    assert re.search(words, found.reasons[0]), found.reasons


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 65}, "completion-0 has num_blocks 65, the cost profile was measured with 64"),
        ({"fingerprint": "g"}, f"completion-0 has weights 'g', the cost profile was measured with '{'0' * 16}'"),
        ({"max_num_seqs": 9}, "completion-0 has max_num_seqs 9, the cost profile was measured with 10"),
    ],
)
def test_workers_unlike_those_of_the_profile_fail_the_validation(changes: dict[str, Any], words: str) -> None:
    found = validate(recording(1.0, workers=[worker("prompt-0"), worker("completion-0", **changes)]), profile())
    assert found.problems == [words]


def test_the_profile_names_the_host_of_prompt_workers_only() -> None:
    found = validate(
        recording(1.0, workers=[worker(name, host="there") for name in ("prompt-0", "completion-0")]), profile()
    )
    assert found.problems == ["prompt-0 has host 'there', the cost profile was measured with 'test'"]


def test_pools_and_hosts_are_those_of_the_workers() -> None:
    workers = [worker("prompt-0"), worker("prompt-1"), worker("completion-0")]
    assert pools_of(workers) == Pools(num_prompt=2, num_completion=1)
    assert is_colocated(workers)
    assert not is_colocated([*workers, worker("completion-1", host="there")])


def test_load_is_the_share_of_the_pool_that_runs_full_first() -> None:
    """Prompts take 0.5 s of two workers; 101 tokens take 100 steps of 20 ms, ten sequences at a time: 0.2 s."""
    requests = [Request(f"r{i}", float(i), 500, 101) for i in range(11)]
    cost = profile().model()
    demand, rules = demand_of(requests), Rules()
    one, two = Pools(num_prompt=1, num_completion=1), Pools(num_prompt=4, num_completion=1)
    # 64 blocks of 32 tokens hold three such sequences of 550.5 tokens
    assert load_share(demand, cost, one, rules) == pytest.approx(100 * STEP_S / 3)
    assert load_share(demand, replace(cost, completion=replace(cost.completion, num_blocks=None)), one, rules) == (
        pytest.approx(0.5)
    )
    assert load_share(demand, cost, two, rules) == pytest.approx(100 * STEP_S / 3)
    rate = rate_of_load(0.5, demand, cost, one, rules)
    assert load_share(replace(demand, rate_per_s=rate), cost, one, rules) == pytest.approx(0.5)
    contended = replace(cost, decode_contention=1.5)
    assert load_share(demand, contended, one, Rules(colocated=True)) == pytest.approx(1.5 * 100 * STEP_S / 3)
    assert load_share(demand, contended, one, rules) == pytest.approx(100 * STEP_S / 3)
    with pytest.raises(ConfigError, match="takes no time"):
        rate_of_load(0.5, demand, CostModel(), one, rules)


def test_the_page_shows_every_error_and_curve() -> None:
    found = validate(recording(1.25, 1.25), profile())
    text = report(found, "A validation", ["40 requests <each> as asked for"])
    assert text.count("<svg") == 5
    assert text.count("-20.0%") >= 16
    assert "&lt;each&gt;" in text
    assert "±0.0%" in text


def run_command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app(Programs()), ["validate", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def replay(folder: Path, recorded: Recording, *arguments: str, **constants: float) -> tuple[int, str]:
    """Run the command on files, as after `--record`."""
    recorded.save(folder / "run.jsonl")
    profile(**constants).save(folder / "costs.json")
    files = ("--replay", str(folder / "run.jsonl"), "--costs", str(folder / "costs.json"))
    return run_command(*files, *arguments)


def test_the_command_compares_a_recording_again(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, text = replay(tmp_path, recording(1.0), "--ttft-ms", "162.5", "--html", str(page))
    assert code == 0
    assert "1 PROMPT + 1 COMPLETION workers, 20 requests sent 1 time," in text
    assert "SLO attainment: measured 55.0%, predicted 55.0%" in text
    assert "<svg" in page.read_text()


def test_the_command_fails_with_its_reasons(tmp_path: Path) -> None:
    code, text = replay(tmp_path, recording(1.25), "--json", prefill_per_token_s=5 * PER_TOKEN_S)
    answer = json.loads(text)
    assert code == 1
    assert any(reason.startswith("TTFT mean") for reason in answer["reasons"])
    wrong = {(cell["metric"], cell["statistic"]): cell["error"] for cell in answer["cells"]}
    assert wrong["ITL", "mean"] == pytest.approx(-0.2, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--load", "0.5", "--seed", "3"), "takes no --seed, --load"),
        (("--rate", "1", "--repeats", "2"), "takes no --rate, --repeats"),
        (("--rate", "1", "--load", "0.5"), "--load cannot be given beside a trace or --rate"),
        (("--load", "50"), "--load is 50, must be a share of the capacity"),
        (("--html", "/absent/page.html"), "--html /absent/page.html cannot be written: there is no folder"),
        (("--costs", "absent.json"), "cannot read the cost profile absent.json"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replay(tmp_path, recording(1.0), *arguments)


def test_contradicting_flags_are_told_before_any_file_is_read() -> None:
    with pytest.raises(ConfigError, match="takes no --rate"):
        run_command("--replay", "absent.jsonl", "--costs", "absent.json", "--rate", "3")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read the recording .*: No such file or directory\nhint: `twinpool validate --record"),
        (b"\xff\xfe", "is not a text in UTF-8\nhint: "),
        (b"", "holds no recording: 0 lines\nhint: "),
        (b"{}", "holds no recording: 1 line\nhint: "),
        (b"a\nb", "run.jsonl:1 is not a recording's header: Invalid JSON"),
    ],
)
def test_what_is_no_recording_is_refused_in_words(tmp_path: Path, content: bytes | None, words: str) -> None:
    profile().save(tmp_path / "costs.json")
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        run_command("--replay", str(path), "--costs", str(tmp_path / "costs.json"))


def test_too_few_requests_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One request passed all gates without a word."""
    full = recording(1.0)
    warn_of_few(len(full.requests))
    assert capsys.readouterr().err == ""
    few = Recording(full.header, full.requests[:1])
    _, text = replay(tmp_path, few, "--json")
    assert "warning: 1 request a run; to judge a prediction takes 20 or more" in text
    assert "hint: raise --duration" in text

"""`twinpool plan` as a user meets it: tables, files, JSON, exit codes, and clear refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cost_profiles import cost_profile, measured
from twinpool.cluster.cli import build_app, run
from twinpool.cluster.commands.plan import busiest
from twinpool.cluster.config import DEFAULT_MODEL, DEFAULT_MODEL_FOLDER, load_spec
from twinpool.cluster.launch.roles import Programs
from twinpool.cluster.sizing.distributions import ConstantLengths, Workload, generate
from twinpool.cluster.sizing.traces import write_trace
from twinpool.cluster.sizing.workload import Request

Command = Callable[..., tuple[int, str, str]]
SMALL = ("--rate", "8", "--prompt", "400-900", "--output", "20", "--num-requests", "30", "--samples", "2")
QUICK = (*SMALL, "--ttft-ms", "400", "--tpot-ms", "25", "--draws", "1", "--max-workers", "4")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the command in this process beside a costs.json: (exit code, output, errors)."""
    app = build_app(Programs())
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    cost_profile(prefill_per_token_s=measured(1e-4, 1e-6), decode_per_sequence_s=1e-3).save(Path("costs.json"))
    cost_profile(model="mine").save(Path("mine.json"))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["twinpool", "plan", *arguments])
        code = run(app)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_rate_becomes_a_table_a_spec_and_a_page(plan: Command) -> None:
    code, out, err = plan(*QUICK, "--html", "plan.html", "-o", "cluster.yaml")
    assert (code, err.strip()) == (0, "")
    assert "2 samples of 30 requests" in out
    assert "\n8 requests/s offered (drawn: " in out
    assert "Recommended: " in out
    assert "Binding: " in out
    spec = load_spec(Path("cluster.yaml"))
    assert f"{spec.prompt.num_workers} PROMPT + {spec.completion.num_workers} COMPLETION" in out
    assert "<svg" in Path("plan.html").read_text()


def test_json_has_the_ranking_and_the_spec(plan: Command) -> None:
    code, out, _ = plan(*QUICK, "--top", "2", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["is_feasible"] is True
    assert len(answer["ranked"]) == 2
    assert answer["recommended"]["policy"] in ("shared", "chunked", "disaggregated")
    assert answer["recommended"]["ttft_s"]["p90"] <= 0.4
    assert answer["stability"]["num_draws"] == 1
    assert answer["slo"] == {
        "ttft_s": 0.4,
        "tpot_s": 0.025,
        "itl_p99_s": None,
        "max_gap_s": None,
        "attainment": 0.9,
    }
    assert "num_workers" in answer["cluster_yaml"]


def test_the_same_seed_prints_the_same_bytes_and_another_does_not(plan: Command) -> None:
    first, again, other = (plan(*QUICK, "--json", "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_an_infeasible_slo_exits_with_1_the_reason_and_json(plan: Command) -> None:
    code, out, err = plan(*SMALL, "--ttft-ms", "20", "--json")
    assert code == 1
    assert "infeasible: no pool size helps: TTFT" in err
    answer = json.loads(out)
    assert answer["is_feasible"] is False
    assert answer["recommended"] is None
    assert "TTFT" in answer["reason"]


def test_no_spec_is_written_where_there_is_none(plan: Command) -> None:
    code, _, err = plan(*SMALL, "--ttft-ms", "20", "-o", "cluster.yaml")
    assert code == 1
    assert "infeasible" in err
    assert not Path("cluster.yaml").exists()


def test_a_spec_that_was_asked_for_is_written_or_the_command_fails(plan: Command) -> None:
    """Over so slow a link no two pools keep the gaps short; NORMAL workers do, but none can be started."""
    cost_profile(transfer_s_per_byte=1e-7).save(Path("slow.json"))
    slow = (*SMALL, "--costs", "slow.json", "--max-gap-ms", "60", "--draws", "0", "--max-workers", "3")
    code, out, err = plan(*slow, "-o", "cluster.yaml")
    assert code == 1
    assert "Recommended: " in out
    assert "Twinpool cannot start NORMAL workers yet. No two pools within the limits meet the SLO" in out
    assert "cluster.yaml was not written: No two pools within the limits meet the SLO" in " ".join(err.split())
    assert not Path("cluster.yaml").exists()
    assert plan(*slow)[0] == 0


@pytest.mark.parametrize("arguments", [(), ("--model", DEFAULT_MODEL), ("--model", DEFAULT_MODEL_FOLDER)])
def test_a_plan_of_the_default_model_starts_it_by_its_name(plan: Command, arguments: tuple[str, ...]) -> None:
    cost_profile(model=DEFAULT_MODEL_FOLDER).save(Path("default.json"))
    chosen = ("--costs", "default.json", "--policy", "disaggregated", "--draws", "0", "-o", "cluster.yaml")
    code, _, err = plan(*SMALL, "--ttft-ms", "400", *chosen, *arguments)
    assert (code, err.strip()) == (0, "")
    assert load_spec(Path("cluster.yaml")).model == DEFAULT_MODEL


def test_a_local_folder_is_written_in_full(plan: Command, tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    given = ("--costs", "mine.json", "--model", "models/mine", "--policy", "disaggregated", "-o", "cluster.yaml")
    assert plan(*SMALL, "--ttft-ms", "400", "--draws", "0", *given)[0] == 0
    assert load_spec(Path("cluster.yaml")).model == str(tmp_path / "models" / "mine")


@pytest.mark.parametrize(("width", "has_binding"), [(100, True), (80, False)])
def test_the_table_is_whole_on_a_narrow_terminal(
    plan: Command, monkeypatch: pytest.MonkeyPatch, width: int, has_binding: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = plan(*QUICK)
    assert code == 0
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.strip().startswith("policy"))
    end = next(i for i, line in enumerate(lines) if line.startswith("P PROMPT"))
    assert all(len(line) <= width for line in lines[head:end])
    assert "…" not in out
    assert ("binding" in lines[head]) == has_binding
    assert any("disaggregated" in line and " P + " in line for line in lines[head:end])
    printed = out.partition("\n# Planned for ")[2]
    assert yaml.safe_load(f"# {printed}")["model"] == "smollm2"


def test_a_trace_is_planned_for_where_it_is_busiest(plan: Command) -> None:
    requests = generate(Workload(4.0, ConstantLengths(500), ConstantLengths(10), num_requests=60))
    write_trace(Path("trace.jsonl"), requests)
    slo = ("--ttft-ms", "400", "--policy", "disaggregated", "--draws", "0", "--json")
    for busy, num in (("20", 20), ("0", 60)):
        code, out, _ = plan("trace.jsonl", "--busiest", busy, *slo)
        assert code == 0
        expected = busiest(requests, int(busy))
        assert len(expected) == num
        rate = (num - 1) / (expected[-1].arrival_s - expected[0].arrival_s)
        assert json.loads(out)["demand"]["rate_per_s"] == pytest.approx(rate)


def test_the_busiest_are_those_that_come_within_the_shortest_time() -> None:
    requests = [Request(f"r{i}", at_s, 10, 10) for i, at_s in enumerate((0.0, 5.0, 6.0, 6.5, 9.0, 9.4))]
    assert [(r.request_id, r.arrival_s) for r in busiest(requests, 2)] == [("r4", 0.0), ("r5", pytest.approx(0.4))]
    assert [r.request_id for r in busiest(requests, 3)] == ["r1", "r2", "r3"]
    assert busiest(requests, 0) == busiest(requests, 6) == requests


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*SMALL,), "there is no limit to plan for"),
        (("--ttft-ms", "400"), "there is no workload"),
        (("--rate", "-1", "--ttft-ms", "400"), "--rate is -1"),
        ((*SMALL, "--ttft-ms", "-5"), "--ttft-ms is -5"),
        ((*SMALL, "--ttft-ms", "400", "--attainment", "1.5"), "--attainment is 1.5"),
        ((*SMALL, "--ttft-ms", "400", "--policy", "magic"), "--policy is 'magic', must be one of shared"),
        ((*SMALL, "--ttft-ms", "400", "--model", "llama"), "costs.json holds the costs of smollm2, not of llama"),
        ((*SMALL, "--ttft-ms", "400", "--costs", "none.json"), "cannot read the cost profile none.json"),
        (
            (*SMALL, "--ttft-ms", "400", "--max-workers", "1"),
            "--max-workers is 1, but the least pools allowed have 2 workers",
        ),
        ((*SMALL, "--ttft-ms", "400", "--prompt-cost", "0"), "--prompt-cost is 0"),
        ((*QUICK, "--policy", "chunked", "-o", "c.yaml"), "--policy leaves them out"),
        ((*QUICK, "--costs", "mine.json", "-o", "c.yaml"), "costs are of mine, but do not say how that is started"),
        (("nothing.csv", "--ttft-ms", "400"), "cannot read the trace nothing.csv"),
        ((*QUICK, "-o", "nowhere/cluster.yaml"), "-o nowhere/cluster.yaml cannot be written"),
    ],
)
def test_wrong_input_is_refused_by_name(plan: Command, arguments: tuple[str, ...], said: str) -> None:
    code, _, err = plan(*arguments)
    assert code == 2
    assert said in " ".join(err.split())

"""`twinpool simulate` as a user meets it: figures checked by hand, files, repeatability, and clear refusals."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twinpool.cluster.cli import build_app, run
from twinpool.cluster.launch.roles import Programs

Command = Callable[..., tuple[int, str, str]]
COSTS = ("--set", "prefill_overhead_s=0.031914", "--set", "prefill_per_token_s=55.444e-6")
COSTS += ("--set", "decode_base_s=0.038283")
TRANSFER = ("--set", "kv_bytes_per_token=1", "--set", "transfer_s_per_byte=4.23e-6")
SMALL = ("--rate", "5", "--num-requests", "12", "--prompt", "200-900", "--output", "20")


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the command in this process: (exit code, output, errors)."""
    app = build_app(Programs())
    monkeypatch.setenv("COLUMNS", "150")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["twinpool", "simulate", *arguments])
        code = run(app)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def answer(simulate: Command) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the command with --json and returns what it says."""

    def call(*arguments: str) -> dict[str, Any]:
        code, out, err = simulate(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two streams, and a prompt of 8192 tokens that arrives 100 ms into them."""
    path = tmp_path / "trace.jsonl"
    rows = [("A", 0.0, 64), ("B", 0.0, 64), ("N", 0.1, 8192)]
    keys = ("request_id", "arrival_s", "num_prompt_tokens", "num_output_tokens")
    path.write_text("".join(json.dumps(dict(zip(keys, (*row, 96), strict=True))) + "\n" for row in rows))
    return str(path)


def test_the_worked_example_from_a_trace_to_the_table(simulate: Command, trace: str) -> None:
    """The published figures of three policies: TTFT p99, largest gap and GPU-seconds."""
    pools = ("--workers", "1", "--prompt-workers", "1", "--completion-workers", "1")
    code, out, err = simulate(trace, *COSTS, *TRANSFER, *pools, "--rules", "textbook", "--chunk", "256")
    assert (code, err) == (0, "")
    rows = {line[:21].strip(): line[21:].split() for line in out.splitlines()}

    assert rows["TTFT p99, ms"] == ["533.6", "1,525.8", "586.5"]
    assert rows["largest gap, ms"] == ["524.4", "46.1", "38.3"]
    assert rows["GPU-seconds"] == ["4.270", "5.263", "4.880"]
    assert rows["NORMAL workers"] == ["1", "1", "–"]
    assert rows["PROMPT workers"] == rows["COMPLETION workers"] == ["–", "–", "1"]
    assert rows["chunk, tokens"] == ["–", "256", "–"]


def test_goodput_counts_who_kept_every_limit(answer: Callable[..., dict[str, Any]], trace: str) -> None:
    """With one worker N stalls A and B by 524 ms; two pools spare them, and a TTFT of 550 ms is too short for N."""
    arguments = (trace, *COSTS, *TRANSFER, "--rules", "textbook", "--workers", "1", "--attainment", "0.6")
    limits = ("--max-gap-ms", "100", "--ttft-ms", "550", "--prompt-workers", "1", "--completion-workers", "1")
    runs = {each["policy"]: each for each in answer(*arguments, *limits)["runs"]}
    assert runs["shared"]["slo_attainment"] == pytest.approx(1 / 3)
    assert runs["disaggregated"]["slo_attainment"] == pytest.approx(2 / 3)
    assert runs["disaggregated"]["is_slo_met"] is True
    assert runs["shared"]["missed"] == {"ttft_s": 0, "max_gap_s": 2, "refused": 0, "unfinished": 0}
    code = {policy: each["binding_limit"] for policy, each in runs.items()}
    assert code["shared"] == "max_gap_s"
    assert code["disaggregated"] == "ttft_s"


def test_the_same_seed_gives_the_same_bytes(simulate: Command, tmp_path: Path) -> None:
    def files(seed: str, folder: Path) -> list[bytes]:
        folder.mkdir()
        paths = [folder / name for name in ("t.svg", "t.html", "t.json")]
        drawn = [
            flag for pair in zip(("--svg", "--html", "--chrome-trace"), map(str, paths), strict=True) for flag in pair
        ]
        code, out, _ = simulate(*SMALL, *COSTS, "--seed", seed, "--timeline", *drawn)
        assert code == 0
        return [out.encode(), *(path.read_bytes() for path in paths)]

    first, again, other = files("7", tmp_path / "a"), files("7", tmp_path / "b"), files("8", tmp_path / "c")
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_the_timeline_fits_the_terminal_and_accounts(simulate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    _, out, _ = simulate(*SMALL, *COSTS, "--timeline", "--policy", "disaggregated", "--policy", "shared")
    assert all(len(line) <= 70 for line in out.splitlines())
    lanes = re.findall(r"^(prompt|completion|normal)-\d.*?([\d.]+) s +\d+%$", out, re.MULTILINE)
    totals = [float(total) for total in re.findall(r"^([\d.]+) GPU-seconds = ", out, re.MULTILINE)]
    assert [name for name, _ in lanes] == ["normal", "normal", "prompt", "completion"]
    assert sum(float(seconds) for _, seconds in lanes) == pytest.approx(sum(totals), abs=0.003)


def test_the_page_is_complete_and_the_window_is_kept(simulate: Command, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    code, _, _ = simulate(*SMALL, *COSTS, "--html", str(page), "--from", "0.5", "--to", "1", "--ttft-ms", "400")
    html = page.read_text()
    assert code == 0
    titles = re.findall("<h2>(.*?)</h2>", html)
    assert titles == ["What was simulated", "Figures", "Distributions", "Timeline"]
    assert html.count("<svg") == 3
    assert html.count("not drawn ") == 3
    assert "limit 400 ms" in html
    assert "queue: waiting for prefill" in html
    assert not re.search(r"(src|href)=|url\(|@import|<script", html)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ((), (1, 1, 2)),
        (("--workers", "5"), (2, 3, 5)),
        (("--workers", "1"), (1, 1, 1)),
        (("--prompt-workers", "2", "--completion-workers", "3"), (2, 3, 5)),
        (("--completion-workers", "3"), (1, 3, 4)),
        (("--prompt-workers", "2", "--workers", "9"), (2, 1, 9)),
    ],
)
def test_pools_are_of_equal_size_unless_told(
    answer: Callable[..., dict[str, Any]], flags: tuple[str, ...], sizes: tuple[int, int, int]
) -> None:
    pools = answer("--rate", "1", "--num-requests", "1", *COSTS, *flags)["pools"]
    assert (pools["num_prompt"], pools["num_completion"], pools["num_normal"]) == sizes


def test_a_trace_is_stretched_and_cut(answer: Callable[..., dict[str, Any]], trace: str) -> None:
    workload = answer(trace, *COSTS, "--stretch", "3", "--policy", "shared")["workload"]
    assert workload["duration_s"] == pytest.approx(0.3)
    assert answer(trace, *COSTS, "--limit", "2", "--policy", "shared")["workload"]["num_requests"] == 2


def test_json_has_seconds_and_no_infinities(answer: Callable[..., dict[str, Any]]) -> None:
    told = answer(*SMALL, *COSTS, "--policy", "chunked", "--tpot-ms", "45", "--colocated")
    assert told["costs"]["transfer_bytes_per_s"] is None
    assert told["rules"]["colocated"] is True
    assert [each["policy"] for each in told["runs"]] == ["chunked"]
    assert told["runs"][0]["slo"]["tpot_s"] == 0.045
    assert told["runs"][0]["tpot_s"]["p50"] == pytest.approx(0.038283, rel=0.2)


def test_a_profile_tells_which_constants_are_bounds(simulate: Command, tmp_path: Path) -> None:
    """What was refused is planned with at its bound, and the user is told so."""
    measured = {"status": "measured", "median": 0.001, "n": 9}
    refused = {"status": "refused", "upper_bound": 4.7e-7, "n": 9, "reason": "noise"}
    names = ("floor", "overhead", "per_token", "per_token_sq")
    constants: dict[str, Any] = {f"prefill_{name}_s": measured for name in names}
    constants |= {f"decode_{name}_s": measured for name in ("base", "per_sequence")}
    constants |= dict.fromkeys(("transfer_latency_s", "transfer_s_per_byte", "request_overhead_s"), measured)
    ratios = ("prefill_sending", "prefill_contention", "decode_contention")
    constants |= {f"{name}_ratio": measured for name in ratios}
    constants["decode_per_cached_token_s"] = refused
    capacity = {"num_blocks": 4000, "block_size_tokens": 16, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    fingerprint = {"model": "m", "weights": "w", "dtype": "float32", "engine": "model", "host": "h", "num_threads": 1}
    profile = {"measured_at": "2025-01-01T00:00:00Z", "fingerprint": fingerprint, "constants": constants}
    profile |= {"fuse": {"rule": "max", "status": "measured"}, "kv_bytes_per_token": 1}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(profile | {"prompt": capacity, "completion": capacity}))
    code, out, _ = simulate("--rate", "1", "--num-requests", "2", "--prompt", "64", "--costs", str(path))
    assert code == 0
    assert "m (float32) on h; upper bounds, not measured: decode_per_cached_token_s." in out
    assert "in one that decodes: 4,000 blocks of 16 tokens, 8 sequences" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (COSTS, r"there is no workload\nhint: give a trace file, or --rate 2"),
        (("--rate", "2"), r"there are no costs\nhint: --costs FILE .*--set prefill_overhead_s"),
        (("--rate", "-2", *COSTS), r"--rate is -2.0, must be greater than 0"),
        (("--rate", "2", "--set", "decode_base=1"), r"no constant 'decode_base'\nhint: there are decode_base_s"),
        (("--rate", "2", "--costs", "absent.json"), r"cannot read the cost profile absent.json"),
        (("absent.csv", *COSTS), r"cannot read the trace absent.csv"),
        (("--rate", "2", "--stretch", "2", "--limit", "1", *COSTS), r"--stretch and --limit cannot be given here"),
        (("trace.csv", "--rate", "2", "--seed", "0", *COSTS), r"--rate and --seed cannot .*come from trace.csv"),
        (("--rate", "2", "--policy", "magic", *COSTS), r"--policy is 'magic', must be one of shared, chunked"),
        (("--rate", "2", "--rules", "mine", *COSTS), r"--rules is 'mine', must be one of twinpool, textbook"),
        (("--rate", "2", "--ttft-ms", "0", *COSTS), r"--ttft-ms is 0, must be a number greater than 0"),
        (("--rate", "2", "--tpot-ms", "nan", *COSTS), r"--tpot-ms is nan, must be"),
        (("--rate", "2", "--attainment", "2", "--ttft-ms", "9", *COSTS), r"--attainment is 2.0, must be greater"),
        (("--rate", "2", "--burstiness", "-1", *COSTS), r"--burstiness is -1.0, must be 0 to 100"),
        (("--rate", "2", "--duration", "0", *COSTS), r"--duration is 0.0, must be greater than 0"),
        (("--rate", "2", "--duration", "9", "--num-requests", "9", *COSTS), r"--num-requests and --duration cannot"),
        (("absent.csv", "--stretch", "0", *COSTS), r"--stretch is 0.0, must be above 0"),
        (("--rate", "2", "--warmup", "inf", *COSTS), r"--warmup is inf, must be a finite number"),
        (("--rate", "2", "--from", "inf", *COSTS), r"--from is inf, must be a finite number"),
        (("--rate", "2", "--to", "nan", *COSTS), r"--to is nan, must be after --from, 0"),
        (("--rate", "2", "--from", "5", "--to", "5", *COSTS), r"--to is 5, must be after --from, 5"),
        (("--rate", "2", "--prompt", "many", *COSTS), r"prompt lengths are 'many'"),
        (
            ("--rate", "2", "--num-requests", "2", "--svg", "/absent/t.svg", *COSTS),
            r"--svg /absent/t.svg cannot be written: there is no folder /absent",
        ),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(simulate: Command, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = simulate(*arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err, re.DOTALL)


def test_why_requests_are_refused_is_told_in_text_json_and_page(simulate: Command, tmp_path: Path) -> None:
    """Two prompts of three need 29 blocks of 32 where there are 20, under every policy: one line, one example."""
    path, page = tmp_path / "trace.jsonl", tmp_path / "run.html"
    rows = [("r0", 100), ("r1", 900), ("r2", 901)]
    keys = ("request_id", "num_prompt_tokens", "arrival_s", "num_output_tokens")
    path.write_text("".join(json.dumps(dict(zip(keys, (*row, 0.0, 8), strict=True))) + "\n" for row in rows))
    arguments = (str(path), *COSTS, "--set", "completion.num_blocks=20", "--html", str(page), "--policy", "auto")
    _, out, _ = simulate(*arguments, "--policy", "shared")
    reason = "its tokens do not fit into 20 blocks of 32"
    told = f"2 requests refused by shared, auto, such as r1 with 900 prompt and 8 output tokens: {reason}."
    assert told in out
    assert told in page.read_text()
    (told_run,) = json.loads(simulate(*arguments, "--json")[1])["runs"]
    example = {"request_id": "r1", "num_prompt_tokens": 900, "num_output_tokens": 8}
    assert told_run["refusals"] == [{"reason": reason, "num": 2, **example}]
    path.write_text(path.read_text().splitlines()[0])
    assert "refused" not in simulate(*arguments)[1]


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_of_four_policies_fits_a_terminal(
    simulate: Command, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """No label and no value is broken or cut, even where times are long and requests are refused."""
    monkeypatch.setenv("COLUMNS", str(width))
    policies = [part for policy in ("shared", "chunked", "disaggregated", "auto") for part in ("--policy", policy)]
    tight = ("--set", "completion.num_blocks=20", "--ttft-ms", "50", "--max-gap-ms", "9", "--chunk", "128")
    _, out, _ = simulate("--rate", "5", "--num-requests", "60", "--prompt", "100-700", *COSTS, *tight, *policies)
    table = out[out.index("shared   ") :].splitlines()[2:]
    rows = table[: next(i for i, line in enumerate(table) if not line.strip())]
    assert all(len(line) <= width for line in rows)
    assert all(line[:21].strip() for line in rows)
    assert "…" not in out


def test_files_that_cannot_be_written_are_refused_before_anything_is_simulated(simulate: Command) -> None:
    """A thousand seconds of arrivals would take minutes."""
    long = ("--rate", "1000", "--duration", "10000")
    code, _, err = simulate(*long, *COSTS, "--chrome-trace", "/absent/t.json")
    assert code == 2
    assert "--chrome-trace /absent/t.json cannot be written: there is no folder /absent\nhint:" in err


def test_a_chunk_that_does_not_exist_is_no_negative_number(simulate: Command) -> None:
    slow = ("--set", "prefill_overhead_s=0.02", "--set", "prefill_per_token_s=1e-3", "--set", "decode_base_s=0.01")
    assert "C* beside one sequence: none, so split." in simulate(*SMALL, *slow)[1]
    assert "C* beside one sequence: any, so chunk." in simulate(*SMALL, "--set", "decode_base_s=0.01")[1]


def test_a_broken_trace_names_its_line_and_key(simulate: Command, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,100,5\n2023-11-16 18:15:47.0,x,5\n")
    code, _, err = simulate(str(path), *COSTS)
    assert code == 2
    assert f"{path}, line 3: ContextTokens is 'x'" in err
    path.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.0,100\n")
    assert f"{path}, line 1: GeneratedTokens is missing for the format of Azure\n" in simulate(str(path), *COSTS)[2]


def test_help_teaches_units_and_examples(simulate: Command) -> None:
    code, out, _ = simulate("--help")
    assert code == 0
    assert "Flags that end in -ms are milliseconds" in out
    assert "twinpool simulate trace.csv --costs costs.json" in out

"""The tables of docs/sizing.md name what there is: constants, keys, formats, policies, figures."""

from pathlib import Path
from typing import get_args

import pytest
from documents import ARCHITECTURE, CODE, ROOT, SIZING, code_in, shipped_strings, table_under
from twinpool.cluster.commands.simulate import RULES
from twinpool.cluster.cost_profile import Constant, Constants, CostProfile, load_profile
from twinpool.cluster.costs import CostModel
from twinpool.cluster.sizing.devices import find_device
from twinpool.cluster.sizing.distributions import parse_lengths
from twinpool.cluster.sizing.experiment import Experiment
from twinpool.cluster.sizing.explanation import Question, explain
from twinpool.cluster.sizing.model_shape import ModelShape
from twinpool.cluster.sizing.overrides import override
from twinpool.cluster.sizing.plan import plan
from twinpool.cluster.sizing.result import Policy
from twinpool.cluster.sizing.simulate import Pools, Rules, simulate
from twinpool.cluster.sizing.summary import Slo, summarize
from twinpool.cluster.sizing.trace_formats import FORMATS
from twinpool.cluster.sizing.traces import detect_format, read_trace
from twinpool.cluster.sizing.workload import Request

EXAMPLE = ROOT / "docs" / "examples" / "costs-h100-8b.json"
LLAMA_8B = ModelShape("llama", 8_030_000_000, 32, 32, 8, 128)
REQUESTS = [Request(f"r{i}", 0.2 * i, 1000, 20) for i in range(20)]


def test_the_example_profile_can_be_loaded_and_says_that_it_was_not_measured() -> None:
    profile = load_profile(EXAMPLE)
    assert "NOT MEASURED" in profile.notes[0]
    assert profile.measured_at == "never"
    for key, constant in profile.constants.items():
        assert constant.n == 0, f"{key} claims to have been timed"
        assert constant.reason.startswith("by hand: ")


def test_the_example_profile_is_what_the_formulas_expect_of_the_data_sheet() -> None:
    """It follows from 60 % of an H100's FLOP/s and 80 % of its bytes/s; the guessed overheads come on top."""
    costs = load_profile(EXAMPLE).model()
    answer = explain(LLAMA_8B, find_device("h100"), Question(prompt_tokens=8000, batches=(64,)))
    (prefill,) = [row for row in answer["prefill"] if row["num_tokens"] == 8000]
    assert costs.prefill_s(8000) - costs.prefill_overhead_s == pytest.approx(prefill["expected_s"], rel=0.005)
    guessed_s = 64 * costs.decode.per_sequence_s
    assert costs.decode_s(64, 64 * 8000) - guessed_s == pytest.approx(answer["decode"][0]["expected_step_s"], rel=0.005)


def test_the_constants_table_lists_every_constant_with_its_unit() -> None:
    rows = table_under(SIZING, "Constants")
    assert [code_in(row[0]) for row in rows] == list(Constants.model_fields)
    for key, unit, _ in rows:
        assert unit == ("1" if key.endswith("_ratio`") else "s"), key


def test_every_constant_in_the_table_can_be_set_by_hand() -> None:
    keys = [code_in(row[0]) for row in table_under(SIZING, "Constants")]
    model = override(CostModel(), [*(f"{key}=2" for key in keys), "decode_knee_sequences=9"])
    assert (model.prefill_floor_s, model.transfer_bytes_per_s, model.decode_contention) == (2.0, 0.5, 2.0)


def test_the_table_of_other_keys_lists_every_key_of_a_profile() -> None:
    assert [code_in(row[0]) for row in table_under(SIZING, "Other keys")] == list(CostProfile.model_fields)


def test_the_status_table_lists_every_status() -> None:
    statuses = get_args(Constant.model_fields["status"].annotation)
    assert [code_in(row[0]) for row in table_under(SIZING, "Calibrate")] == list(statuses)


def test_the_policies_table_lists_every_policy() -> None:
    assert [code_in(row[0]) for row in table_under(SIZING, "Policies")] == list(get_args(Policy))


def test_the_rules_table_has_a_column_for_each_set_of_rules() -> None:
    head = next(line for line in SIZING.read_text().splitlines() if line.startswith("| rule |"))
    assert CODE.findall(head) == list(RULES)
    assert len(table_under(SIZING, "Rules")) == len(vars(Rules())) - 1  # `colocated` has a flag of its own


def test_the_lengths_table_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text('{"arrival_s": 0, "num_prompt_tokens": 5, "num_output_tokens": 6}\n')
    kinds = {type(parse_lengths(code_in(row[0]))) for row in table_under(SIZING, "Workloads")}
    assert len(kinds) == 4


def test_the_formats_table_lists_every_format_with_a_line_of_it(tmp_path: Path) -> None:
    rows = table_under(SIZING, "Trace formats")
    assert [row[0] for row in rows] == [known.name for known in FORMATS]
    for row, known in zip(rows, FORMATS, strict=True):
        name, keys, unit, example = row[0], CODE.findall(row[1]), row[2], code_in(row[3])
        assert tuple(keys) == known.keys, name
        assert unit == {1: "s", 1_000: "ms", 1_000_000: "date", 1_000_000_000: "ns"}[known.units_per_s], name
        file = tmp_path / "trace"
        file.write_text(example if example.startswith("{") else f"{','.join(keys)}\n{example}\n")
        assert detect_format(file).startswith(f"{name} "), name
        assert len(read_trace(file)) == 1, name


def test_the_architecture_names_files_that_exist() -> None:
    for row in table_under(ARCHITECTURE, "Sizing"):
        for name in CODE.findall(row[1]):
            assert (ROOT / name).exists() or (ROOT / "cluster" / "sizing" / name).exists(), name


def documented_keys(command: str) -> set[str]:
    (cell,) = [row[1] for row in table_under(SIZING, "JSON") if code_in(row[0]) == command]
    return {word for word in CODE.findall(cell) if not word.startswith("--")}


def test_the_json_table_lists_the_keys_of_every_command() -> None:
    profile = load_profile(EXAMPLE)
    explained = explain(LLAMA_8B, find_device("h100"), Question(), profile)
    experiment = Experiment(REQUESTS, profile.model(), "", ["shared"], Pools(), Rules())
    planned = plan(REQUESTS, profile, Slo(ttft_s=1.0))
    assert documented_keys("explain") == set(explained)
    assert documented_keys("simulate") == set(experiment.to_json([]))
    assert documented_keys("plan") == {*planned.to_json(), "cluster_yaml"}
    for command in ("calibrate", "validate"):  # they need a cluster: at least no key is made up
        assert documented_keys(command) - shipped_strings() == set()


def test_the_table_of_figures_lists_every_figure_of_a_run() -> None:
    found = summarize(simulate("disaggregated", REQUESTS, CostModel()), Slo(ttft_s=1.0))
    documented = [key for row in table_under(SIZING, "Figures in JSON") for key in CODE.findall(row[0])]
    assert sorted(documented) == sorted(found.to_json())

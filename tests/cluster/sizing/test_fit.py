"""Constants come back from samples made of them, and data that cannot carry a constant gets a bound instead."""

import csv
import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from twinpool.cluster.cost_profile import Constant
from twinpool.cluster.costs import CostModel, DecodeCost, FuseRule
from twinpool.cluster.sizing.fit import (
    PassTimes,
    choose_fuse,
    fit_decode,
    fit_overhead,
    fit_prefill,
    fit_ratio,
    fit_transfer,
)

A100_OPT_13B = CostModel(  # DistServe's published constants: large batches have a regime of their own
    prefill_overhead_s=18.10254647486372e-3,
    prefill_per_token_s=0.1019122572698738e-3,
    prefill_per_token_sq_s=7.122264314252114e-9,
    decode=DecodeCost(19.934702624895458e-3, 0.03850697740828398e-3, 0.0006269356524350583e-3),
    decode_large=DecodeCost(7.1661889468253595e-3, 0.15831096191764046e-3, 0.0005798000403396046e-3),
    decode_knee_sequences=95,
)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 4, 16, 32, 48, 64, 80, 95, 128, 160, 192, 224, 256)


def data_file(name: str) -> Path:
    folder = Path(os.environ.get("TWINPOOL_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not in {folder}; TWINPOOL_DATA names the folder that holds it")
    return folder / name


def noisy(seconds: float, seed: random.Random, noise: float, num_repeats: int = 9) -> tuple[float, ...]:
    return tuple(seconds * seed.gauss(1, noise) for _ in range(num_repeats))


def prefill_samples(model: CostModel, seed: int, noise: float = 0.01) -> list[PassTimes]:
    draws = random.Random(seed)
    chunks = [(0, n) for n in LENGTHS] + [(512, 512), (1024, 1024)]
    return [PassTimes((row,), 0, 0, noisy(model.pass_s([row]), draws, noise)) for row in chunks]


def decode_samples(model: CostModel, seed: int, noise: float = 0.01) -> list[PassTimes]:
    draws = random.Random(seed)
    shapes = [(batch, batch * each) for batch in BATCHES for each in (64, 512, 1024)]
    return [PassTimes((), b, cached, noisy(model.decode_s(b, cached), draws, noise)) for b, cached in shapes]


def within(constants: Mapping[str, Constant], truth: Mapping[str, float]) -> list[bool]:
    """Say for each constant of the truth whether it was measured, and its spread holds the truth."""
    return [
        (c := constants[key]).median is not None and abs(c.median - value) <= c.spread for key, value in truth.items()
    ]


PREFILL_TRUTH = {
    "prefill_overhead_s": A100_OPT_13B.prefill_overhead_s,
    "prefill_per_token_s": A100_OPT_13B.prefill_per_token_s,
    "prefill_per_token_sq_s": A100_OPT_13B.prefill_per_token_sq_s,
}


def decode_truth(cost: DecodeCost, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}base_s": cost.base_s,
        f"{prefix}per_sequence_s": cost.per_sequence_s,
        f"{prefix}per_cached_token_s": cost.per_cached_token_s,
    }


def test_the_published_prefill_constants_of_an_a100_come_back_within_their_spreads() -> None:
    held = [
        ok
        for seed in range(30)
        for ok in within(fit_prefill(prefill_samples(A100_OPT_13B, seed)).constants, PREFILL_TRUTH)
    ]
    assert sum(held) / len(held) > 0.8  # a spread is a 90 % interval


@pytest.mark.parametrize("crowding_s", [0.0, 1.0e-7])
def test_packed_passes_get_a_term_of_their_own_only_where_they_need_one(crowding_s: float) -> None:
    """Measured on two cores: passes over many prompts took 15 % longer than attention alone explains."""
    truth = CostModel(
        prefill_overhead_s=0.03,
        prefill_per_token_s=5e-4,
        prefill_per_token_sq_s=4.5e-7,
        prefill_per_pass_token_sq_s=crowding_s,
    )
    shapes = [((0, n),) for n in (16, 32, 64, 128, 256, 512, 1024, 2048)]
    shapes += [((0, 256),) * 2, ((0, 256),) * 8, ((256, 256),), ((4096, 256),)]
    for seed in range(10):
        draws = random.Random(seed)
        fitted = fit_prefill([PassTimes(s, 0, 0, noisy(truth.pass_s(s), draws, 0.02)) for s in shapes])
        constant = fitted.constants.get("prefill_per_pass_token_sq_s")
        if crowding_s:
            assert constant is not None
            assert constant.median == pytest.approx(crowding_s, rel=0.25)
        else:
            assert constant is None
        assert fitted.error < 0.02


def test_both_decode_regimes_of_an_a100_come_back_within_their_spreads() -> None:
    assert A100_OPT_13B.decode_large
    truth = decode_truth(A100_OPT_13B.decode, "decode_") | decode_truth(A100_OPT_13B.decode_large, "decode_large_")
    held: list[bool] = []
    for seed in range(15):
        fitted = fit_decode(decode_samples(A100_OPT_13B, seed))
        assert fitted.knee_sequences == 95
        held += within(fitted.fit.constants, truth)
    assert sum(held) / len(held) > 0.8


def test_one_regime_is_kept_where_one_describes_all_batches() -> None:
    one = CostModel(decode=DecodeCost(0.02, 0.001, 1e-6))
    assert all(fit_decode(decode_samples(one, seed, noise=0.04)).knee_sequences is None for seed in range(10))


def test_all_published_profiles_of_a100s_come_back() -> None:
    """The same for every model and tensor-parallel size in the published file, without noise."""
    profiles = json.loads(data_file("distserve_a100_profile.json").read_bytes())
    for sizes in profiles.values():
        for profile in sizes.values():
            o, x, q = (value / 1e3 for value in profile["prefill"])
            cost = CostModel(prefill_overhead_s=o, prefill_per_token_s=x, prefill_per_token_sq_s=q)
            fit = fit_prefill(prefill_samples(cost, 0, noise=0.0))
            assert [fit.values[key] for key in PREFILL_TRUTH] == pytest.approx([o, x, q], rel=1e-6)


def test_a_floor_under_short_passes_is_found() -> None:
    """Dense layers of an 8B model on an RTX PRO 6000: flat up to 135 tokens."""
    card = CostModel(prefill_floor_s=10.1e-3, prefill_overhead_s=5.35e-3, prefill_per_token_s=35.2e-6)
    truth = {
        "prefill_floor_s": card.prefill_floor_s,
        "prefill_overhead_s": card.prefill_overhead_s,
        "prefill_per_token_s": card.prefill_per_token_s,
    }
    held: list[bool] = []
    for seed in range(20):
        constants = fit_prefill(prefill_samples(card, seed)).constants
        assert constants["prefill_per_token_sq_s"].status != "measured"
        held += within(constants, truth)
    assert sum(held) / len(held) > 0.8


def test_without_a_floor_the_shortest_pass_bounds_it() -> None:
    fit = fit_prefill(prefill_samples(A100_OPT_13B, 1))
    floor = fit.constants["prefill_floor_s"]
    assert (floor.status, fit.values["prefill_floor_s"]) == ("bounded", 0.0)
    assert floor.upper_bound == pytest.approx(A100_OPT_13B.prefill_s(16), rel=0.02)


def test_a_flat_decode_column_is_refused_with_a_bound_and_not_taken_for_zero() -> None:
    """A small model on a laptop: the cache grew 128-fold and the step did not; the slope came out negative."""
    column = {128: (36.07, 0.21), 1024: (36.21, 0.36), 4096: (35.37, 0.22), 16384: (35.78, 0.22)}
    passes = [
        PassTimes((), 1, cached, tuple(ms / 1e3 * (1 + side * spread) for side in (-1, 0, 1)))
        for cached, (ms, spread) in column.items()
    ]
    constants = fit_decode(passes).fit.constants
    slope = constants["decode_per_cached_token_s"]
    assert slope.status == "refused"
    assert slope.upper_bound == pytest.approx(0.47e-6, rel=0.1)  # the noise over the range
    assert slope.upper_bound > 0.22e-6  # what the card's bandwidth allows lies within
    assert "impossible" in slope.reason
    assert "-16.7 ns" in slope.reason  # "-0.017 us" in the source
    assert constants["decode_per_sequence_s"].status == "refused"  # one batch size tells nothing of it
    base = constants["decode_base_s"]
    assert base.median == pytest.approx(35.9e-3, rel=0.02)


def test_a_small_positive_slope_from_the_same_noise_is_refused_as_well() -> None:
    """A guard that looks at the sign alone lets it through, and every other run disagrees with the last."""
    flat = CostModel(decode=DecodeCost(0.036, 0.002))
    shapes = [(batch, batch * each) for batch in (1, 2, 4, 8) for each in (16, 1024)]
    statuses = set[str]()
    for seed in range(40):
        draws = random.Random(seed)
        passes = [PassTimes((), b, cached, noisy(flat.decode_s(b, cached), draws, 0.15)) for b, cached in shapes]
        slope = fit_decode(passes).fit.constants["decode_per_cached_token_s"]
        statuses.add(slope.status)
        assert slope.value > 0
    assert statuses >= {"bounded", "refused"}


CORRUPT = (  # prompt tokens, prompts, milliseconds: Llama 2 70B, two A100s; the last cell cannot be
    (128, 1, (81.1, 81.0, 81.3)),
    (512, 1, (196.3, 195.6, 197.4)),
    (1024, 1, (377.1, 376.2, 379.2)),
    (2048, 1, (685.6, 688.1, 688.5)),
    (4096, 1, (1501.9, 1494.0, 1442.4)),
    (8192, 1, (2974.4, 2990.2, 3011.9)),
    (512, 16, (3220.1, 3211.8, 3257.9)),
    (512, 64, (794.2, 794.2, 794.2)),
)


def test_one_corrupt_cell_refuses_the_fit_and_is_named() -> None:
    passes = [PassTimes(((0, n),) * b, 0, 0, tuple(ms / 1e3 for ms in times)) for n, b, times in CORRUPT]
    for key in PREFILL_TRUTH:
        constant = fit_prefill(passes).constants[key]
        assert constant.status == "refused"
        assert "32,768 tokens in 64 prompts (794 ms)" in constant.reason
    sound = fit_prefill(passes[:-1]).constants["prefill_per_token_s"]
    bound = fit_prefill(passes).constants["prefill_per_token_s"].upper_bound
    assert sound.median
    assert bound
    assert sound.median < bound < 2 * sound.median


def test_the_whole_published_table_is_refused_where_its_cell_is_corrupt_and_carried_elsewhere() -> None:
    cells: dict[tuple[str, str, str], dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    with data_file("splitwise_perf_model.csv").open() as file:
        for row in csv.DictReader(file):
            machine = (row["model"], row["hardware"], row["tensor_parallel"])
            cells[machine][int(row["prompt_size"]), int(row["batch_size"])].append(float(row["prompt_time"]) / 1e3)
    slopes = {
        machine: fit_prefill([PassTimes(((0, n),) * b, 0, 0, tuple(t)) for (n, b), t in shapes.items()]).constants[
            "prefill_per_token_s"
        ]
        for machine, shapes in cells.items()
    }
    assert slopes["llama2-70b", "a100-80gb", "2"].status == "refused"
    assert {slopes["llama2-70b", card, size].status for card in ("a100-80gb", "h100-80gb") for size in "48"} == {
        "measured"
    }


def test_noise_that_hides_every_term_is_named_and_not_taken_for_a_misfit() -> None:
    """With no term left, passes were predicted to take no time: "off by 100% on average, by -100% at ..."."""
    draws = random.Random(2)
    lengths = (16, 64, 256, 1024, 2048)
    passes = [PassTimes(((0, n),), 0, 0, tuple(0.02 * draws.lognormvariate(0, 0.8) for _ in range(5))) for n in lengths]
    fit = fit_prefill(passes)
    for key in PREFILL_TRUTH:
        constant = fit.constants[key]
        assert constant.status == "refused"
        assert re.match(r"not one term stands out from the noise, which is ±\d+% of .* at most", constant.reason)
    assert fit.constants["prefill_overhead_s"].value >= 0.02  # what the passes were made of
    assert fit.error == 1.0


def test_a_misfit_without_terms_that_the_noise_hides_names_them() -> None:
    """Repeats of a long pass that scatter hide the slope, and without it nothing fits."""
    draws = random.Random(0)
    reasons = {
        fit_prefill([PassTimes(((0, n),), 0, 0, noisy(0.001 * n**0.4, draws, 0.35, 5)) for n in (1, 8, 64, 512, 4096)])
        .constants["prefill_overhead_s"]
        .reason
        for _ in range(20)
    }
    assert any(re.search(r"model without prefill_per_token_s.*, which the noise hides: off by", r) for r in reasons)


def test_too_few_shapes_are_refused_in_words() -> None:
    constants = fit_prefill([PassTimes(((0, 64),), 0, 0, (0.1, 0.1, 0.1))]).constants
    assert "needs 4 different shapes, was given 64 tokens" in constants["prefill_per_token_s"].reason
    assert constants["prefill_per_token_s"].upper_bound == pytest.approx(0.1 / 64)


@pytest.mark.parametrize("rule", ["max", "sum", "roofline"])
def test_the_rule_that_made_the_fused_passes_is_chosen(rule: FuseRule) -> None:
    model = CostModel(0.010, 0.005, 4e-5, decode=DecodeCost(0.010, 2e-4, 1e-7), fuse=rule)
    draws = random.Random(3)
    passes = [
        PassTimes(((0, n),), b, b * 512, noisy(model.fused_s([(0, n)], b, b * 512), draws, 0.02))
        for n in (128, 512)
        for b in (8, 32)
    ]
    choice = choose_fuse(passes, model)
    assert (choice.rule, choice.status) == (rule, "measured")
    assert choice.relative_errors[rule] < 0.03
    assert choose_fuse([], model).status == "assumed"


def test_a_link_comes_back_as_latency_and_seconds_per_byte() -> None:
    draws = random.Random(5)
    sizes = (1_000_000, 4_000_000, 16_000_000, 64_000_000)
    times = {size: noisy(0.002 + size / 2.5e9, draws, 0.02) for size in sizes}
    truth = {"transfer_latency_s": 0.002, "transfer_s_per_byte": 1 / 2.5e9}
    assert all(within(fit_transfer(times).constants, truth))
    three = fit_transfer(dict(list(times.items())[:3])).constants
    assert {constant.status for constant in three.values()} == {"refused"}
    assert "needs 4 different shapes" in three["transfer_latency_s"].reason


def test_an_overhead_is_a_number_only_outside_its_noise() -> None:
    assert fit_overhead([0.004, 0.0042, 0.0041]).median == pytest.approx(0.0041)
    hidden = fit_overhead([-0.002, 0.001, 0.003])
    assert (hidden.status, hidden.median) == ("bounded", None)
    assert hidden.upper_bound is not None
    assert hidden.upper_bound >= 0.003
    assert fit_overhead([-0.002, -0.001, -0.0015]).status == "refused"


def test_repeats_that_agree_exactly_hide_what_the_clock_cannot_tell() -> None:
    still = fit_prefill([PassTimes(((1, new),), 0, 0, (1e-5,)) for new in (1, 1, 5, 37)]).constants
    assert {constant.status for constant in still.values()} >= {"measured", "bounded"}
    assert all(constant.value > 0 for constant in still.values())
    assert fit_overhead([0.0, 0.0]).value > 0


def test_contention_is_never_below_one() -> None:
    slowed = fit_ratio([0.20, 0.21, 0.205], [0.1, 0.101, 0.1])
    assert slowed.median == pytest.approx(2.05)
    unmoved = fit_ratio([0.1, 0.101, 0.099], [0.1, 0.102, 0.098])
    assert unmoved.status == "bounded"
    assert 1 <= unmoved.value < 1.1


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 4096), st.lists(st.floats(1e-5, 100), min_size=1, max_size=4)),
        max_size=12,
    )
)
def test_whatever_was_timed_each_constant_is_a_number_with_a_spread_or_a_bound_with_a_reason(
    shapes: list[tuple[int, int, list[float]]],
) -> None:
    decode = fit_decode([PassTimes((), batch, cached, tuple(times)) for batch, cached, times in shapes])
    prefill = fit_prefill([PassTimes(((cached, new),), 0, 0, tuple(times)) for new, cached, times in shapes])
    for constant in (*decode.fit.constants.values(), *prefill.constants.values()):
        if constant.status == "measured":
            assert constant.value > 0
        else:
            assert constant.reason
            assert constant.value > 0 or not shapes


def test_drift_of_the_machine_widens_every_spread() -> None:
    still = fit_prefill(prefill_samples(A100_OPT_13B, 2)).constants["prefill_per_token_s"]
    moved = fit_prefill(prefill_samples(A100_OPT_13B, 2), drift=0.1).constants["prefill_per_token_s"]
    assert moved.median is not None
    assert moved.spread == pytest.approx(still.spread + 0.1 * moved.median)

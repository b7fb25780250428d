"""Traces: every format gives the same requests, and a wrong file is refused by the line and the key."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.traces import detect_format, read_trace, write_trace
from twinpool.cluster.sizing.workload import Request

Save = Callable[[str], Path]
SHAPES = [(0.0, 374, 44), (4.25, 396, 109), (4.5, 879, 55)]  # what each of the texts below says
RECORDING = [{"format": "twinpool-recording/1", "policy": "disaggregated", "workers": []}]
TEXTS = {
    "Azure CSV": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9305900,396,109\n2023-11-16 18:15:51.1805900,879,55",
    "Vidur CSV": "arrived_at,num_prefill_tokens,num_decode_tokens\n1.0,374,44\n5.25,396,109\n5.5,879,55\n",
    "Mooncake JSON lines": "".join(
        json.dumps({"timestamp": 500 + round(s * 1000), "input_length": n, "output_length": m, "hash_ids": [0, n]})
        + "\n"
        for s, n, m in SHAPES
    ),
    "LLMServingSim workload JSON lines": "".join(
        json.dumps({"input_toks": n, "output_toks": m, "arrival_time_ns": 1777142838338653000 + round(s * 1e9)}) + "\n"
        for s, n, m in SHAPES
    ),
    "LLMServingSim bench JSON lines": "".join(
        json.dumps({"request_id": f"b{n}", "input_toks": n, "output_toks": m, "arrival_time": 16.0 + s}) + "\n"
        for s, n, m in SHAPES
    ),
    "Twinpool JSON lines": "\n\n".join(
        json.dumps({"arrival_s": s, "num_prompt_tokens": n, "num_output_tokens": m}) for s, n, m in SHAPES
    ),
    "Twinpool CSV": "arrival_s,num_prompt_tokens,num_output_tokens\r\n0,374,44\r\n4.25,396,109\r\n4.5,879,55\r\n",
    "Twinpool JSON lines of a recording": "".join(
        json.dumps(line) + "\n"
        for line in RECORDING
        + [{"arrival_s": s, "num_prompt_tokens": n, "num_output_tokens": m, "runs": []} for s, n, m in SHAPES]
    ),
}
OWN = '{"arrival_s": 0, "num_prompt_tokens": 5, "num_output_tokens": 6}\n'
MOONCAKE = '{"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [1]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n"


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text.encode())
        return path

    return write


@pytest.fixture
def berlin() -> Iterator[None]:
    """A machine whose clock has summer time."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Europe/Berlin"
    time.tzset()
    yield
    os.environ.pop("TZ")
    if before is not None:
        os.environ["TZ"] = before
    time.tzset()


def _shapes(requests: list[Request]) -> list[tuple[float, int, int]]:
    return [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in requests]


@pytest.mark.parametrize("name", TEXTS)
def test_every_format_says_the_same(name: str, save: Save) -> None:
    path = save(TEXTS[name])
    assert detect_format(path) == name.removesuffix(" of a recording")
    assert _shapes(read_trace(path)) == SHAPES


def test_a_byte_order_mark_and_further_columns_do_not_matter(save: Save) -> None:
    lines = TEXTS["Vidur CSV"].splitlines()
    wider = "\n".join(["\ufeffsession, " + lines[0], *("7," + line for line in lines[1:])])
    assert _shapes(read_trace(save(wider))) == SHAPES


def test_identifiers_and_prefixes_are_kept(save: Save) -> None:
    assert [r.prefix_hashes for r in read_trace(save(TEXTS["Mooncake JSON lines"]))] == [(0, 374), (0, 396), (0, 879)]
    assert [r.request_id for r in read_trace(save(TEXTS["LLMServingSim bench JSON lines"]))] == ["b374", "b396", "b879"]


def test_requests_are_sorted_and_ties_keep_the_file_s_order(save: Save) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n9,1,1\n7,2,1\n9,3,1\n7,4,1\n"
    path = save(text)
    assert _shapes(read_trace(path)) == [(0, 2, 1), (0, 4, 1), (2, 1, 1), (2, 3, 1)]
    assert _shapes(read_trace(path, limit=3)) == [(0, 2, 1), (0, 4, 1), (2, 1, 1)]
    assert len({request.request_id for request in read_trace(path)}) == 4


def test_stretching_changes_times_alone(save: Save) -> None:
    path = save(TEXTS["Azure CSV"])
    assert _shapes(read_trace(path, stretch=2.0)) == [(2 * s, n, m) for s, n, m in SHAPES]


@pytest.mark.usefixtures("berlin")
def test_dates_do_not_know_where_they_are_read(save: Save) -> None:
    """Between these two the local clock went back by an hour, and the trace's did not."""
    rows = "2023-10-29 01:30:00.5,1,1\n2023-10-29 03:30:00.75,1,1\n"
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    assert [r.arrival_s for r in read_trace(save(header + rows))] == [0, 7200.25]
    with_offset = "2023-10-29 01:30:00+00:00,1,1\n2023-10-29 03:30:00+01:00,1,1\n"
    assert [r.arrival_s for r in read_trace(save(header + with_offset))] == [0, 3600]


requests_ = st.lists(
    st.builds(
        Request,
        st.text(min_size=1, max_size=8),
        st.floats(0, 1e6),
        st.integers(1, 200_000),
        st.integers(1, 10_000),
        st.lists(st.integers(-(2**63), 2**64), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda request: request.request_id,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(requests_)
def test_what_was_written_is_read_again(tmp_path: Path, requests: list[Request]) -> None:
    first, *rest = sorted(requests, key=lambda request: request.arrival_s)
    from_zero = [Request(first.request_id, 0.0, *_lengths(first)), *rest]
    write_trace(tmp_path / "trace", from_zero)
    assert read_trace(tmp_path / "trace") == from_zero


def _lengths(request: Request) -> tuple[int, int, tuple[int, ...]]:
    return request.num_prompt_tokens, request.num_output_tokens, request.prefix_hashes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["is empty"]),
        (" \n\n", ["is empty"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ["no requests"]),
        (json.dumps(RECORDING[0]), ["no requests"]),
        ("TIMESTAMP,ContextTokens\n2023-11-16,3\n", ["line 1", "GeneratedTokens is missing", "Azure"]),
        ("model,hardware\nx,y\n", ["line 1", "hardware, model", "known are", "input_length"]),
        ("{}\n", ["line 1", "(none)"]),
        (AZURE + "2023-11-16 18:15:47,1\n", ["line 3", "2 columns", "header has 3"]),
        (AZURE + "yesterday,1,1\n", ["line 3", "TIMESTAMP is 'yesterday'", "2023-11-16"]),
        (AZURE + "2023-11-16 18:15:47,-1,1\n", ["line 3", "ContextTokens is '-1'", "at least 1"]),
        (AZURE + "2023-11-16 18:15:47,1,0\n", ["line 3", "GeneratedTokens is '0'"]),
        (AZURE + "2023-11-16 18:15:47,1.5,1\n", ["line 3", "'1.5'", "whole number"]),
        (AZURE + "2023-11-16 18:15:47,,1\n", ["line 3", "ContextTokens is ''"]),
        (AZURE + OWN, ["line 3", "TIMESTAMP is '{"]),
        (TEXTS["Vidur CSV"].replace("5.25", "-5.25"), ["line 3", "arrived_at is '-5.25'", "from 0"]),
        (TEXTS["Vidur CSV"].replace("5.25", "nan"), ["line 3", "arrived_at is 'nan'"]),
        ("arrived_at," + AZURE.replace("GeneratedTokens", "num_prefill_tokens"), ["line 1", "missing"]),
        (OWN + MOONCAKE, ["line 2", "Mooncake", "Twinpool", "one format"]),
        (
            OWN[:-2] + ', "timestamp": 1, "input_length": 1, "output_length": 1}',
            ["line 1", "at once", "Twinpool and Mooncake"],
        ),
        (OWN + "\n" + '{"arrival_s": 1, "num_prompt_tokens": 5}\n', ["line 3", "num_output_tokens is missing"]),
        (OWN + AZURE, ["line 2", "not JSON"]),
        (OWN + "[1]\n", ["line 2", "'[1]' is no JSON object", "object a line"]),
        ("[" * 100_000, ["line 1", "not JSON"]),
        (OWN.replace("5", "null"), ["line 1", "num_prompt_tokens is None"]),
        (OWN.replace("5", "true"), ["line 1", "num_prompt_tokens is True"]),
        (OWN.replace("0", "1e999"), ["line 1", "arrival_s is inf"]),
        (OWN.replace("5", "1" + "0" * 400), ["line 1", "num_prompt_tokens is 1000"]),
        (OWN.replace("0", "-0.5"), ["line 1", "arrival_s is -0.5"]),
        (OWN[:-2] + ', "request_id": ""}', ["line 1", "request_id is ''"]),
        (OWN[:-2] + ', "request_id": "r1"}\n' + OWN, ["line 2", "'r1'", "as in line 1"]),
        (MOONCAKE.replace("[1]", "[1, true]"), ["line 1", "hash_ids is [1, True]", "whole numbers"]),
        (MOONCAKE.replace("[1]", "7"), ["line 1", "hash_ids is 7"]),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_key(text: str, told: list[str], save: Save) -> None:
    path = save(text)
    with pytest.raises(ConfigError) as refusal:
        read_trace(path)
    assert [part for part in (str(path), *told) if part not in str(refusal.value)] == []


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot write the trace"):
        write_trace(tmp_path / "none" / "trace", [])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_trace(tmp_path / "binary")


@pytest.mark.parametrize("stretch", [0.0, -1.0, float("nan"), float("inf")])
def test_time_is_only_stretched_by_a_positive_factor(stretch: float, save: Save) -> None:
    with pytest.raises(ConfigError, match="stretch"):
        read_trace(save(OWN), stretch=stretch)


def test_a_limit_below_one_is_refused(save: Save) -> None:
    with pytest.raises(ConfigError, match="limit"):
        read_trace(save(OWN), limit=0)


def test_the_public_mooncake_trace_shares_the_prefixes_it_is_known_for() -> None:
    """With a cache that forgets nothing, 37 % of its blocks were there before."""
    root = Path(os.environ.get("TWINPOOL_DATA", Path(__file__).parents[4] / "shared" / "data"))
    path = root / "mooncake_conversation.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}; TWINPOOL_DATA names the folder of the public traces")
    hashes = [block for request in read_trace(path) for block in request.prefix_hashes]
    assert 1 - len(set(hashes)) / len(hashes) == pytest.approx(0.37, abs=0.005)

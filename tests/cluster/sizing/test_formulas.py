"""The closed formulas against worked examples in print: Llama 3.1 8B on an H100, a 10B model, a laptop's overheads."""

import pytest
from hypothesis import given, strategies as st
from twinpool.cluster.sizing import formulas
from twinpool.cluster.sizing.devices import Device, load_devices, load_links
from twinpool.cluster.sizing.model_shape import ModelShape

MS, US = 1e-3, 1e-6
# As the example rounds it: 8.0e9 parameters; its config has 8.03e9.
LLAMA_8B = ModelShape("8B", 8_000_000_000, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
LLAMA_70B = ModelShape("70B", 70_000_000_000, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128)
QWEN_7B = ModelShape("7B", 7_615_000_000, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128)
TEN_B = ModelShape("10B", 10_000_000_000, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
H100 = load_devices()["h100"]
EXPECTED_H100 = H100.at(0.6, 0.8)

shapes = st.builds(
    ModelShape,
    name=st.just("any"),
    num_params=st.integers(10**8, 10**11),
    num_layers=st.integers(1, 100),
    num_heads=st.just(32),
    num_kv_heads=st.sampled_from([1, 8, 32]),
    head_dim=st.sampled_from([64, 128]),
    bytes_per_param=st.sampled_from([0.5, 2.0, 4.0]),
)
devices = st.builds(Device, st.just("any"), st.floats(1e12, 1e16), st.floats(1e10, 1e13), st.floats(1e9, 1e12))


def test_the_ridge_point_of_an_h100() -> None:
    assert formulas.ridge_flops_per_byte(H100) == pytest.approx(295.2, abs=0.05)
    assert formulas.knee_tokens(LLAMA_8B, H100) == pytest.approx(295.2, abs=0.05)


def test_kv_bytes_of_a_token() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 131_072
    assert LLAMA_70B.kv_bytes_per_token == 327_680
    assert QWEN_7B.kv_bytes_per_token == 57_344


def test_intensity_is_the_number_of_tokens_that_share_a_read_less_what_the_kv_costs() -> None:
    assert formulas.intensity_flops_per_byte(LLAMA_8B, 2000) == 2000
    assert formulas.intensity_flops_per_byte(LLAMA_8B, 1) == 1
    assert formulas.intensity_flops_per_byte(LLAMA_8B, 200, 200 * 2000) == pytest.approx(46.8, abs=0.05)
    assert formulas.intensity_flops_per_byte(QWEN_7B, 1024, 1024) == pytest.approx(1020.07, abs=0.05)
    assert formulas.intensity_flops_per_byte(QWEN_7B, 1, 1024) == pytest.approx(0.9962, abs=0.0001)


def test_decode_ceilings_of_an_h100() -> None:
    alone = 1 / formulas.decode_step_s(LLAMA_8B, H100, 1, 2000)
    each_of_200 = 1 / formulas.decode_step_s(LLAMA_8B, H100, 200, 2000)
    assert alone == pytest.approx(206.0, abs=0.05)
    assert each_of_200 == pytest.approx(48.96, abs=0.005)
    assert 200 * each_of_200 / alone == pytest.approx(47.5, abs=0.05)


def test_decode_steps_at_the_expected_bandwidth() -> None:
    step_s = formulas.decode_step_s(LLAMA_8B, EXPECTED_H100, 1, 2000)
    assert step_s == pytest.approx(6.07 * MS, abs=0.005 * MS)
    long_s = formulas.decode_step_s(LLAMA_8B, EXPECTED_H100, 1, 128_000)
    assert long_s / step_s == pytest.approx(2.02, abs=0.005)


def test_a_batch_beyond_the_ridge_is_bound_by_compute() -> None:
    """Without history a step multiplies 2 N per sequence: 1000 of them take as long as a prefill of 1000 tokens."""
    step_s = formulas.decode_step_s(LLAMA_8B, H100, 1000, 0)
    assert step_s == pytest.approx(1000 * 16e9 / 989e12, rel=1e-4)
    assert formulas.decode_step_s(LLAMA_8B, H100, 295, 0) == pytest.approx(16e9 / 3.35e12)


def test_how_many_sequences_memory_holds() -> None:
    assert formulas.max_sequences(LLAMA_8B, H100, 2000) == 213
    assert 30_000 * LLAMA_8B.kv_bytes_per_token == pytest.approx(3.93e9, abs=0.005e9)
    assert formulas.max_sequences(LLAMA_8B, H100, 30_000) == 14
    assert formulas.max_sequences(LLAMA_70B, H100, 2000) == 0


def test_prefill_of_an_h100() -> None:
    assert formulas.weight_flops(LLAMA_8B, 8000) == 128e12
    assert formulas.weight_flops(LLAMA_8B, 8000) / EXPECTED_H100.flops_per_s == pytest.approx(215.7 * MS, abs=0.05 * MS)
    assert formulas.weight_flops(LLAMA_8B, 2000) / EXPECTED_H100.flops_per_s == pytest.approx(53.9 * MS, abs=0.05 * MS)
    assert formulas.prefill_s(LLAMA_8B, EXPECTED_H100, 2000) == pytest.approx(55.7 * MS, abs=0.05 * MS)
    assert formulas.prefill_s(LLAMA_8B, EXPECTED_H100, 30_000) == pytest.approx(1.206, abs=0.001)


def test_what_attention_adds_to_a_prefill() -> None:
    assert formulas.attention_share(LLAMA_8B, 8000) == pytest.approx(0.131, abs=0.0005)
    assert 1 + formulas.attention_share(LLAMA_8B, 128_000) == pytest.approx(3.10, abs=0.005)


def test_chunks_of_512_beside_a_decode_step() -> None:
    """Sixteen passes of 20 ms cost 48 % more than the whole prefill when times add; when the step rides along, 2 %."""
    chunk_s = formulas.weight_flops(LLAMA_8B, 512) / EXPECTED_H100.flops_per_s
    step_s = formulas.decode_step_s(LLAMA_8B, EXPECTED_H100, 1, 2000)
    passes = formulas.num_passes(8000, 512)
    assert passes == 16
    assert chunk_s == pytest.approx(13.8 * MS, abs=0.05 * MS)
    assert formulas.prefill_s(LLAMA_8B, EXPECTED_H100, 512) == pytest.approx(14 * MS, abs=0.1 * MS)
    assert passes * (chunk_s + step_s) == pytest.approx(0.320, abs=0.003)
    assert passes * (chunk_s + step_s) / 0.2157 - 1 == pytest.approx(0.48, abs=0.01)
    assert passes * max(chunk_s, step_s) == pytest.approx(0.221, abs=0.0005)


def test_a_round_of_speculation() -> None:
    """Four reads of a 1B draft and a check of 6.3 ms give three tokens."""
    draft = ModelShape("1B", 1_000_000_000, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64)
    drafts_s = 4 * formulas.decode_step_s(draft, EXPECTED_H100, 1, 0)
    assert drafts_s == pytest.approx(2.99 * MS, abs=0.005 * MS)
    assert (drafts_s + 6.3 * MS) / 3 == pytest.approx(3.1 * MS, abs=0.005 * MS)


@pytest.mark.parametrize(
    ("bytes_per_s", "ms_8b", "ms_70b"),
    [
        (450e9, 0.58, 1.46),
        (50e9, 5.2, 13.1),
        (25e9, 10.5, 26.2),
        (12.5e9, 21.0, 52.4),
        (3.125e9, 84, 210),
        (1.25e9, 210, 524),
    ],
)
def test_transfers_of_2000_tokens(bytes_per_s: float, ms_8b: float, ms_70b: float) -> None:
    assert bytes_per_s in load_links().values()
    for shape, expected_ms in ((LLAMA_8B, ms_8b), (LLAMA_70B, ms_70b)):
        transfer_s = formulas.transfer_s(2000, shape.kv_bytes_per_token, bytes_per_s)
        assert transfer_s == pytest.approx(expected_ms * MS, rel=0.01)
    assert formulas.transfer_s(0, 131_072, bytes_per_s, latency_s=1 * MS) == 1 * MS


def test_a_10b_model_on_a_device_of_2_pflops() -> None:
    """A prompt of 2000 is bound by compute; 64 tokens take as long as 1, the time of reading 20 GB."""
    device = Device("2 PFLOP/s, 8 TB/s", 2e15, 8e12, 192e9)
    assert formulas.ridge_flops_per_byte(device) == 250
    assert formulas.weight_flops(TEN_B, 2000) / device.flops_per_s == pytest.approx(20 * MS)
    assert formulas.prefill_s(TEN_B, device, 64) == formulas.prefill_s(TEN_B, device, 1) == pytest.approx(2.5 * MS)


def test_the_overhead_of_chunks_counts_the_extra_passes() -> None:
    """32 passes are 31 more than the one that any prefill has: 0.989 s, twice the prefill of 0.486 s; 32 were 1.021."""
    overhead_s = formulas.chunking_overhead_s(8192, 256, 31.9 * MS)
    assert formulas.num_passes(8192, 256) == 32
    assert overhead_s == pytest.approx(0.989, abs=0.0005)
    assert overhead_s / 0.486 == pytest.approx(2.03, abs=0.01)
    assert formulas.chunking_overhead_s(256, 256, 31.9 * MS) == 0


def test_what_a_cached_token_has_to_cost_on_the_laptop() -> None:
    """0.22 us of memory reads (Qwen3-0.6B): half of 0.47, the least that the noise of its measurement lets show."""
    qwen = ModelShape("0.6B", 596_049_920, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128)
    laptop = load_devices()["rtx-3080ti-laptop"]
    per_token_s = qwen.kv_bytes_per_token / laptop.bytes_per_s
    assert qwen.kv_bytes_per_token == 114_688
    assert per_token_s == pytest.approx(0.22 * US, abs=0.005 * US)
    longer, shorter = (formulas.decode_step_s(qwen, laptop, 1, n) for n in (16_384, 128))
    assert (longer - shorter) / 16_256 == pytest.approx(per_token_s)


def test_the_best_chunk_of_a_device_without_overhead() -> None:
    """It is the knee for a step without history: as long to compute as the weights are to read."""
    knee = formulas.knee_tokens(LLAMA_8B, H100)
    assert formulas.best_chunk_tokens(LLAMA_8B, H100, 1, 0) == pytest.approx(knee)
    assert formulas.best_chunk_tokens(LLAMA_8B, H100, 1, 2000) == pytest.approx(knee * 16.262 / 16, rel=1e-4)


def test_experts_are_read_as_tokens_reach_them() -> None:
    """Eight experts, two a token: one token reads two, two tokens 3.5 on average, many tokens all."""
    shape = ModelShape("MoE", 90, 1, 1, 1, 1, num_expert_params=80, num_experts=8, num_experts_per_token=2)
    assert shape.num_active_params == 30
    assert [shape.read_bytes(n) for n in (1, 2)] == [60, pytest.approx(90)]
    assert shape.read_bytes(1000) == pytest.approx(shape.weights_bytes) == 180
    assert formulas.weight_flops(shape, 10) == 600


@given(shapes, devices, st.integers(1, 512), st.integers(1, 100_000))
def test_more_is_never_faster(shape: ModelShape, device: Device, num_sequences: int, context: int) -> None:
    step_s = formulas.decode_step_s(shape, device, num_sequences, context)
    assert step_s <= formulas.decode_step_s(shape, device, num_sequences + 1, context)
    assert step_s <= formulas.decode_step_s(shape, device, num_sequences, context + 1)
    assert step_s <= formulas.decode_step_s(shape, device.at(0.6, 0.8), num_sequences, context)
    assert formulas.prefill_s(shape, device, context) <= formulas.prefill_s(shape, device, context + 1)
    assert formulas.max_sequences(shape, device, context) >= formulas.max_sequences(shape, device, context + 1)


@given(shapes, devices, st.integers(1, 20_000), st.integers(1, 4096))
def test_chunks_compute_what_one_pass_does(shape: ModelShape, device: Device, num_tokens: int, chunk: int) -> None:
    """Never less time than one pass; exactly its FLOPs, and its time too where every chunk is bound by compute."""
    starts = range(0, num_tokens, chunk)
    flops = sum(formulas.attention_flops(shape, min(chunk, num_tokens - start), start) for start in starts)
    assert flops == pytest.approx(formulas.attention_flops(shape, num_tokens))
    in_chunks_s = formulas.chunked_prefill_s(shape, device, num_tokens, chunk)
    assert in_chunks_s >= formulas.prefill_s(shape, device, num_tokens) * (1 - 1e-9)
    assert len(starts) == formulas.num_passes(num_tokens, chunk)

"""What the bytes of a KV row mean."""

from dataclasses import replace

import pytest
from twinpool.kvtransfer.layout import DTYPE_BYTES, KVLayout

SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def test_sizes_of_the_embedded_model() -> None:
    """22.5 KiB a token, as DESIGN says."""
    assert SMOLLM2.row_bytes == 384
    assert SMOLLM2.token_bytes == 22.5 * 1024
    assert SMOLLM2.frame_bytes(30, 1) == SMOLLM2.token_bytes
    assert SMOLLM2.frame_bytes(2, 7) == 2 * 2 * 7 * 384
    assert SMOLLM2.frame_bytes(0, 7) == SMOLLM2.frame_bytes(7, 0) == 0


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_sizes_of_the_types(dtype: str, size: int) -> None:
    assert KVLayout(1, 1, 1, dtype).row_bytes == size
    assert set(DTYPE_BYTES) == {"float32", "bfloat16", "float16"}


def test_the_fingerprint_tells_every_field_apart_and_is_stable() -> None:
    """bfloat16 and float16 have the same size: the fingerprint, not the length, must tell."""
    changes = [{"num_layers": 29}, {"num_kv_heads": 4}, {"head_dim": 32}, {"dtype": "float16"}]
    prints = {SMOLLM2.fingerprint, *(replace(SMOLLM2, **change).fingerprint for change in changes)}
    assert len(prints) == 5
    assert replace(SMOLLM2, num_kv_heads=64, head_dim=3).fingerprint != SMOLLM2.fingerprint
    assert SMOLLM2.fingerprint == replace(SMOLLM2).fingerprint
    assert 0 <= SMOLLM2.fingerprint < 2**64

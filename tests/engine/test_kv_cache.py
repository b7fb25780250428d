"""The wire layout of gathered rows, and that gathering is safe beside other gathers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from twinpool.cluster.protocol.errors import ProtocolError
from twinpool.engine.kv_cache import POISON, KVCache, num_blocks_that_fit
from twinpool.kvtransfer.layout import KVLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def random_cache(dtype: str, block_size: int, num_blocks: int = 16) -> KVCache:
    cache = KVCache(KVLayout(3, 2, 4, dtype), num_blocks, block_size, torch.device("cpu"))
    for layer in cache.layers:
        layer.normal_()
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_bytes_are_layers_then_keys_and_values_then_tokens(dtype: str) -> None:
    """The buffer reads as `[layers, 2, tokens, row]` in logical token order; block ids are nowhere in it."""
    cache, block_table, tokens = random_cache(dtype, 4), [7, 3, 12], range(2, 11)
    payload = cache.gather(block_table, range(1, 3), tokens)
    assert payload.nbytes == cache.layout.frame_bytes(2, len(tokens))
    rows = torch.frombuffer(bytearray(payload), dtype=DTYPES[dtype]).view(2, 2, len(tokens), 2, 4)
    for at, layer in enumerate((1, 2)):
        for kind in (0, 1):
            for i, token in enumerate(tokens):
                assert torch.equal(rows[at, kind, i], cache.layers[layer][block_table[token // 4], kind, token % 4])


@pytest.mark.parametrize("is_read_only", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_into_another_block_size_gives_the_same_bytes_back(dtype: str, is_read_only: bool) -> None:
    """Two caches that differ in block size and block ids hold the same rows after a transfer."""
    source, target = random_cache(dtype, 4), random_cache(dtype, 7)
    payload = source.gather([5, 1, 9, 2], range(3), range(14))
    sent = memoryview(bytes(payload)) if is_read_only else payload
    target.scatter([11, 4], range(3), range(14), sent)
    assert bytes(target.gather([11, 4], range(3), range(14))) == bytes(payload)


def test_scatter_touches_only_its_layers_and_tokens() -> None:
    """Neighbouring tokens of the same block and other layers stay as they were."""
    cache = random_cache("float32", 4)
    before = [layer.clone() for layer in cache.layers]
    cache.scatter([6, 2], range(1, 2), range(3, 6), memoryview(bytes(cache.layout.frame_bytes(1, 3))))
    before[1][6, :, 3] = 0
    before[1][2, :, :2] = 0
    assert all(torch.equal(now, then) for now, then in zip(cache.layers, before, strict=True))


@pytest.mark.parametrize("change", [-1, 1])
def test_scatter_refuses_a_payload_of_another_length(change: int) -> None:
    """Nothing is written when the bytes do not fit the range."""
    cache = random_cache("float32", 4)
    before = [layer.clone() for layer in cache.layers]
    expected = cache.layout.frame_bytes(3, 4)
    with pytest.raises(ProtocolError, match=str(expected)):
        cache.scatter([0], range(3), range(4), memoryview(bytes(expected + change)))
    assert all(torch.equal(now, then) for now, then in zip(cache.layers, before, strict=True))


def test_an_empty_range_is_an_empty_buffer() -> None:
    cache = random_cache("bfloat16", 4)
    payload = cache.gather([0], range(3), range(2, 2))
    assert payload.nbytes == 0
    cache.scatter([0], range(3), range(2, 2), payload)


def test_threads_gather_at_once_without_disturbing_each_other() -> None:
    """Every thread gets a buffer of its own with its own rows."""
    cache = random_cache("bfloat16", 4, num_blocks=64)
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(8)]
    expected = [bytes(cache.gather(table, range(3), range(32))) for table in tables]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: bytes(cache.gather(tables[i % 8], range(3), range(32))), range(200)))
    assert all(rows == expected[i % 8] for i, rows in enumerate(found))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_poison_overwrites_whole_blocks_and_no_others(dtype: str) -> None:
    """Finite in every dtype: a masked row that holds it must weigh nothing."""
    cache = random_cache(dtype, 4, num_blocks=6)
    before = [layer.clone() for layer in cache.layers]
    cache.poison([4, 1])
    for now, then in zip(cache.layers, before, strict=True):
        assert torch.equal(now[[0, 2, 3, 5]], then[[0, 2, 3, 5]])
        assert torch.all(now[[1, 4]] == POISON)
    cache.poison([])
    assert torch.isfinite(cache.layers[0]).all()


def test_blocks_that_fit_never_exceed_the_memory_given() -> None:
    layout = KVLayout(3, 2, 4, "bfloat16")
    num_blocks = num_blocks_that_fit(layout, 16, 100_000)
    cache = KVCache(layout, num_blocks, 16, torch.device("cpu"))
    size = sum(layer.nbytes for layer in cache.layers)
    assert size <= 100_000 < size + size // num_blocks

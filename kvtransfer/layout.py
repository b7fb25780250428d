"""KVLayout: what the bytes of a KV row mean; both ends of a transfer must agree on it (I7).

On the wire a frame holds `[layers, 2, tokens, num_kv_heads * head_dim]` in logical token order, K before V: block ids
and block sizes stay private to each side, so the two caches may differ in both.
"""

from dataclasses import asdict, dataclass
from functools import cached_property

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class KVLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.row_bytes

    def frame_bytes(self, num_layers: int, num_tokens: int) -> int:
        return 2 * num_layers * num_tokens * self.row_bytes

    @cached_property
    def fingerprint(self) -> int:
        """64-bit hash that every frame carries."""
        return xxhash.xxh3_64_intdigest(repr(sorted(asdict(self).items())).encode())

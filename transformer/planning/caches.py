"""What decoding keeps of a text, counted from the spec alone: no arrays, no jax."""

from dataclasses import dataclass

from transformer import spec
from transformer.planning.accounting import BYTES


@dataclass(frozen=True, kw_only=True)
class CacheNumbers:
    """Keys and values that one row keeps; slot positions (one int32 a slot and layer) are not counted.

    Attributes:
      per_token: numbers that a token adds to each layer: 2·K·H, or kv_rank + rope_dim of a latent.
      vectors: how many vectors these are; kept in int8, each has a float32 scale.
      slots: tokens that each layer holds, its sinks and window at most.
      source: the same of the text that cross-attention looks at, or None.
    """

    per_token: tuple[int, ...]
    vectors: tuple[int, ...]
    slots: tuple[int, ...]
    source: "CacheNumbers | None" = None

    @property
    def total(self) -> int:
        """Numbers of all layers together."""
        own = sum(n * slots for n, slots in zip(self.per_token, self.slots, strict=True))
        return own + (self.source.total if self.source else 0)

    def bytes(self, dtype: str) -> int:
        """Bytes of one row in "float32", "bfloat16" or "int8"."""
        scales = sum(n * slots for n, slots in zip(self.vectors, self.slots, strict=True)) if dtype == "int8" else 0
        own = sum(n * slots for n, slots in zip(self.per_token, self.slots, strict=True)) * BYTES[dtype]
        return own + scales * BYTES["float32"] + (self.source.bytes(dtype) if self.source else 0)


def cache_numbers(model: spec.Model, length: int, source_length: int | None = None) -> CacheNumbers:
    """Keys and values that decoding keeps for one row of `length` tokens, as `ops.cache.init` lays them out.

    Args:
      source_length: tokens that the encoder read; by default as many. An encoder alone keeps nothing.
    """
    blocks = model.decoder.layers if model.decoder else ()
    source = length if source_length is None else source_length
    crosses = [block.cross for block in blocks if block.cross]
    return _numbers([b.mixer for b in blocks], length, _numbers(crosses, source) if crosses else None)


def _numbers(mixers: list[spec.Attention | spec.LatentAttention], length: int, source=None) -> CacheNumbers:
    return CacheNumbers(
        per_token=tuple(m.cache_dims.numbers for m in mixers),
        vectors=tuple(m.cache_dims.vectors for m in mixers),
        slots=tuple(min(length, m.mask.sinks + m.mask.window if m.mask.window else length) for m in mixers),
        source=source,
    )

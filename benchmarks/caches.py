"""Writes docs/caches.md: what every published model keeps of a token, as theory says and as `ops.cache` allocates it.

    python benchmarks/caches.py

Nothing runs; buffers are counted by `jax.eval_shape`.
"""

import dataclasses
import importlib
from pathlib import Path

import jax

from transformer import families, spec
from transformer.ops import cache
from transformer.planning.caches import cache_numbers

PAGE = Path(__file__).parents[1] / "docs" / "caches.md"
LENGTH = 32_768
# Sizes that nobody published.
NO_MODEL = ("tiny", "mini")
HEAD = f"""# What caches cost

Made by `python benchmarks/caches.py`. A layer keeps of a token, in numbers: 2·h·d with multi-head attention, 2·g·d with
g groups of queries (GQA), 2·d with one (MQA), kv_rank + rope_dim with latent attention (MLA). A window layer holds
`window` tokens at most. "Allocated" are the bytes of the buffers that `ops.cache.init` makes for one row of
{LENGTH:,} tokens (or the longest that the model takes, where positions are a learned table); they equal the theory
exactly in every row, or this page could not have been written. Cross-attention keeps as much of every token that the
encoder read, once and for all: the second number of bytes a token; allocated for as many tokens. int8 adds a float32
scale a token and head. Positions of the slots, 4 bytes each, are not counted.

| model | layers | attention | numbers a token and layer | bfloat16 bytes a token | allocated: bfloat16 | int8 |
|---|---|---|---|---|---|---|
"""


def allocated(model: spec.Model, length: int, dtype: str) -> int:
    """Bytes of the keys and values of one row, and their scales."""
    held = jax.eval_shape(lambda: cache.init(model.decoder, 1, length, dtype, source_length=length))
    held = held.map(lambda layer: dataclasses.replace(layer, positions=None))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))


def attention(mixer: spec.Attention | spec.LatentAttention) -> tuple[str, str]:
    """(kind, formula with its numbers) of a layer."""
    window = f", window {mixer.mask.window:,}" if mixer.mask.window else ""
    if isinstance(mixer, spec.LatentAttention):
        return f"MLA{window}", f"{mixer.kv_rank} + {mixer.rope_dim} = {mixer.cache_dims.numbers:,}"
    heads, groups = mixer.num_heads, mixer.num_kv_heads
    kind = "MHA" if groups == heads else "MQA" if groups == 1 else "GQA"
    return f"{kind}{window}", f"2·{groups}·{mixer.head_dim} = {mixer.cache_dims.numbers:,}"


def row(family: str, size: str) -> str:
    """A line of the table; none for an encoder alone.

    Raises:
      AssertionError: what is allocated is not what the theory says.
    """
    model = families.build_spec(importlib.import_module(f"configs.{family}").get_config(size).model.to_dict())
    if model.decoder is None:
        return ""
    length = min(LENGTH, model.length_limit or LENGTH)
    numbers = cache_numbers(model, length)
    held = {dtype: allocated(model, length, dtype) for dtype in cache.CACHE_DTYPES}
    for dtype, size_held in held.items():
        assert size_held == numbers.bytes(dtype), (family, size, dtype, size_held, numbers.bytes(dtype))
    blocks = model.decoder.layers
    kinds = dict.fromkeys(attention(block.mixer) for block in blocks)
    kinds |= {(f"{kind}, cross", formula): None for b in blocks if b.cross for kind, formula in [attention(b.cross)]}
    cells = [
        f"{family} {size}",
        str(model.decoder.num_layers),
        "; ".join(kind for kind, _ in kinds),
        "; ".join(dict.fromkeys(formula for _, formula in kinds)),
        f"{sum(numbers.per_token) * 2:,}" + (f" + {sum(numbers.source.per_token) * 2:,}" if numbers.source else ""),
        *(f"{held[dtype] / 2**20:,.1f} MiB" for dtype in ("bfloat16", "int8")),
    ]
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """The whole page."""
    published = {family: importlib.import_module(f"configs.{family}").SIZES for family in families.names()}
    sizes = [(family, size) for family, sizes in published.items() for size in sizes if not size.startswith(NO_MODEL)]
    return HEAD + "".join(row(family, size) for family, size in sizes)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}: {len(page().splitlines())} lines")

"""What the tests share: the discovered families, tiny models that are nowhere degenerate, and packed batches."""

import functools
import importlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import pytest

from transformer import families, spec
from transformer.nn import initial
from transformer.nn.context import Source, default_positions
from transformer.nn.model import Transformer
from transformer.settings import Compute

FAMILIES = families.names()
abstract_params, shardings = initial.abstract_params, initial.param_shardings
# Tiny windows are 8: three of them and more, and several blocks of 16.
LENGTH = 40


def page(family: str) -> Any:
    """The config page of a family."""
    return importlib.import_module(f"configs.{family}")


def build_spec(family: str, size: str = "tiny"):
    """The spec of a family's size, through its config page."""
    return families.build_spec(page(family).get_config(size).model.to_dict())


@functools.cache
def tiny_spec(family: str):
    """The spec of a family's tiny size."""
    return build_spec(family)


def model(family: str, **compute: Any) -> Transformer:
    """The tiny model of a family; attention and experts by the formula unless told otherwise."""
    return Transformer(tiny_spec(family), Compute(**{"attention": "reference", "experts": "dense", **compute}))


@functools.cache
def params(family: str) -> Any:
    """Random parameters of the tiny model: no bias, sink or norm scale is left at zero or one.

    Queries that are multiplied by nothing are as small as that asks for, lest each look at one key alone.
    """
    rng, built = np.random.default_rng(0), tiny_spec(family)
    one = 1 - built.trunk.layers[0].norm.offset
    unscaled = built.trunk.layers[0].mixer.scale == 1

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        if unscaled and any(entry.key == "query" for entry in path):
            noise = noise / np.sqrt(leaf.shape[-1])
        return one + 0.1 * noise if path[-1].key == "scale" else noise / np.sqrt(built.d_model)

    return jax.tree.map_with_path(draw, nn.meta.unbox(initial.abstract_params(model(family))))


def head_dims(mixer) -> set[int]:
    """Features of a head: of queries and keys, of values, of the part without rotation."""
    if isinstance(mixer, spec.LatentAttention):
        return {mixer.nope_dim, mixer.nope_dim + mixer.rope_dim, mixer.v_dim}
    return {mixer.head_dim}


def ranks(mixer, out: bool = False) -> set[int]:
    """Widths of the latents: into a projection, or out of one, where the rotary key comes along."""
    if not isinstance(mixer, spec.LatentAttention):
        return set()
    return {mixer.q_rank, mixer.kv_rank + (mixer.rope_dim if out else 0)}


def normed(mixer) -> set[int]:
    """Widths of the norms within an attention layer."""
    if isinstance(mixer, spec.LatentAttention):
        return ranks(mixer)
    heads = (mixer.num_heads, mixer.num_kv_heads) if mixer.qk_norm_joint else (1, 1)
    return {number * mixer.head_dim for number in heads}


def hidden_widths(ffn) -> set[int]:
    """Hidden widths of a feed-forward layer, or of a mixture's experts."""
    if isinstance(ffn, spec.MoE):
        return {ffn.expert.d_ff} | ({ffn.shared.d_ff} if ffn.shared else set())
    return {ffn.d_ff}


def routes(family: str) -> bool:
    """True where some layer is a mixture of experts."""
    return any(isinstance(block.ffn, spec.MoE) for block in tiny_spec(family).layers)


def reads_source(family: str) -> bool:
    """True where a decoder looks at what an encoder made of another text."""
    return tiny_spec(family).trunk.crosses


# Those that generate from a text alone, and those of all shapes with a decoder.
DECODERS = [family for family in FAMILIES if tiny_spec(family).encoder is None]
GENERATORS = [family for family in FAMILIES if tiny_spec(family).decoder is not None]


def often(chosen: Collection[str], of: Sequence[str] = tuple(FAMILIES)) -> list[Any]:
    """Families for a test; those that bring it no mechanism beyond the chosen ones' only among the slow proofs."""
    assert set(chosen) <= set(of)
    return [pytest.param(family, marks=[] if family in chosen else [pytest.mark.slow]) for family in of]


def random_tokens(family: str, rows: int, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    """Token ids [rows, length]."""
    return np.random.default_rng(seed).integers(0, tiny_spec(family).vocab_size, (rows, length), dtype=np.int32)


class Batch(NamedTuple):
    """Arguments of `token_losses`, [B, T] each or None, and the weight of every token's loss.

    `source` is there where the model reads one: documents of other lengths under the same segment ids.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray | None = None
    segment_ids: np.ndarray | None = None
    source: Source | None = None

    @property
    def options(self) -> dict[str, Source]:
        """Keyword arguments of a model's methods."""
        return {} if self.source is None else {"source": self.source}


def random_segments(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Ids of two to three documents a row, of random lengths beyond the window, and padding at the end."""
    segments = np.zeros((rows, length), np.int32)
    for row in segments:
        cuts = np.cumsum(rng.integers(10, 16, size=3))
        for i, (start, stop) in enumerate(zip((0, *cuts), (*cuts, length - 2), strict=False)):
            row[start : min(stop, length - 2)] = i + 1
    return segments


def positions_of(segments: np.ndarray) -> np.ndarray:
    """What the model takes where it is told none: given all the same, every batch of the laws is one program's."""
    return np.asarray(default_positions(segments, segments.shape))


@functools.cache
def packed_batch(family: str, rows: int = 8, length: int = LENGTH) -> Batch:
    """Rows of packed documents (`random_segments`), and of what they are made from where the model reads that."""
    rng = np.random.default_rng(7)
    segments = random_segments(rng, rows, length)
    source = None
    if reads_source(family):
        lengths = random_segments(rng, rows, length + 8)
        source = Source(random_tokens(family, rows, length + 8, seed=2), positions_of(lengths), lengths)
    tokens = random_tokens(family, rows, length)
    targets = random_tokens(family, rows, length, seed=1)
    return Batch(tokens, targets, (segments > 0).astype(np.float32), positions_of(segments), segments, source)


class Result(NamedTuple):
    """Losses [B, T] (zero where the weight is) and the gradient of their sum."""

    losses: np.ndarray
    gradients: Any


@functools.cache
def objective(net: Transformer):
    """The jitted (params, batch) -> Result of a model."""

    def total(values, batch: Batch):
        places = batch.positions, batch.segment_ids
        losses = net.apply(
            {"params": values}, batch.tokens, batch.targets, *places, **batch.options, method="token_losses"
        )
        losses = losses * batch.weights
        return losses.sum(), losses

    def both(values, batch: Batch) -> Result:
        gradients, losses = jax.grad(total, has_aux=True)(values, batch)
        return Result(losses, gradients)

    return jax.jit(both)


@functools.cache
def packed_result(family: str, **compute) -> Result:
    """Losses and gradients of the packed batch."""
    return jax.device_get(objective(model(family, **compute))(params(family), packed_batch(family)))


def assert_same(got: Result, want: Result, rtol: float = 2e-4, atol: float = 5e-6) -> None:
    """Losses and every gradient leaf agree; `atol` is relative to the largest gradient of all.

    Some leaves are noise alone (a key's bias moves no probability), so a leaf's own scale isn't enough.
    """
    np.testing.assert_allclose(got.losses, want.losses, rtol=0, atol=5e-5, err_msg="losses")
    assert_same_gradients(got.gradients, want.gradients, rtol, atol)


def assert_same_gradients(got: Any, want: Any, rtol: float = 2e-4, atol: float = 5e-6) -> None:
    """Every leaf agrees within `rtol` of its own largest value plus `atol` of the tree's."""
    scale = max(np.abs(x).max() for x in jax.tree.leaves(want))
    assert np.isfinite(scale) and scale > 0

    def compare(path, a, b):
        limit = rtol * np.abs(b).max() + atol * scale
        worst = np.abs(np.asarray(a) - b).max()
        assert worst <= limit, f"gradient of {jax.tree_util.keystr(path)}: differs by {worst:.1e}, limit {limit:.1e}"

    jax.tree.map_with_path(compare, got, want)


def all_layers(built: spec.Model, tree: Any) -> list[Any]:
    """`layers` of every stack of a model, from a tree with a subtree for each."""
    return [layer for name, stack in built.stacks.items() for layer in layers(stack, tree[name])]


def layers(stack: Any, tree: Any) -> list[Any]:
    """The subtrees of a stack's tree (parameters or intermediates) in the order in which its layers run."""
    body = [
        jax.tree.map(lambda x, r=r: x[r], tree["body"][f"block_{i}"])
        for r in range(stack.repeats)
        for i in range(len(stack.body))
    ]
    ends = {part: [tree[f"{part}_{i}"] for i in range(len(getattr(stack, part)))] for part in ("head", "tail")}
    return ends["head"] + body + ends["tail"]

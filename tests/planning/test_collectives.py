"""The reader of compiled programs, on programs whose collectives are known."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer.planning.collectives import by_axes, collectives

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def found(function):
    """Collectives of a function that runs on each device's part of float32 [8, 64]."""
    spec = P(("data", "fsdp"))
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 3)
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
    return collectives(jax.jit(run).lower(x).compile().as_text(), mesh.shape)


def gathered(x, axes):
    return jax.lax.all_gather(x, axes).sum(0).reshape(-1, *x.shape).sum(0)


def moved(x, axis):
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True).reshape(x.shape)


PART = 2 * 64 * 4  # bytes on a device


@pytest.mark.parametrize("axes", [("data",), ("fsdp",), ("tensor",), ("data", "tensor"), ("data", "fsdp", "tensor")])
@pytest.mark.parametrize(
    ("kind", "function", "sent"),
    [
        ("all-reduce", jax.lax.psum, lambda n, g: 2 * n * (g - 1) / g),
        ("all-gather", gathered, lambda n, g: n * (g - 1)),
        ("all-to-all", moved, lambda n, g: n * (g - 1) / g),
    ],
)
def test_kind_axes_and_bytes(kind, function, sent, axes):
    [c] = found(lambda x: function(x, axes))
    assert (c.kind, c.axes, c.dtype, c.operand, c.times) == (kind, axes, "f32", PART, 1)
    assert c.total == sent(PART, 2 ** len(axes))


def test_a_permutation_goes_along_the_axis_that_it_changes():
    [c] = found(lambda x: jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]))
    assert (c.kind, c.axes, c.total) == ("collective-permute", ("fsdp",), PART)


def test_loops_multiply_and_nest():
    def again(times, function):
        return lambda x: jax.lax.fori_loop(0, times, lambda _, y: function(y), x)

    total = functools.partial(jax.lax.psum, axis_name="tensor")
    [c] = found(again(3, again(5, lambda x: jnp.sin(total(x)))))
    assert c.times == 15 and c.total == 15 * PART


def test_of_branches_the_one_that_sends_least_counts():
    def either(x):
        return jax.lax.cond(x[0, 0] > 0, lambda y: gathered(y, "fsdp"), lambda y: jax.lax.psum(2 * y, "fsdp"), x)

    assert by_axes(found(either)) == {(("fsdp",), "all-reduce"): PART}


# As compilers for TPUs write: a fusion for a reduce-scatter, tuples of started ones, tiles in shapes, groups by axes.
TPU = """HloModule jit_f, is_scheduled=true

%all-reduce-scatter.1 (input: f32[8,64]) -> f32[2,64] {
  %input = f32[8,64]{1,0:T(8,128)} parameter(0)
  %all-reduce.3 = f32[8,64]{1,0:T(8,128)} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%a
  ROOT %cut = f32[2,64]{1,0:T(8,128)} dynamic-slice(%all-reduce.3, %c, %c), dynamic_slice_sizes={2,64}
}

%condition (p: (s32[], f32[8,64])) -> pred[] {
  %p = (s32[], f32[8,64]{1,0}) parameter(0)
  %n = s32[] constant(7)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (q: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %q = (s32[], f32[8,64]{1,0}) parameter(0)
  %y = f32[8,64]{1,0:T(8,128)S(1)} get-tuple-element(%q), index=1
  %fusion = f32[2,64]{1,0:T(8,128)} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  %started = (bf16[2,64]{1,0}, bf16[8,64]{1,0}) all-gather-start(%z), replica_groups=[2,4]<=[8], dimensions={0}
  %z = bf16[2,64]{1,0:T(8,128)(2,1)} convert(%fusion)
  %both = (f32[8,64]{1,0}, /*index=1*/f32[2,64]{1,0}) all-reduce(%y, %fusion), replica_groups=mesh['a'=4,'b'=2] {'b'}
  ROOT %t = (s32[], f32[8,64]{1,0}) tuple(%i, %y)
}

ENTRY %main (x: f32[8,64]) -> f32[8,64] {
  %x = f32[8,64]{1,0:T(8,128)} parameter(0)
  %kernel = f32[8,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={text="a
}}, %w = more"}
  %while = (s32[], f32[8,64]{1,0}) while(%start), condition=%condition, body=%body
}
"""


def test_what_tpu_compilers_write():
    got = [(c.kind, c.axes, c.dtype, c.operand, c.sent, c.times) for c in collectives(TPU, {"fsdp": 4, "tensor": 2})]
    whole, part = 8 * 64 * 4, 2 * 64 * 4
    assert got == [
        ("reduce-scatter", None, "f32", whole, whole * 3 / 4, 7),
        ("all-gather", None, "bf16", part // 2, part // 2 * 3, 7),
        ("all-reduce", ("tensor",), "f32", whole + part, float(whole + part), 7),
    ]
    assert [c.axes for c in collectives(TPU, {"data": 2, "fsdp": 4})][:2] == [("fsdp",), ("fsdp",)]
    assert [c.axes for c in collectives(TPU, {"fsdp": 8})] == [("fsdp",)] * 3, "parts of an axis"


def test_a_loop_of_unknown_length_is_refused():
    text = TPU.replace("%n = s32[] constant(7)", "%n = s32[] get-tuple-element(%p), index=0")
    with pytest.raises(ValueError, match="while: a loop whose number of rounds"):
        collectives(text, {"data": 8})

"""Compiled programs whose work is known: products, loops, memory, and what runs beside what."""

import jax
import jax.numpy as jnp
import pytest

from transformer.planning.collectives import collectives
from transformer.planning.hlo import parse, walk
from transformer.planning.work import Kernel, work

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
ONCE = 2 * 64**3


def compiled(function, *args):
    return work(parse(jax.jit(function).lower(*args).compile().as_text()), 1)


def test_loops_multiply_and_nest():
    def inner(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, None, length=5)[0]

    assert compiled(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: inner(c), x), SQUARE).flops == 15 * ONCE


@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, (1, 1), 1), (2, (0, 0), 1), (3, (2, 0), 2)])
def test_a_convolution_multiplies_what_is_there(stride, padding, groups):
    x, w = jax.ShapeDtypeStruct((2, 11, 4), jnp.float32), jax.ShapeDtypeStruct((3, 4 // groups, 6), jnp.float32)
    options = dict(window_strides=(stride,), padding=(padding,), dimension_numbers=("NWC", "WIO", "NWC"))
    found = compiled(lambda x, w: jax.lax.conv_general_dilated(x, w, feature_group_count=groups, **options), x, w)
    out = jax.eval_shape(lambda x, w: jax.lax.conv_general_dilated(x, w, feature_group_count=groups, **options), x, w)
    pairs = sum(0 <= o * stride - padding[0] + k < 11 for o in range(out.shape[1]) for k in range(3))
    assert found.flops == 2 * 2 * pairs * (4 // groups) * 6


def test_of_a_stack_a_loop_reads_and_writes_a_layer_at_a_time():
    layers, size = 50, 64 * 64 * 4
    stack = jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32)
    found = compiled(lambda x, w: jax.lax.scan(lambda c, w: (c @ w, c), x, w), SQUARE, stack)
    assert found.flops == layers * ONCE
    # Weights once, each product's operand and result, and what is stacked: some ten squares a layer, not fifty.
    assert 4 * layers * size < found.bytes < 12 * layers * size


@pytest.mark.parametrize("write", [lambda x, y: x.at[jnp.array([5])].set(y), lambda x, y: x.at[5:6].set(y)])
def test_what_is_changed_in_place_is_not_read_whole(write):
    def change(x, y):
        return jax.lax.fori_loop(0, 10, lambda _, c: write(c, jnp.sin(c[:1] + y)), x)

    whole, part = jax.ShapeDtypeStruct((4096, 64), jnp.float32), jax.ShapeDtypeStruct((1, 64), jnp.float32)
    program = parse(jax.jit(change, donate_argnums=0).lower(whole, part).compile().as_text())
    once = work(program, 1).bytes
    assert once < 2.1 * 4096 * 64 * 4 + 200 * 64 * 4


# As compilers for TPUs write: scheduled, with estimates, memory spaces, kernels, and collectives in steps.
TPU = """HloModule jit_f, is_scheduled=true

%step.1 (a: bf16[8,64], b: bf16[64,64]) -> (bf16[8,64], bf16[64,64]) {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[64,64]{1,0} parameter(1)
  %product = bf16[8,64]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  %all-gather.2 = bf16[64,64]{1,0:S(1)} all-gather(%a), channel_id=5, replica_groups=[1,8]<=[8], frontend_attributes={chain_id="4"}
  ROOT %t = (bf16[8,64]{1,0}, bf16[64,64]{1,0}) tuple(%product, %b)
}

%gather.1 (c: bf16[8,64]) -> bf16[64,64] {
  %c = bf16[8,64]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[64,64]{1,0:S(1)} all-gather(%c), channel_id=5, replica_groups=[1,8]<=[8], frontend_attributes={chain_id="4"}
}

%beside (d: bf16[8,64]) -> bf16[8,64] {
  %d = bf16[8,64]{1,0} parameter(0)
  ROOT %all-reduce.9 = bf16[8,64]{1,0} all-reduce(%d), replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (x: bf16[8,64], w: bf16[64,64]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %kernel.7 = bf16[8,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={text="a
}}, %w = more"}, backend_config={"custom_call_config":{"body":"AB)C","cost_estimate":{"flops":"100","transcendentals":"0","bytes_accessed":"30"}}}
  %kernel.8 = bf16[8,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %slow-start = (bf16[8,64]{1,0}, bf16[8,64]{1,0}) all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add
  %slow-done = bf16[8,64]{1,0} all-reduce-done(%slow-start)
  %aside = ((bf16[8,64]{1,0}), bf16[8,64]{1,0}, u32[]) call-start(%x), async_execution_thread="sparsecore", to_apply=%beside
  %started = bf16[64,64]{1,0:S(1)} fusion(%x), kind=kCustom, calls=%gather.1, backend_config={"estimated_cycles":"30"}
  %fusion.3 = (bf16[8,64]{1,0}, bf16[64,64]{1,0:S(1)}) fusion(%x, %w), kind=kOutput, calls=%step.1, backend_config={"estimated_cycles":"5000"}
  %aside-done = bf16[8,64]{1,0} call-done(%aside)
  %ended = bf16[64,64]{1,0:S(1)} fusion(%x), kind=kCustom, calls=%gather.1
  %unknown = bf16[8,64]{1,0} add(%x, %x), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %copy = bf16[8,64]{1,0} copy(%x), backend_config={"estimated_cycles":"70"}
}
"""  # noqa: E501


def test_what_tpu_compilers_write():
    found, square = work(parse(TPU), 8), 8 * 64 * 2
    assert found.flops == 2 * 8 * 64 * 64
    assert found.cycles == {"matmul": 5000, "elementwise": 30, "moves": 70}
    assert found.kernels == {"kernel": Kernel(2, 100, 30 + 2 * square, silent=True)}
    # Beside the kernels: three reads and three writes of x, and what collectives read and write; w is near.
    assert found.bytes == found.kernels["kernel"].bytes + 12 * square


def test_a_collective_is_overlapped_where_work_stands_before_its_end():
    got = [(c.kind, c.times, c.overlapped) for c in collectives(TPU, {"fsdp": 8})]
    assert got == [("all-reduce", 1, False), ("all-reduce", 1, True), ("all-gather", 1, True)]
    idle = TPU.replace('"estimated_cycles":"5000"', '"estimated_cycles":"20"')
    assert [c.overlapped for c in collectives(idle, {"fsdp": 8})] == [False, False, True]


def test_a_loop_of_unknown_length_runs_as_often_as_told():
    def until(x):
        def more(c):
            return (c[0] < 9) & (jnp.sum(c[1]) > 0)

        return jax.lax.while_loop(more, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))

    program = parse(jax.jit(until).lower(SQUARE).compile().as_text())
    assert work(program, 1, trips=7).flops == 7 * ONCE
    with pytest.raises(ValueError, match="a loop whose number of rounds"):
        work(program, 1)


def test_runs_say_what_they_are_part_of():
    of = {run.instruction.name: run for run in walk(parse(TPU), lambda branches: branches[0])}
    assert of["product"].fused and not of["all-reduce.9"].fused and of["all-reduce.9"].beside
    assert not of["copy"].beside


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no computation is its ENTRY"):
        parse("HloModule jit_f")

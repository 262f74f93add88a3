"""Every family and size, found by listing: counts of parameters, axis names, sharding."""

import dataclasses
import itertools

import jax
import pytest
from jax.sharding import AbstractMesh

from tests import common
from transformer import axes, families, sharding, spec
from transformer.mapping import from_mapping
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.nn.parameter import Named
from transformer.settings import Settings, SettingsError
from transformer.sharding import ShardingError

SIZES = [(family, size) for family in common.FAMILIES for size in common.page(family).SIZES]
PUBLISHED = [(family, size) for family, size in SIZES if size in {
    *getattr(common.page(family), "PARAMETERS", {}), *getattr(common.page(family), "PARAMETERS_ROUNDED", {}),
}]  # fmt: skip


def abstract(family: str, size: str):
    """Boxed shapes of a size's parameters."""
    return initial.abstract_params(Transformer(common.build_spec(family, size)))


def boxes(tree) -> list[tuple[str, Named]]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=initial.is_named)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_size_builds_and_every_axis_has_a_name(family, size):
    for path, box in boxes(abstract(family, size)):
        assert isinstance(box, Named), f"{path}: no logical axis names"
        assert len(box.names) == box.value.ndim, path
        assert set(box.names) <= axes.ALL, path
        stacked = "['body']" in path
        assert (box.names[0] == axes.LAYERS) == stacked and box.names.count(axes.LAYERS) == stacked, path


@pytest.mark.parametrize("family", common.FAMILIES)
def test_axis_names_are_those_of_their_sizes(family):
    """A name on the wrong dimension would shard just as legally, and slower."""
    built = common.tiny_spec(family)
    blocks, embedding = built.layers, built.embedding
    relative = [stack.relative_bias for stack in built.stacks.values() if stack.relative_bias]
    sizes = {
        axes.VOCAB: {built.vocab_size},
        # Multi-token prediction projects two vectors at once.
        axes.EMBED: {built.d_model, *([2 * built.d_model] if built.mtp else [])},
        axes.EMBED_OUT: {built.d_model},
        axes.EXPERT_EMBED: {built.d_model},
        axes.HEADS: {b.mixer.num_heads for b in blocks},
        axes.KV_HEADS: {getattr(b.mixer, "num_kv_heads", None) for b in blocks},
        axes.HEAD_DIM: {dim for b in blocks for dim in common.head_dims(b.mixer)},
        axes.MLP: {width for b in blocks for width in common.hidden_widths(b.ffn)},
        axes.EXPERTS: {getattr(b.ffn, "num_experts", None) for b in blocks},
        axes.ROUTES: {getattr(b.ffn, "num_experts", None) for b in blocks},
        axes.LATENT: {rank for b in blocks for rank in common.ranks(b.mixer)},
        axes.LATENT_OUT: {rank for b in blocks for rank in common.ranks(b.mixer, out=True)},
        axes.LAYERS: {stack.repeats for stack in built.stacks.values()},
        axes.POSITION: {getattr(embedding.positions, "max_length", None)},
        axes.BUCKETS: {bias.num_buckets for bias, _ in relative},
        axes.TYPES: {embedding.token_types},
        axes.CLASSES: {built.pooler.classes if built.pooler else None},
        axes.NORM: {built.d_model, *(dim for b in blocks for dim in common.normed(b.mixer))},
    }
    for path, box in boxes(abstract(family, "tiny")):
        for name, size in zip(box.names, box.value.shape, strict=True):
            assert size in sizes[name], f"{path}: {name}={size}"


@pytest.mark.parametrize(("family", "size"), PUBLISHED)
def test_parameters_are_as_many_as_published(family, size):
    page = common.page(family)
    # Published counts are without multi-token prediction.
    main = {name: tree for name, tree in abstract(family, size).items() if name != "mtp"}
    count = sum(leaf.size for leaf in jax.tree.leaves(main))
    if size in getattr(page, "PARAMETERS", {}):
        assert count == page.PARAMETERS[size]
    else:
        assert count == pytest.approx(page.PARAMETERS_ROUNDED[size], rel=0.02)


@pytest.mark.parametrize("family", common.FAMILIES)
def test_page_states_every_published_count(family):
    page = common.page(family)
    counted = {*getattr(page, "PARAMETERS", {}), *getattr(page, "PARAMETERS_ROUNDED", {})}
    assert counted and counted <= set(page.SIZES)
    assert "tiny" in page.SIZES


@pytest.mark.parametrize(("family", "size"), PUBLISHED)
def test_published_size_shards_over_a_pod(family, size):
    """Some mesh of at least 4 fsdp devices is legal, and it leaves little whole: no large parameter is replicated."""
    tree = abstract(family, size)
    for tensor, fsdp in itertools.product((4, 2, 1), (8, 4)):
        mesh = AbstractMesh((1, 1, fsdp, 1, 1, tensor), sharding.MESH_AXES)
        try:
            held = sum(_held(path, box, mesh) for path, box in boxes(tree))
        except ShardingError:
            continue
        whole = sum(leaf.size for leaf in jax.tree.leaves(tree))
        # Biases, norms and tables of positions stay whole: up to 3 % of a device, in models that have all of these.
        assert held < 1.03 * whole / (fsdp * tensor)
        return
    pytest.fail("no mesh of 4 to 32 devices is legal")


def _held(path: str, box: Named, mesh: AbstractMesh) -> int:
    """Elements of a parameter that one device holds."""
    entries = sharding.partition_spec(box.names, box.value.shape, mesh, what=path)
    used = [axis for entry in entries if entry for axis in (entry if isinstance(entry, tuple) else (entry,))]
    ways = 1
    for axis in used:
        ways *= mesh.shape[axis]
    return box.value.size // ways


@pytest.mark.parametrize("family", common.FAMILIES)
def test_page_is_a_run_that_settings_accept(family):
    page = common.page(family)
    values = page.get_config("tiny").to_dict()
    assert values["model"]["family"] == family
    del values["model"]
    assert isinstance(from_mapping(Settings, values), Settings)
    with pytest.raises(ValueError, match="tiny"):
        page.get_config("no such size")


@pytest.mark.parametrize("family", common.FAMILIES)
def test_dims_have_no_default_but_an_absent_mechanism(family):
    """A default for a published number would be a silent wrong model."""
    for f in dataclasses.fields(families.get(family).Dims):
        assert f.default in (dataclasses.MISSING, None, False), f.name
        assert f.default_factory is dataclasses.MISSING, f.name


@pytest.mark.parametrize("family", common.FAMILIES)
def test_tiny_size_keeps_the_mechanisms_of_the_published_ones(family):
    """Laws run on the tiny size: a window, a scaling or a tail that it lacks would go untested."""

    def traits(size: str) -> set[str]:
        built = common.build_spec(family, size)
        mixers = [b.mixer for b in built.layers]
        found = {f"mask {m.mask.causal} {m.mask.window is not None}" for m in mixers}
        found |= {f"rope {type(m.rope.scaling).__name__}" for m in mixers if m.rope and m.rope.scaling}
        return (
            found
            | {f"head {built.head.bias} {built.head.softcap is not None} {built.head.scale is not None}"}
            | {b.placement for b in built.layers}
        )

    # A version of another head has a tiny size of its own.
    tiny = set().union(*(traits(size) for size in common.page(family).SIZES if size.startswith("tiny")))
    for size in common.page(family).SIZES:
        missing = traits(size) - tiny
        # A size may drop the window (a later release), never add something that tiny has not.
        assert missing <= {"mask True False"}, f"{size}: {missing}"


def test_unknown_family_lists_those_there_are():
    with pytest.raises(SettingsError, match=", ".join(common.FAMILIES)):
        families.get("no_such_family")
    with pytest.raises(SettingsError, match=r"model\.family: required"):
        families.build_spec({})


@pytest.mark.parametrize("family", common.FAMILIES)
def test_build_spec_is_strict(family):
    values = common.page(family).get_config("tiny").model.to_dict()
    assert isinstance(families.build_spec(values), spec.Model)
    with pytest.raises(SettingsError, match=r"model\.d_modell=64: unknown field; did you mean model\.d_model\?"):
        families.build_spec({**values, "d_modell": 64})
    with pytest.raises(SettingsError, match=r"model\.num_layers: required"):
        families.build_spec({k: v for k, v in values.items() if k != "num_layers"})
    with pytest.raises(SettingsError, match=r"model\.num_layers='3': expected int, got str"):
        families.build_spec({**values, "num_layers": "3"})

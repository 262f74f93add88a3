"""From what was asked for to a run on a slice, or to one sentence that says why not and what would do.

Everything here is known before anything is compiled.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from transformer import axes as ax
from transformer import config, families, sharding, spec
from transformer.planning import chips, memory, topology
from transformer.planning.leaves import leaves
from transformer.planning.report import Kind, Request
from transformer.planning.topology import Topology
from transformer.settings import SettingsError, check
from transformer.sharding import MESH_AXES, ShardingError

# What a run on TPUs would not leave at the pages' defaults, which are for a laptop; `--set` may.
DEFAULTS = {"compute.dtype": "bfloat16", "compute.remat": "full"}
LENGTH = 4096  # tokens of a row, of models that take as many


@dataclass(frozen=True)
class Asked:
    """A run that can be compiled: its mesh divides its model, and its batch the mesh."""

    request: Request
    run: config.Run
    topology: Topology

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of all axes."""
        return self.request.mesh


def ask(
    reference: str,
    slices: str,
    *,
    kind: Kind = "train",
    mesh: Mapping[str, int] | None = None,
    rows: int | None = None,
    length: int | None = None,
    overrides: Mapping[str, str] | None = None,
    tokens: float | None = None,
) -> Asked:
    """Checks a request.

    Args:
      reference: of a config page, as `config.load_config` takes it.
      slices: a name for `topology.parse`.
      mesh: sizes of axes; by default `fsdp` takes all devices to train and read prompts, and `tensor` what the model
        divides by to decode.
      rows: of the step, on all devices; by default one for each part that the mesh cuts a batch into.
      length: tokens of a row; by default 4,096, or as many as the model takes.
      overrides: settings by dotted name, as `config.override` takes them.

    Raises:
      SettingsError, SpecError, ShardingError: naming what can't be, and the nearest that can.
    """
    found = topology.parse(slices)
    values, settings = settle(reference, kind, length, overrides)
    run = config.resolve(values)
    sizes = topology.mesh_sizes(found, mesh if mesh is not None else default_mesh(found, run, kind))
    check_model(run.spec, found, sizes, _rules(run, kind))
    parts = _ways(sizes, ax.BATCH, _rules(run, kind)) * (run.settings.train.accumulate if kind == "train" else 1)
    rows = parts if rows is None else rows
    check_rows(rows, parts, sizes)
    check_length(run, sizes, kind)
    values["data"]["batch_size"], values["mesh"] = rows, sizes
    request = Request(
        config=reference, topology=found.name, chip=found.chip.name, devices=found.devices,
        chips=found.chips * found.slices, slices=found.slices, mesh=sizes, kind=kind, rows=rows,
        length=values["data"]["seq_len"], overrides=settings, tokens=tokens,
    )  # fmt: skip
    return Asked(request, config.resolve(values), found)


def settle(
    reference: str, kind: Kind, length: int | None = None, overrides: Mapping[str, str] | None = None
) -> tuple[dict, dict[str, str]]:
    """Values of a run without a mesh and with as few rows as can be, and the settings that differ from its page's.

    Raises:
      SettingsError, SpecError: as of `ask`.
    """
    values, given = config.load_config(reference).to_dict(), dict(overrides or {})
    settings = {name: repr(value) for name, value in DEFAULTS.items() if name not in given} | given
    for name, text in settings.items():
        check(not name.startswith("mesh."), "--set", name, "give the mesh with --mesh")
        config.override(values, name, text)
    values["mesh"] = dict.fromkeys(MESH_AXES, 1)
    values["data"] |= dict(seq_len=length or _length(values), batch_size=values["train"]["accumulate"])
    built = config.resolve(values).spec
    writes = built.decoder is not None and built.head is not None
    check(kind == "train" or writes, f"--{kind}", reference, "this model writes no text; it can be trained alone")
    return values, settings


def _length(values: dict) -> int:
    return min(LENGTH, families.build_spec(values["model"]).max_length)


def _rules(run: config.Run, kind: Kind) -> str:
    """Generation has a preset of its own."""
    return run.settings.compute.rules if kind == "train" else "decode"


def _ways(sizes: Mapping[str, int], name: str, rules: str) -> int:
    return math.prod(sizes[axis] for axis in sharding.RULES[rules][name])


def default_mesh(found: Topology, run: config.Run, kind: Kind) -> dict[str, int]:
    """All devices along `fsdp`; to decode, as many as the model divides by along `tensor` and `expert`, then `data`.

    Whatever is split over fsdp is gathered at each use, which only many tokens are worth.
    """
    if kind != "decode":
        return {"data": 1, "fsdp": -1}
    mixes = any(isinstance(block.ffn, spec.MoE) for block in run.spec.layers)
    able = [
        sizes
        for sizes in topology.meshes(found, ("data", "expert", "tensor") if mixes else ("data", "tensor"))
        if _refusal(run.spec, sizes, "decode") is None
    ]
    return max(able, key=lambda sizes: (sizes["expert"] * sizes["tensor"], sizes["tensor"]), default={"data": -1})


def check_model(model: spec.Model, found: Topology, sizes: Mapping[str, int], rules: str) -> None:
    """Raises `ShardingError` if the mesh can't split the model, naming a parameter and the nearest mesh that can."""
    refusal = _refusal(model, sizes, rules)
    if refusal is None:
        return
    axes = [axis for axis in MESH_AXES if sizes[axis] > 1] + ["data", "fsdp"]
    able = [other for other in topology.meshes(found, list(dict.fromkeys(axes))) if not _refusal(model, other, rules)]
    near = min(able, key=lambda other: topology.far(other, sizes), default=None)
    what = refusal.split(";")[0]
    remedy = f"the nearest mesh that can is {topology.words(near)}" if near else "no mesh of this slice can"
    raise ShardingError(f"mesh={topology.words(sizes)}: {what}; {remedy}")


def _refusal(model: spec.Model, sizes: Mapping[str, int], rules: str) -> str | None:
    mesh = jax.sharding.AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES)
    try:
        for leaf in leaves(model):
            sharding.partition_spec(leaf.names, leaf.shape, mesh, rules, "/".join(leaf.path))
    except ShardingError as error:
        return str(error)
    if rules == "decode":
        ways = _ways(sizes, ax.ACT_HEADS, rules)
        heads = {block.mixer.cache_dims.heads for block in model.decoder.layers}
        uneven = next((n for n in sorted(heads) if n % ways), None)
        if uneven is not None:
            return f"the cache's {uneven} heads can't be split {ways} ways over mesh axis 'tensor'"
    return None


def check_rows(rows: int, parts: int, sizes: Mapping[str, int]) -> None:
    """Raises `ShardingError` if a batch can't be split, naming the nearest that can."""
    if rows >= 1 and rows % parts == 0:
        return
    below, above = rows // parts * parts, -(-max(rows, 1) // parts) * parts
    near = f"{below} or {above}" if below else f"{above}"
    raise ShardingError(
        f"--batch={rows}: {topology.words(sizes)} cuts a batch into {parts} parts (microbatches among them) of whole "
        f"rows; the nearest batch is {near}"
    )


def check_length(run: config.Run, sizes: Mapping[str, int], kind: Kind) -> None:
    """Raises `ShardingError` if rows can't be split along their length."""
    length, rules = run.settings.data.seq_len, _rules(run, kind)
    # A device's part may be made of two (`ops.zigzag`).
    parts = math.lcm(2 * _ways(sizes, ax.LENGTH, rules), _ways(sizes, ax.STREAM_LENGTH, rules))
    if _ways(sizes, ax.STREAM_LENGTH, rules) > 1 and length % parts:
        near = f"{length // parts * parts or parts} or {-(-length // parts) * parts}"
        raise ShardingError(f"--seq={length}: {topology.words(sizes)} cuts rows into {parts}; the nearest are {near}")


def check_state(asked: Asked) -> None:
    """Raises `SettingsError` if what a training step keeps doesn't fit by itself, naming the slice where it does."""
    if asked.request.kind != "train":
        return
    run, request, chip = asked.run, asked.request, asked.topology.chip
    needed = memory.arguments(run.spec, run.settings, request.mesh, request.rows, request.length)
    if needed <= chip.offered:
        return
    near = _smallest(asked, chip) or _smallest(asked, None)
    remedy = f"the smallest slice that holds a row on each device is {near.name}, split by fsdp" if near else ""
    raise SettingsError(
        f"{request.config}: parameters, moments and batch take {needed / 2**30:.1f} GiB of a device, and "
        f"{request.topology} offers {chip.offered / 2**30:.2f}; {remedy or 'no slice holds a row on each device'}"
    )


def _smallest(asked: Asked, chip: chips.Chip | None) -> Topology | None:
    """The slice of fewest chips, of that chip or of any, that holds a step by analysis and has a tenth to spare."""
    run, length, slices = asked.run, asked.request.length, asked.topology.slices
    kinds = [chip] if chip else list(chips.CHIPS.values())
    for other in sorted((t for kind in kinds for t in topology.offered(kind, slices)), key=lambda t: t.chips):
        mesh = {"slice": slices, "fsdp": other.devices // slices}
        step = memory.train(run.spec, run.settings, mesh, other.devices, length, device_kind=other.chip.kind)
        if step.total <= 0.9 * other.chip.offered:
            return other
    return None

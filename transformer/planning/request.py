"""From what was asked for to a run on a slice, or to one sentence that says why not and what would do.

Everything here is known before anything is compiled.
"""

import keyword
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformer import axes as ax
from transformer import config, families, sharding, spec
from transformer.planning import legal, topology
from transformer.planning.report import Kind, Request
from transformer.planning.topology import Topology
from transformer.settings import check
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
    accumulate = run.settings.train.accumulate if kind == "train" else 1
    sizes = _mesh(found, run, kind, mesh)
    parts = _ways(sizes, ax.BATCH, _rules(run, kind)) * accumulate
    rows = parts if rows is None else rows
    check_rows(rows, parts, accumulate, sizes)
    check_length(run, sizes, kind)
    values["data"]["batch_size"], values["mesh"] = rows, sizes
    if tokens and kind == "train":
        values["train"]["steps"] = math.ceil(tokens / (rows * _targets(run)))
    settled = config.resolve(values)
    request = Request(
        config=reference, topology=found.name, chip=found.chip.name, devices=found.devices,
        chips=found.chips * found.slices, slices=found.slices, mesh=sizes, kind=kind, rows=rows,
        length=values["data"]["seq_len"], accumulate=accumulate, overrides=settings, tokens=tokens,
        fields=dict(_changed(config.load_config(reference).to_dict(), values)),
    )  # fmt: skip
    return Asked(request, settled, found)


def _targets(run: config.Run) -> int:
    """Tokens of a row of which the loss is."""
    data = run.settings.data
    return (data.target_len or data.seq_len) if run.spec.trunk.crosses else data.seq_len


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Fields of `new` that `old` has otherwise, by dotted name, and their values as text."""
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(old.get(key), Mapping):
            yield from _changed(old[key], value, f"{path}{key}.")
        elif key not in old or old[key] != value:
            plain = isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)
            yield f"{path}{key}", value if plain else repr(value)


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


def _mesh(found: Topology, run: config.Run, kind: Kind, asked: Mapping[str, int] | None) -> dict[str, int]:
    """Sizes of all axes.

    Raises:
      SettingsError, ShardingError: such a mesh doesn't lie on the slice, or can't split the model; with the nearest.
    """

    def refusal(sizes: Mapping[str, int]) -> str | None:
        return legal.refusal(run.spec, sizes, _rules(run, kind))

    def holds(sizes: Mapping[str, int]) -> bool:
        return refusal(sizes) is None

    default = asked is None
    asked = default_mesh(found, run, kind) if default else asked
    _check_experts(run.spec, found, asked, holds)
    sizes = topology.mesh_sizes(found, asked, holds)
    what = refusal(sizes)
    if what is not None:
        said = f"{topology.words(sizes)} (by default)" if default else topology.words(asked)
        raise ShardingError(f"mesh={said}: {what}; {topology.remedy(found, asked, holds)}")
    return sizes


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
        if legal.refusal(run.spec, sizes, "decode") is None
    ]
    return max(able, key=lambda sizes: (sizes["expert"] * sizes["tensor"], sizes["tensor"]), default={"data": -1})


def _check_experts(model: spec.Model, found: Topology, asked: Mapping[str, int], holds: topology.Holds) -> None:
    """Raises `ShardingError` if the experts can't be split as asked, naming how they can be on this slice."""
    many, ways = legal.experts(model), asked.get("expert", 1)
    if many is None or ways < 1 or many % ways == 0:
        return
    able = {sizes["expert"] for sizes in topology.meshes(found, ("data", "fsdp", "expert")) if holds(sizes)}
    raise ShardingError(
        f"mesh={topology.words(asked)}: the model's {many} experts can't be split {ways} ways; on {found.name} "
        f"mesh.expert can be {_any_of(sorted(able))}, and {topology.remedy(found, asked, holds)}"
    )


def _any_of(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def check_rows(rows: int, parts: int, accumulate: int, sizes: Mapping[str, int]) -> None:
    """Raises `ShardingError` if a batch can't be split, naming the nearest that can."""
    if rows >= 1 and rows % parts == 0:
        return
    below, above = rows // parts * parts, -(-max(rows, 1) // parts) * parts
    near = f"{below} or {above}" if below > 0 else f"{above}"
    cut = f" and {accumulate} microbatches cut" if accumulate > 1 else " cuts"
    raise ShardingError(
        f"--batch={rows}: must be a multiple of {parts}, into which mesh {topology.words(sizes)}{cut} it; "
        f"the nearest batch is {near}"
    )


def check_length(run: config.Run, sizes: Mapping[str, int], kind: Kind) -> None:
    """Raises `ShardingError` if rows can't be split along their length."""
    length, rules = run.settings.data.seq_len, _rules(run, kind)
    # A device's part may be made of two (`ops.zigzag`).
    parts = math.lcm(2 * _ways(sizes, ax.LENGTH, rules), _ways(sizes, ax.STREAM_LENGTH, rules))
    if _ways(sizes, ax.STREAM_LENGTH, rules) > 1 and length % parts:
        near = f"{length // parts * parts or parts} or {-(-length // parts) * parts}"
        raise ShardingError(f"--seq={length}: {topology.words(sizes)} cuts rows into {parts}; the nearest are {near}")

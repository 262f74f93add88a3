"""A training step on every mesh: the law that no mesh changes a result, as a function.

`python -m transformer.check_mesh` shows it, tests state it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
import optax

from transformer import config, families, sharding, spec
from transformer.nn import initial
from transformer.nn.model import Transformer
from transformer.sharding import ShardingError
from transformer.training.state import state_of
from transformer.training.step import Batch, compile_train_step

Sizes = dict[str, int]  # of a mesh, by axis; axes of size 1 left out
Outcome = dict[str, dict[str, np.ndarray]]  # what a step gave: {kind: {name: value}}, kinds as in `FLOORS`

# Of the largest value of a leaf: what a float32 sum of another order may differ by.
TOLERANCE = 2e-4
# Some gradients are noise alone (a key's bias moves no probability): such a leaf counts as large as this part of the
# largest leaf of its kind. Metrics and corrections are compared by themselves.
FLOORS = {"metrics": 0.0, "gradients": 0.025, "corrections": 0.0}
# Divides over sixteen parts; several of the tiny models' windows of 8.
LENGTH = 48


@dataclass(frozen=True)
class Difference:
    """The largest one of a kind: relative to the leaf (`FLOORS`), where it lies, and on which mesh."""

    size: float = 0.0
    name: str = ""
    mesh: str = ""


@dataclass
class Verdict:
    """What became of a family: meshes compared, meshes that can't hold its model, and the largest differences."""

    family: str
    same: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    leaves: int = 0
    worst: dict[str, Difference] = field(default_factory=lambda: dict.fromkeys(FLOORS, Difference()))
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Something was compared, and nothing differs."""
        return bool(self.same) and not self.wrong


def factorisations(devices: int, axes: Sequence[str] = sharding.MESH_AXES) -> Iterator[Sizes]:
    """All meshes of so many devices."""
    if not axes:
        if devices == 1:
            yield {}
        return
    for size in (n for n in range(devices, 0, -1) if devices % n == 0):
        for rest in factorisations(devices // size, axes[1:]):
            yield ({axes[0]: size} if size > 1 else {}) | rest


def meshes_for(family: str, devices: int) -> list[Sizes]:
    """Those whose axes apply to a family: `expert` to mixtures alone, any other to all. What doesn't divide is refused
    later, by name."""
    mixes = bool(_mixtures(tiny_run(family, 1, {}).spec))
    return [sizes for sizes in factorisations(devices) if mixes or "expert" not in sizes]


def _mixtures(model: spec.Model) -> list[spec.MoE]:
    return [block.ffn for block in model.layers if isinstance(block.ffn, spec.MoE)]


def name_of(sizes: Sizes) -> str:
    """Such as "fsdp=4,tensor=2"."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device"


def tiny_run(family: str, devices: int, sizes: Sizes, accumulate: int = 1) -> config.Run:
    """A run of the tiny size, a row for each device and microbatch; all that can be balanced is.

    Without momentum and clipping, the optimiser's first moment is the gradient itself.
    """
    page = config.load_config(f"{family}:tiny")
    page.data.update(dict(seq_len=LENGTH, batch_size=devices * accumulate))
    page.optimizer.update(dict(b1=0.0, clip_norm=math.inf, warmup_steps=0, schedule="constant"))
    page.train.update(dict(steps=10, accumulate=accumulate))
    page.mesh.update(dict.fromkeys(sharding.MESH_AXES, 1) | sizes)
    mixtures = _mixtures(families.build_spec(page.model.to_dict()))
    if mixtures:
        rate = 0.01 if any(mixture.router.correction for mixture in mixtures) else 0.0
        page.balance.update(dict(auxiliary=0.3, sequence=0.2, z=0.1, correction_rate=rate))
    return config.resolve(page)


def random_batch(run: config.Run, seed: int = 0) -> Batch:
    """Rows of two packed documents of random lengths and some padding; with their sources where the model reads any."""
    rng, model = np.random.default_rng(seed), run.spec
    shape = run.settings.data.batch_size, run.settings.data.seq_len

    def documents() -> dict[str, np.ndarray]:
        ends = np.sort(rng.integers(8, shape[1] - 2, (shape[0], 2)), axis=1)
        index = np.arange(shape[1])
        segments = np.where(index < ends[:, :1], 1, np.where(index < ends[:, 1:], 2, 0))
        positions = np.where(segments == 0, -1, np.where(segments == 1, index, index - ends[:, :1]))
        tokens = rng.integers(0, model.vocab_size, shape)
        return {"tokens": tokens, "segment_ids": segments, "positions": positions}

    batch, real = documents(), lambda b: b["segment_ids"] > 0
    batch["targets"] = rng.integers(0, model.vocab_size, shape)
    batch["target_bytes"] = rng.integers(1, 4, shape) * real(batch)
    weights = (real(batch) & (rng.random(shape) < 0.9)).astype(np.float32)
    if model.trunk.crosses:
        batch |= {f"source_{name}": value for name, value in documents().items()}
    return {name: value.astype(np.int32) for name, value in batch.items()} | {"weights": weights}


def random_params(run: config.Run, seed: int = 0) -> dict:
    """The initial parameters with noise on every one, so that no bias, sink or scale is at its neutral value."""
    rng = np.random.default_rng(seed)
    params = jax.device_get(initial.params(Transformer(run.spec, run.settings.compute), seed))
    return jax.tree.map(lambda x: x + 0.05 * rng.standard_normal(x.shape).astype(x.dtype), params)


def one_step(run: config.Run, params: dict, batch: Batch, devices: Sequence[jax.Device]) -> Outcome:
    """What the training step of `run` gives on its mesh of `devices`.

    Raises:
      ShardingError: the mesh can't hold the model or the batch.
    """
    mesh = sharding.make_mesh(run.settings.mesh, devices)
    model = Transformer(run.spec, run.settings.compute)
    # The state is donated: the caller's arrays must not be it.
    params = jax.device_put(params, initial.param_shardings(model, mesh), may_alias=False)
    state = state_of(params, model, run.settings, mesh)
    place = sharding.batch_sharding(mesh, run.settings.compute.rules)
    with jax.set_mesh(mesh):
        state, metrics = compile_train_step(model, run.settings)(state, jax.device_put(batch, place))
    params, gradients = jax.device_get((state.params, optax.tree.get(state.opt_state, "mu")))
    corrections = {name: x for name, x in _flat(params).items() if name.endswith("router/correction")}
    return {"metrics": _flat(jax.device_get(metrics)), "gradients": _flat(gradients), "corrections": corrections}


def _flat(tree: dict) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def differences(got: Outcome, want: Outcome) -> dict[str, tuple[float, str]]:
    """Of each kind the largest relative difference and the leaf where it lies; infinite where a number isn't finite."""
    found = {}
    for kind, floor in FLOORS.items():
        if got[kind].keys() != want[kind].keys():
            return {**found, kind: (math.inf, ", ".join(got[kind].keys() ^ want[kind].keys()))}
        largest = {name: float(np.abs(x).max()) for name, x in want[kind].items()}
        least = floor * max(largest.values(), default=0.0)
        away = {name: float(np.abs(got[kind][name] - x).max()) for name, x in want[kind].items()}
        ratio = {name: d / max(largest[name] + least, 1e-30) if d == d else math.inf for name, d in away.items()}
        name = max(ratio, key=ratio.get, default="")
        found[kind] = (ratio[name], name) if name else (0.0, "")
    return found


def check_family(
    family: str,
    meshes: Sequence[Sizes],
    devices: Sequence[jax.Device],
    accumulate: int = 1,
    done: Callable[[str], None] = lambda mesh: None,
) -> Verdict:
    """Compares a step on each of the meshes with the step on one device; `done` is called after each step."""
    verdict, begin = Verdict(family), time.perf_counter()
    alone = tiny_run(family, len(devices), {}, accumulate)
    params, batch = random_params(alone), random_batch(alone)
    want = one_step(alone, params, batch, devices[:1])
    verdict.leaves = len(want["gradients"])
    done("one device")
    for sizes in meshes:
        name = name_of(sizes)
        try:
            found = differences(
                one_step(tiny_run(family, len(devices), sizes, accumulate), params, batch, devices), want
            )
        except ShardingError as error:
            verdict.refused[name] = str(error)
        else:
            within = all(size <= TOLERANCE for size, _ in found.values())
            (verdict.same if within else verdict.wrong).append(name)
            for kind, (size, leaf) in found.items():
                if size > verdict.worst[kind].size or not verdict.worst[kind].name:
                    verdict.worst[kind] = Difference(size, leaf, name)
        jax.clear_caches()  # a process may not map as much memory as all these programs would take
        done(name)
    verdict.seconds = time.perf_counter() - begin
    return verdict

"""A plan by analysis alone: what a step computes, moves, sends and holds, from the spec, the settings and the mesh.

Nothing is compiled and no device is needed; a plan takes a second, so that many can be compared (`planning.search`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from transformer import axes as ax
from transformer import sharding, spec
from transformer.config import Run
from transformer.nn.model import Transformer
from transformer.planning import accounting, decoding, layers, memory, roofline, serving, traffic
from transformer.planning.accounting import BYTES
from transformer.planning.leaves import leaves
from transformer.planning.moments import host_bytes, update_bytes
from transformer.planning.report import Bytes, Estimate, Exchange, Flops, Kind, Memory, Parts, Report, Request
from transformer.planning.topology import Topology, parse
from transformer.settings import Compute

# Products of scores and values: two forwards; backwards the kernels for queries and for keys make three and four, since
# both make the scores again.
FORWARD, BACKWARD = 2, 7
ATTENTION = "attention"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step of a run on a topology.

    Attributes:
      mesh: sizes of all axes.
      rows, length: of the step, on all devices; to decode, slots of the cache.
    """

    run: Run
    topology: Topology
    mesh: Mapping[str, int]
    kind: Kind
    rows: int
    length: int

    @property
    def compute(self) -> Compute:
        """As the step is run: generation has a preset of sharding of its own."""
        compute = self.run.settings.compute
        return compute if self.kind == "train" else dataclasses.replace(compute, rules="decode")

    @property
    def target(self) -> int:
        """Tokens of a row of which the loss is, or that a decoder has."""
        data, two_sided = self.run.settings.data, self.run.spec.trunk.crosses
        return (data.target_len or self.length) if two_sided and self.kind == "train" else self.length

    @property
    def tokens(self) -> int:
        """Of a step, on all devices."""
        return self.rows * (1 if self.kind == "decode" else self.target)


def report(request: Request, run: Run) -> Report:
    """The plan that a request asks for.

    Raises:
      SettingsError: an unknown topology, or one whose network is not published.
    """
    plan = Plan(run, parse(request.topology), request.mesh, request.kind, request.rows, request.length)
    parts, exchanges = parts_of(plan), exchanges_of(plan)
    flops, size = flops_of(plan), bytes_of(plan)
    return Report(
        request=request,
        memory=Memory(offered=math.floor(plan.topology.chip.offered), parts=parts, arguments=arguments_of(plan)),
        flops=flops,
        bytes=size,
        exchanges=exchanges,
        estimate=estimate_of(plan, flops, size, exchanges),
    )


def estimate_of(plan: Plan, flops: Flops, size: Bytes, exchanges: tuple[Exchange, ...]) -> Estimate:
    """The time of a step by these figures."""
    asked = roofline.Asked(topology=plan.topology, mesh=plan.mesh, tokens=plan.tokens)
    return roofline.estimate(asked, flops, size, exchanges, elementwise=elementwise_bytes(plan))


def parts_of(plan: Plan) -> Parts:
    """What of a device's memory is for what."""
    settings, chip = plan.run.settings, plan.topology.chip
    if plan.kind == "train":
        source = plan.length if plan.run.spec.trunk.crosses else None
        return memory.train(plan.run.spec, settings, plan.mesh, plan.rows, plan.target, source, chip.kind)
    make = serving.prefill if plan.kind == "prefill" else serving.decode
    return make(plan.run.spec, plan.compute, plan.mesh, plan.rows, plan.length, chip.kind)


def arguments_of(plan: Plan) -> int | None:
    """Bytes of the state and the batch of a training step."""
    if plan.kind != "train":
        return None
    source = plan.length if plan.run.spec.trunk.crosses else None
    return memory.arguments(plan.run.spec, plan.run.settings, plan.mesh, plan.rows, plan.target, source)


def exchanges_of(plan: Plan) -> tuple[Exchange, ...]:
    """What a device must send, none of it beside other work."""
    model, chip = Transformer(plan.run.spec, plan.compute), plan.topology.chip
    if plan.kind == "train":
        accumulate = plan.run.settings.train.accumulate
        return traffic.exchanges(model, plan.rows, plan.target, plan.mesh, accumulate=accumulate, device_kind=chip.kind)
    length = 1 if plan.kind == "decode" else plan.length
    return traffic.exchanges(model, plan.rows, length, plan.mesh, training=False, device_kind=chip.kind)


def flops_of(plan: Plan) -> Flops:
    """FLOPs of a device: what the model asks for, and what its program does, with what remat does again."""
    model, devices = plan.run.spec, plan.topology.devices
    share = plan.tokens / devices
    source = plan.length if model.trunk.crosses else None
    training = plan.kind == "train"
    if plan.kind == "decode":
        asked = decoding.step_flops(model, plan.length)
        products, attention = asked.total - asked.scores, asked.scores
    else:
        asked = accounting.flops_per_token(model, plan.target, training=training, source_len=source)
        products, attention = executed(model, plan.compute, plan.target, training, source)
    experts = 0.0 if plan.compute.experts in ("capacity", "dense") else _experts(model, plan.compute, training)
    kernels = {ATTENTION: attention * share, roofline.GROUPED: experts * share}
    return Flops(
        model={name: n * share for name, n in dataclasses.asdict(asked).items() if n},
        program=(products - experts) * share,
        kernels={name: n for name, n in kernels.items() if n},
    )


def _experts(model: spec.Model, compute: Compute, training: bool) -> float:
    """FLOPs a token of the products of routed experts: once forwards, twice backwards, once more if made again."""
    further = model.mtp.decoder.layers * model.mtp.depth if model.mtp and training else ()
    passes = 1 if not training else 3 if compute.remat == "none" else 4
    return passes * sum(_routed(block.ffn, model.d_model) for block in (*model.layers, *further))


def _routed(ffn: spec.FeedForward | spec.MoE, width: int) -> float:
    if not isinstance(ffn, spec.MoE):
        return 0.0
    return ffn.top_k * 2.0 * width * ffn.expert.d_ff * (3 if ffn.expert.gated else 2)


def executed(
    model: spec.Model, compute: Compute, length: int, training: bool, source: int | None = None
) -> tuple[float, float]:
    """FLOPs a token of products and of attention kernels that a step does, remat included."""
    forward = accounting.flops_per_token(model, length, training=False, source_len=source)
    across = sum(_across(block, source or length) for block in model.layers)
    scores = forward.scores + across
    if not training:
        return forward.total - scores, scores
    whole = accounting.flops_per_token(model, length, training=True, source_len=source)
    further = (model.mtp.decoder,) * model.mtp.depth if model.mtp else ()
    ahead = sum(accounting.block_flops(b, model.d_model, length, length).scores for s in further for b in s.layers)
    products = whole.total - whole.scores - 3 * (across + ahead)
    kernels = (scores + ahead) * (1 + BACKWARD / FORWARD)
    for stack in (*model.stacks.values(), *further):
        # What an encoder reads beside a decoder has a length of its own.
        own = source if stack is model.encoder and source else length
        for block, last in _ends(stack):
            again, attention = _again(block, compute, model.d_model, own, source or length, last)
            products, kernels = products + again * own / length, kernels + attention * own / length
    return products, kernels


def _across(block: spec.Block, source: int) -> float:
    """FLOPs a token of the scores of cross-attention, which kernels make."""
    return 4.0 * block.cross.num_heads * block.cross.head_dim * source if block.cross is not None else 0.0


def _ends(stack: spec.Stack) -> Iterator[tuple[spec.Block, bool]]:
    """Its layers, and whether each is the last of those that are computed again together."""
    for number, block in enumerate(stack.layers):
        place = number - len(stack.head)
        inside = 0 <= place < len(stack.body) * stack.repeats
        yield block, not inside or (place + 1) % len(stack.body) == 0


def _again(
    block: spec.Block, compute: Compute, width: int, length: int, source: int, last: bool
) -> tuple[float, float]:
    """FLOPs a token of one layer that the backward pass repeats: products, and attention."""
    if compute.remat == "none":
        return 0.0, 0.0
    flops, across = accounting.block_flops(block, width, length, source), _across(block, source)
    dense = block.ffn.shared if isinstance(block.ffn, spec.MoE) else block.ffn
    hidden = 2.0 * width * dense.d_ff if dense is not None else 0.0
    if compute.remat == "dots":
        return _routed(block.ffn, width), flops.scores + across
    kept = (*compute.remat_names, *compute.offload_names)
    # Nobody needs what the last product gave of the last layer, unless a norm reads it.
    unread = hidden if last and dense is not None and block.placement == "pre" else 0.0
    products = flops.projections + flops.cross - across + flops.ffn - unread
    products -= sum(hidden for name in ("ffn_up", "ffn_gate") if name in kept)
    n, k, key, value = layers.heads(block.mixer)
    of_head = {"q": n * key, "k": k * key, "v": k * value, "attention_out": n * value}
    if isinstance(block.mixer, spec.Attention):
        products -= sum(2.0 * width * features for name, features in of_head.items() if name in kept)
    return products, 0.0 if "attended" in kept else flops.scores + across


def bytes_of(plan: Plan) -> Bytes:
    """What a device must read from HBM or write: weights as often as they are used, the cache, and what is kept."""
    host = 0.0
    if plan.kind == "train":
        host = host_bytes(plan.run.spec, plan.run.settings.optimizer, plan.mesh, plan.compute.rules)
    return Bytes(minimal=_minimal(plan), host=host)


def _minimal(plan: Plan) -> float:
    model, compute, item = plan.run.spec, plan.compute, BYTES[plan.compute.dtype]
    if plan.kind == "decode":
        held = serving.decode(model, compute, plan.mesh, plan.rows, plan.length, plan.topology.chip.kind)
        visited = decoding.weights_read(model, plan.rows) / accounting.parameters(model).total
        return _gathered(plan) * item * visited + held.cache
    if plan.kind == "prefill":
        held = serving.prefill(model, compute, plan.mesh, plan.rows, plan.length, plan.topology.chip.kind)
        return _gathered(plan) * item + held.cache
    parts, passes = parts_of(plan), 2 if compute.remat == "none" else 3
    kept = sum(size for name, size in parts.activations.items() if name not in ("layer", "head"))
    accumulate = plan.run.settings.train.accumulate
    update = update_bytes(model, plan.run.settings.optimizer, plan.mesh, compute.rules)
    return update + accumulate * (_gathered(plan) * item * passes + 2 * kept)


def _gathered(plan: Plan) -> float:
    """Numbers of the parameters that a device multiplies by, those of other devices that it gathers among them."""
    rules, total = sharding.RULES[plan.compute.rules], 0.0
    for leaf in leaves(plan.run.spec):
        stays = {a for name in leaf.names if name == ax.EXPERTS for a in rules[name]} | {"tensor"}
        total += math.prod(leaf.shape) / math.prod(
            plan.mesh.get(a, 1) for name in leaf.names for a in rules[name] if a in stays
        )
    return total


def _ways(plan: Plan, name: str) -> int:
    return math.prod(plan.mesh.get(axis, 1) for axis in sharding.RULES[plan.compute.rules][name])


@functools.lru_cache(maxsize=256)
def _elementwise(model: spec.Model, compute: Compute, tensor: int) -> float:
    """Numbers a token that norms, sums, rotations and gates read and write in one pass of all layers."""
    total, width = 0.0, model.d_model
    for block in (*model.layers, *(model.mtp.decoder.layers * model.mtp.depth if model.mtp else ())):
        n, k, key, _ = layers.heads(block.mixer)
        branches = 3 if block.cross is not None else 2
        norms = branches * (2 if block.placement == "sandwich" else 1)
        ffn, dense = block.ffn, block.ffn if isinstance(block.ffn, spec.FeedForward) else block.ffn.shared
        total += 2 * width * (norms + branches) + 2 * (n + k) * key / tensor
        total += (3 if dense.gated else 2) * dense.d_ff / tensor if dense is not None else 0
        if isinstance(ffn, spec.MoE):
            # Rows are filled, gated, emptied and summed.
            total += ffn.top_k * (6 * width + 3 * ffn.expert.d_ff / tensor)
    return total


def elementwise_bytes(plan: Plan) -> float:
    """Bytes that a device's work beside products reads and writes; backwards as much as in two passes."""
    ways = _ways(plan, ax.BATCH) * (_ways(plan, ax.LENGTH) if plan.kind != "decode" else 1)
    numbers = _elementwise(plan.run.spec, plan.compute, plan.mesh.get("tensor", 1)) * plan.tokens / ways
    passes = 1
    update = 0.0
    if plan.kind == "train":
        passes = 3 if plan.compute.remat == "none" else 4
        update = update_bytes(plan.run.spec, plan.run.settings.optimizer, plan.mesh, plan.compute.rules)
    return numbers * BYTES[plan.compute.dtype] * passes + update

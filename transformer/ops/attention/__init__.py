"""Attention: one door, several bodies behind one signature.

Every body computes softmax(softcap(scale · q kᵀ + bias) + mask) v and takes the same `Call`; it says what it can't
serve.
"""

import functools
import logging
from collections.abc import Callable

from jaxtyping import Array, Float

from transformer import axes as ax
from transformer.ops.attention import blockwise, context, reference, splash
from transformer.ops.attention.call import NOTHING, Call, Extra, Where
from transformer.sharding import platform, ways

log = logging.getLogger(__name__)

_MODULES = {"reference": reference, "blockwise": blockwise, "splash": splash}
BODIES: dict[str, Callable] = {name: module.attend for name, module in _MODULES.items()}
REFUSALS: dict[str, Callable[[Call], str | None]] = {name: module.refuse for name, module in _MODULES.items()}

# With fewer queries, or so few scores a head, a loop over blocks gains nothing (benchmarks/attention.py).
FEW_QUERIES, FEW_SCORES = 32, 64 * 64


def attend(
    body: str,
    call: Call,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    where: Where,
    extra: Extra = NOTHING,
) -> Float[Array, "B T N Hv"]:
    """Runs the named attention body; "auto" chooses one and logs its choice once.

    Query head n reads key head n // G with G = N / K. A query that sees no key gives zeros. Softmax in float32;
    dtype in = dtype out.

    Raises:
      ValueError: the named body can't serve the call; the message says why.
    """
    parts = ways(ax.LENGTH, call.rules)
    name = choose(call, q.shape[1] // parts, k.shape[1] // parts) if body == "auto" else body
    reason = REFUSALS[name](call)
    if reason:
        raise ValueError(f"compute.attention={name!r}: {reason}")
    if parts > 1:
        return context.attend(_MODULES[name], call, q, k, v, where, extra)
    return BODIES[name](call, q, k, v, where, extra)


def choose(call: Call, q_length: int, k_length: int) -> str:
    """The body that "auto" stands for at these lengths on this platform."""
    small = q_length < FEW_QUERIES or q_length * k_length <= FEW_SCORES
    kernels = platform() == "tpu" and splash.refuse(call) is None
    name = "reference" if small else "splash" if kernels else "blockwise"
    if q_length >= FEW_QUERIES:  # below, there is nothing to choose
        _log_choice(name, platform(), q_length, k_length)
    return name


@functools.cache
def _log_choice(name: str, platform: str, q_length: int, k_length: int) -> None:
    log.info("attention=auto: %s for T=%d, S=%d on %s", name, q_length, k_length, platform)


__all__ = ["BODIES", "Call", "Extra", "Where", "attend", "choose"]

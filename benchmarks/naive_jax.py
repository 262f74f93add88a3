"""The naive side of `train_step.py`: a plain JAX step, as one writes it for a single model and a single machine.

Layers in a Python loop, attention over a whole mask, every expert on every token, all logits at once, optax's AdamW,
one jit with the state donated. Parameters are float32 and cast for the run's dtype; softmaxes and the loss are float32.
"""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import workers


@dataclass(frozen=True)
class Style:
    """How a family's layer differs from a Llama's."""

    layer_norm: bool = False  # with biases everywhere, and a plain GELU feed-forward
    learned_positions: bool = False  # in place of rotary ones
    encoder: bool = False  # post-norm, sees both ways, with token types and a transform before the head


STYLES = {
    "gpt2": Style(layer_norm=True, learned_positions=True),
    "bert": Style(layer_norm=True, learned_positions=True, encoder=True),
    "llama3": Style(),
    "mixtral": Style(),
}


def init(rng: np.random.Generator, m: dict, style: Style) -> dict:
    """Parameters of a model with dimensions `m`."""
    d, heads = m["d_model"], m["num_heads"]
    kv, size = m.get("num_kv_heads", heads), m.get("head_dim", d // heads)
    hidden = m.get("d_ff") or 4 * d

    def table(*shape: int) -> jax.Array:
        return jnp.asarray(0.02 * rng.standard_normal(shape, np.float32))

    def linear(inputs: int, outputs: int) -> dict:
        bias = {"b": jnp.zeros(outputs)} if style.layer_norm else {}
        return {"w": table(inputs, outputs)} | bias

    def norm() -> dict:
        return {"scale": jnp.ones(d)} | ({"bias": jnp.zeros(d)} if style.layer_norm else {})

    def layer() -> dict:
        heads_of = dict(q=linear(d, heads * size), k=linear(d, kv * size), v=linear(d, kv * size))
        made = heads_of | dict(out=linear(heads * size, d), norm1=norm(), norm2=norm())
        if "num_experts" in m:
            e = m["num_experts"]
            experts = dict(gate=table(e, d, hidden), up=table(e, d, hidden), down=table(e, hidden, d))
            return made | dict(router=table(d, e), experts=experts)
        gate = {} if style.layer_norm else {"gate": linear(d, hidden)}
        return made | gate | dict(up=linear(d, hidden), down=linear(hidden, d))

    params = dict(tokens=table(m["vocab_size"], d), layers=[layer() for _ in range(m["num_layers"])])
    if style.learned_positions:
        params["positions"] = table(m["max_length"], d)
    if style.encoder:
        params |= dict(types=table(m["token_types"], d), norm=norm(), transform=linear(d, d), transform_norm=norm())
        params["head_bias"] = jnp.zeros(m["vocab_size"])
    else:
        params["norm"] = norm()
    if not m.get("tied", True):
        params["head"] = table(m["vocab_size"], d)
    return params


def linear(p: dict, x: jax.Array) -> jax.Array:
    """x [… D] times a kernel."""
    return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]


def norm(p: dict, x: jax.Array, eps: float) -> jax.Array:
    """LayerNorm with, RMSNorm without a bias."""
    y = x.astype(jnp.float32)
    if "bias" in p:
        y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps) * p["scale"]
    return (y + p["bias"] if "bias" in p else y).astype(x.dtype)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions over x [B T N H], whose halves are pairs."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(p: dict, x: jax.Array, m: dict, style: Style) -> jax.Array:
    """x [B T D]; all scores [B N T T] at once."""
    batch, length, _ = x.shape
    q, k, v = (linear(p[name], x).reshape(batch, length, heads, -1) for name, heads in _heads(m).items())
    if not style.learned_positions:
        q, k = (rotate(y, m["rope_theta"]) for y in (q, k))
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / jnp.sqrt(q.shape[-1]).astype(x.dtype)
    if not style.encoder:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    return linear(p["out"], jnp.einsum("bnqk,bknh->bqnh", weights, v).reshape(batch, length, -1))


def _heads(m: dict) -> dict[str, int]:
    kv = m.get("num_kv_heads", m["num_heads"])
    return dict(q=m["num_heads"], k=kv, v=kv)


def feed_forward(p: dict, x: jax.Array, m: dict, style: Style) -> tuple[jax.Array, jax.Array]:
    """What a layer adds to x [B T D], and its balance loss."""
    if "experts" in p:
        return mixture(p, x, m)
    if style.layer_norm:
        return linear(p["down"], jax.nn.gelu(linear(p["up"], x), approximate=not style.encoder)), jnp.zeros(())
    return linear(p["down"], jax.nn.silu(linear(p["gate"], x)) * linear(p["up"], x)), jnp.zeros(())


def mixture(p: dict, x: jax.Array, m: dict) -> tuple[jax.Array, jax.Array]:
    """Every expert on every token, of which the picked ones weigh; and Switch's balance loss."""
    chances = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    best, picked = jax.lax.top_k(chances, m["top_k"])
    chosen = jax.nn.one_hot(picked, m["num_experts"])  # [B T K E]
    weights = jnp.einsum("btk,btke->bte", best / best.sum(-1, keepdims=True), chosen).astype(x.dtype)
    e = p["experts"]
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, e["gate"])) * jnp.einsum("btd,edf->btef", x, e["up"])
    shares = chosen.sum(2).mean((0, 1)) / m["top_k"]
    balance = m["num_experts"] * (shares * chances.mean((0, 1))).sum()
    return jnp.einsum("btef,efd,bte->btd", hidden, e["down"], weights), balance


def loss(params: dict, batch: dict, m: dict, style: Style, dtype: str, auxiliary: float) -> jax.Array:
    """Mean nats of the targets, and what balances experts."""
    p, eps = jax.tree.map(lambda w: w.astype(dtype), params), m.get("norm_eps", 1e-5)
    x, balance = p["tokens"][batch["tokens"]], jnp.zeros(())
    if style.learned_positions:
        x = x + p["positions"][: x.shape[1]]
    if style.encoder:
        x = norm(p["norm"], x + p["types"][0], eps)
    for layer in p["layers"]:
        if style.encoder:
            x = norm(layer["norm1"], x + attention(layer, x, m, style), eps)
            x = norm(layer["norm2"], x + feed_forward(layer, x, m, style)[0], eps)
        else:
            x = x + attention(layer, norm(layer["norm1"], x, eps), m, style)
            more, penalty = feed_forward(layer, norm(layer["norm2"], x, eps), m, style)
            x, balance = x + more, balance + penalty
    if style.encoder:
        x = norm(p["transform_norm"], jax.nn.gelu(linear(p["transform"], x), approximate=False), eps)
    else:
        x = norm(p["norm"], x, eps)
    logits = (x @ p.get("head", p["tokens"]).T).astype(jnp.float32) + params.get("head_bias", 0.0)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (nats * batch["weights"]).sum() / batch["weights"].sum() + auxiliary * balance


class Trainer:
    """A model, its optimiser and one batch."""

    def __init__(self, task: dict):
        m, o, dtype = task["model"], task["optimizer"], task["dtype"]
        style = STYLES[m["family"]]
        adamw = optax.adamw(
            o["peak_lr"], o["b1"], o["b2"], o["eps"], weight_decay=o["weight_decay"],
            mask=lambda params: jax.tree.map(lambda w: w.ndim > 1, params),
        )  # fmt: skip
        optimizer = optax.chain(optax.clip_by_global_norm(o["clip_norm"]), adamw)

        def step(params: dict, state: tuple, batch: dict) -> tuple[dict, tuple, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, batch, m, style, dtype, task["auxiliary"])
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self.params = init(np.random.default_rng(0), m, style)
        self.state = optimizer.init(self.params)
        self.batch = jax.device_put(workers.random_batch(task))
        start = time.perf_counter()
        self.step = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.state, self.batch).compile()
        self.compile = time.perf_counter() - start

    def describe(self) -> dict:
        """What runs, and seconds to trace and compile it."""
        count = sum(w.size for w in jax.tree.leaves(self.params))
        return dict(
            parameters=count, versions=f"jax {jax.__version__}, optax {optax.__version__}", compile=self.compile
        )

    def run(self, steps: int) -> float:
        """Trains some steps; the last loss."""
        for _ in range(steps):
            self.params, self.state, value = self.step(self.params, self.state, self.batch)
        jax.block_until_ready((self.params, self.state))
        return float(value)


if __name__ == "__main__":
    workers.serve(Trainer)

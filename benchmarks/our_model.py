"""Our side of `train_step.py`: the step that train.py runs, on one batch of random tokens."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workers
from transformer import config, sharding
from transformer.nn.model import Transformer
from transformer.planning.matmuls import matmul_flops
from transformer.spec import MoE
from transformer.training.state import init_state
from transformer.training.step import compile_train_step, make_train_step


class Trainer:
    """The run that a task's config names."""

    def __init__(self, task: dict):
        run = config.resolve(config.load_config(task["config"]))
        self.settings = settings = run.settings
        self.mesh = sharding.make_mesh(settings.mesh)
        self.model = Transformer(run.spec, settings.compute)
        self.state = init_state(self.model, settings, self.mesh)
        self.batch = jax.device_put(batch_of(task), sharding.batch_sharding(self.mesh))
        with jax.set_mesh(self.mesh):
            start = time.perf_counter()
            self.step = compile_train_step(self.model, settings).lower(self.state, self.batch).compile()
            self.compile = time.perf_counter() - start

    def describe(self) -> dict:
        """What runs, and seconds to trace and compile it."""
        count = sum(x.size for x in jax.tree.leaves(self.state.params))
        return dict(parameters=count, versions=f"jax {jax.__version__}", compile=self.compile)

    def run(self, steps: int) -> float:
        """Trains some steps; the last loss."""
        with jax.set_mesh(self.mesh):
            for _ in range(steps):
                self.state, metrics = self.step(self.state, self.batch)
            jax.block_until_ready(self.state)
        return float(metrics["loss"])

    def multiply(self) -> Callable[[], None]:
        """One product of two square matrices."""
        x = jnp.ones((workers.MATMUL, workers.MATMUL), self.settings.compute.dtype)
        product = jax.jit(jnp.matmul)
        return lambda: product(x, x).block_until_ready()

    def products(self) -> float | None:
        """FLOPs of the products of a step; None where how many run depends on the loads of experts."""
        if any(isinstance(block.ffn, MoE) for block in self.model.spec.layers):
            return None
        with jax.set_mesh(self.mesh):
            # Every row is one segment, so leaving segments out runs the same products, in loops of known lengths.
            batch = self.batch | {"segment_ids": None}
            return matmul_flops(make_train_step(self.model, self.settings), self.state, batch)


def batch_of(task: dict) -> dict[str, np.ndarray]:
    """A task's batch with all that our loader adds."""
    batch = workers.random_batch(task)
    shape = batch["tokens"].shape
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    counted = batch["weights"].astype(np.int32)
    return batch | dict(target_bytes=counted, segment_ids=np.ones(shape, np.int32), positions=positions)


if __name__ == "__main__":
    workers.serve(Trainer)

"""The training steps of tiny models on a mesh of several axes, as digests: `python -m tests.laws.programs FAMILY …`."""

import hashlib
import json
import sys

import jax

from transformer import config, programs, sharding
from transformer.sharding import ShardingError

# Axes whose products split batches, experts, features and heads; the first that a family's tiny model divides by.
MESHES = (
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"data": 2, "fsdp": 2, "context": 2},
    {"slice": 2, "fsdp": 2, "data": 2},
)


def digest(family: str, sizes: dict[str, int]) -> str:
    """Of what JAX hands to the compiler.

    Raises:
      ShardingError: the mesh can't hold the model.
    """
    values = config.load_config(f"{family}:tiny").to_dict()
    values["mesh"] |= {"data": 1, **sizes}
    values["data"] |= {"batch_size": 8, "seq_len": 32}
    run = config.resolve(values)
    mesh = sharding.make_mesh(run.settings.mesh)
    with jax.set_mesh(mesh):
        make, args = programs.train(run, mesh)
        return hashlib.sha256(make().lower(*args).as_text().encode()).hexdigest()


def main(families: list[str]) -> None:
    """Prints {family: {mesh: digest}}."""
    found = {}
    for family in families:
        found[family] = {}
        for sizes in MESHES:
            try:
                found[family][str(sizes)] = digest(family, sizes)
            except ShardingError:
                continue
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Peak host memory of reading a Hugging Face directory, beside what has to be there.

    .venv/bin/python benchmarks/load_memory.py [--gigabytes 1.0]

writes a synthetic directory in Llama's shape, in shards, reads it in bfloat16 in a fresh process, and prints by how
much that process grew at most. What has to be there is what the devices of this host keep (on a CPU, all parameters)
and the largest group: the tensors that make one parameter, which is stacked over the layers. The requirement: at most
1.3 largest groups beyond what is kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ALLOWED = 1.3
MB = 1e6


def make(directory: Path, gigabytes: float) -> None:
    """A bfloat16 directory of about that size: eight layers, the token table about a fifth."""
    import ml_dtypes
    import numpy as np

    from transformer import api, families
    from transformer.checkpoints import hugging_face, weights
    from transformer.families import llama3

    width = 64 * max(1, round((gigabytes * 1e9 / 2 / 102) ** 0.5 / 64 / 1.09))
    dims = llama3.Dims(
        vocab_size=8 * width, d_model=width, num_layers=8, num_heads=width // 64, num_kv_heads=width // 64, head_dim=64,
        d_ff=2 * width + width // 2, max_length=2048, rope_theta=1e4, norm_eps=1e-5, attention_bias=False,
        mlp_bias=False, tied=False,
    )  # fmt: skip
    model = families.make("llama3", dims)
    like = api.init(api.build(model), abstract=True)
    shapes = {path: leaf.shape for path, leaf in weights.flatten(like).items()}
    rng = np.random.default_rng(0)

    def tensors():
        for link in weights.links(llama3.table(model), model.decoder):
            shape = weights.their_shape(link, shapes)
            yield link.name, rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    directory.mkdir()
    hugging_face.write_tensors(directory, tensors(), None, int(gigabytes * 1e9 / 5))
    (directory / "config.json").write_text(json.dumps(llama3.to_hf(dims)))


def memory(field: str) -> int:
    """A figure of this process in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def read(directory: str) -> None:
    """Reads the directory and prints what it took."""
    import jax
    import jax.numpy as jnp

    import transformer
    from transformer.checkpoints.weights import flatten

    jnp.zeros(1).block_until_ready()  # the backend is there before the measurement begins
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    _, params = transformer.from_hf(directory, dtype="bfloat16")
    jax.block_until_ready(params)
    grown, now = memory("VmHWM") - before, memory("VmRSS") - before
    sizes = [x.nbytes for x in flatten(params).values()]
    kept, group = sum(sizes), max(sizes)
    allowed = kept + ALLOWED * group
    print(
        f"kept by this host's devices {kept / MB:,.0f} MB, largest group {group / MB:,.0f} MB\n"
        f"grew by {grown / MB:,.0f} MB at most, {now / MB:,.0f} MB at the end\n"
        f"beyond what is kept: {(grown - kept) / group:.2f} largest groups (allowed: {ALLOWED}); "
        f"{'within' if grown <= allowed else 'BEYOND'} the {allowed / MB:,.0f} MB allowed"
    )


def main() -> None:
    """Makes the directory, and reads it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(args.read)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        make(directory, args.gigabytes)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, __file__, "--read", str(directory)], check=True, env=environment)


if __name__ == "__main__":
    main()

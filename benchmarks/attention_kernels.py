"""Compiles the attention kernels for TPUs that aren't there, and writes what the compiler made of them.

    python benchmarks/attention_kernels.py --write docs/kernels.md
    python benchmarks/attention_kernels.py --chips v5e --shapes "gpt-oss local"

needs the libtpu of `jax[tpu]` (or TPU_LIBRARY_PATH=.../libtpu.so) and no TPU. Nothing runs, nothing is timed.
Several at once need ALLOW_MULTIPLE_LIBTPU_LOAD=1. `attention_beside.py` measures tokamax's kernels alike.
"""

import argparse
import dataclasses
import os
import re
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from transformer import settings, sharding
from transformer.kernels import blocks
from transformer.ops.attention import Call, Extra, Where, attend
from transformer.spec import Mask, RelativeBias

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Attention of one row on one device: heads, key heads, head dims and tokens as published."""

    mask: Mask
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    length: int = 8192
    softcap: float | None = None
    sinks: bool = False
    relative: RelativeBias | None = None
    packed: bool = False
    dtype: str = "bfloat16"

    @property
    def shape(self) -> blocks.Shape:
        buckets = self.relative.num_buckets if self.relative else 0
        item = jnp.dtype(self.dtype).itemsize
        return blocks.Shape(
            self.heads // self.kv_heads, self.length, self.length, self.dim, self.v_dim, item, buckets
        )  # fmt: skip


CAUSAL = Mask(causal=True)
PROBLEMS = {
    "Llama 3 8B": Problem(CAUSAL, 32, 8, 128, 128),
    "Llama 3 8B, packed": Problem(CAUSAL, 32, 8, 128, 128, packed=True),
    "Llama 3 70B": Problem(CAUSAL, 64, 8, 128, 128),
    "Mistral 7B": Problem(Mask(causal=True, window=4096), 32, 8, 128, 128),
    "Gemma 2 27B global": Problem(CAUSAL, 32, 16, 128, 128, softcap=50.0),
    "Gemma 3 27B local": Problem(Mask(causal=True, window=1024), 32, 16, 128, 128),
    "Gemma 3 27B global": Problem(CAUSAL, 32, 16, 128, 128),
    "DeepSeek-V3": Problem(CAUSAL, 128, 128, 192, 128, length=4096),
    "gpt-oss local": Problem(Mask(causal=True, window=128), 64, 8, 64, 64, sinks=True),
    "gpt-oss full": Problem(CAUSAL, 64, 8, 64, 64, sinks=True),
    "T5 11B encoder": Problem(
        Mask(causal=False), 128, 128, 128, 128, length=512,
        relative=RelativeBias(num_buckets=32, max_distance=128, bidirectional=True),
    ),
    "StreamingLLM": Problem(Mask(causal=True, window=1020, sinks=4), 32, 8, 128, 128),
    "Llama 3 8B, float32": Problem(CAUSAL, 32, 8, 128, 128, dtype="float32"),
}  # fmt: skip


def device(chip: str) -> jax.Device:
    """A core of the chip; both of them where it presents them as one."""
    options = {"chip_config_name": "megacore"} if chip == "v4" else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip], **options).devices[0]


def compiled(problem: Problem, on: jax.Device, block: int | None = None):
    """The forward pass and its gradients, in one program: the output, and what flows back from a sum of it."""
    mesh = sharding.make_mesh(settings.Mesh(data=1), [on])
    here = NamedSharding(mesh, PartitionSpec())

    def of(*shape, dtype=problem.dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    p, row = problem, (1, problem.length)
    q, k, v = of(*row, p.heads, p.dim), of(*row, p.kv_heads, p.dim), of(*row, p.kv_heads, p.v_dim)
    ids = of(*row, dtype=jnp.int32)
    where = Where(ids, ids, *((ids, ids) if p.packed else ()))
    table = p.relative and of(p.relative.num_buckets, p.heads, dtype=jnp.float32)
    extra = Extra(of(p.heads, dtype=jnp.float32) if p.sinks else None, table)
    call = Call(p.mask, p.dim**-0.5, p.softcap, aligned=True, relative=p.relative, block=block)

    def with_gradients(q, k, v, extra, where):
        out, pull = jax.vjp(lambda *x: attend("splash", call, *x[:3], where, x[3]), q, k, v, extra)
        return out, pull(jnp.ones_like(out))

    with jax.set_mesh(mesh):
        return jax.jit(with_gradients).lower(q, k, v, extra, where).compile()


def needed_pairs(problem: Problem) -> int:
    """Pairs of a query and a key that the mask shows in one document of consecutive positions."""
    behind = np.arange(problem.length)
    ahead = np.zeros_like(behind) if problem.mask.causal else behind[::-1]
    if problem.mask.window is None:
        return int((behind + 1 + ahead).sum())
    near = np.minimum(behind, problem.mask.window - 1)
    sinks = np.minimum(behind - near, problem.mask.sinks)
    return int((near + 1 + np.minimum(ahead, problem.mask.window - 1) + sinks).sum())


def flops_ratio(problem: Problem, best: blocks.Blocks) -> float:
    """Pairs in visited blocks over pairs that the mask shows."""
    visits = blocks.visited(problem.mask, problem.length, problem.length, best.q, best.k)
    return visits * best.q * best.k / needed_pairs(problem)


def bytes_ratio(problem: Problem, best: blocks.Blocks) -> float:
    """Bytes that the forward pass moves over those of q, k, v and out once; keys and values for each visit."""
    s = problem.shape
    visits = blocks.visited(problem.mask, s.q_length, s.k_length, best.q, best.k)
    outer = s.group * s.q_length * (s.dim + s.v_dim)
    loads = visits * s.group // best.heads
    return (outer + loads * best.k * (s.dim + s.v_dim)) / (outer + s.k_length * (s.dim + s.v_dim))


def vmem_used(text: str) -> dict[str, float]:
    """MiB of VMEM of each kernel, as the compiler allotted them."""
    found = {}
    # A custom call spans lines: its kernel's own text is in it.
    for call in re.split(r"\n  (?:ROOT )?%", text):
        name = re.match(r"\S*?(splash_[a-z_]+?)_*[.\d]* = .*custom-call\(", call)
        used = re.search(r'used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', call)
        if name and used:
            found[name[1]] = int(used[1]) / blocks.MiB
    return found


class Schedules:
    """The compiler's schedules of kernels, which libtpu writes where it was told to before it was loaded."""

    def __init__(self, folder: Path):
        self.folder = folder
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_category_filter=utilization"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}"

    def take(self) -> dict[str, "Schedule"]:
        """Those of the kernels that were compiled since."""
        found = {}
        for path in self.folder.glob("*utilization.txt"):
            if name := re.search(r"splash_(forward|d_queries|d_keys_values|mha_fwd|mha_dkv)", path.name):
                lines = [line.split() for line in path.read_text().splitlines()]
                issued = np.array([int(line[0]) for line in lines[4:]])
                used = np.flatnonzero(issued)
                found[name[0]] = Schedule(int(lines[2][0]), int(issued.sum()), int(used[-1] - used[0] + 1))
            path.unlink()
        return found


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's bundles from its first product to its last, and what they issue to so many MXUs."""

    mxus: int
    issued: int
    bundles: int

    @property
    def busy(self) -> float:
        """The MXUs' part."""
        return self.issued / self.mxus / self.bundles


def rows(chip: str, name: str, problem: Problem, schedules: Schedules) -> list[str]:
    """Lines of the table: the forward pass and the backward pass."""
    on, lines = device(chip), []
    try:
        used = vmem_used(compiled(problem, on).as_text())
    except jax.errors.JaxRuntimeError as error:
        return [f"| {name} | {chip} | | | | | | {_first_words(error)} |"]
    busy = {kernel: schedule.busy for kernel, schedule in schedules.take().items()}
    for backward in (False, True):
        best = blocks.choose(on.device_kind, problem.shape, problem.mask, backward)
        kernels = [kernel for kernel in used if ("forward" in kernel) != backward]
        shape = dataclasses.replace(problem.shape, group=best.heads)
        estimate = blocks.vmem_bytes(shape, best.q, best.k, backward) / blocks.MiB
        moved = "" if backward else f"{bytes_ratio(problem, best):.2f}"
        cells = [
            *(name, chip, "backward" if backward else "forward", f"{best.q} × {best.k} × {best.heads}"),
            *(f"{flops_ratio(problem, best):.2f}", moved),
            f"{max(used[kernel] for kernel in kernels):.1f} of {estimate:.1f}",
            ", ".join(f"{busy[kernel]:.2f}" for kernel in sorted(kernels, reverse=True)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:120].replace("|", "/")


def window_row(chip: str, name: str, problem: Problem) -> str:
    """What the policy chooses for a window, and its model of time for blocks of every size, narrow ones, too."""
    kind, group = device(chip).device_kind, problem.shape.group
    chosen = [blocks.choose(kind, problem.shape, problem.mask, backward) for backward in (False, True)]
    cells = [name, chip, ", ".join(f"{best.q} × {best.k}" for best in chosen)]
    for size in WINDOW_BLOCKS:
        terms = blocks.CHIPS[kind], problem.shape, problem.mask, size, size, group
        times = [problem.kv_heads * blocks.seconds(*terms, backward) * 1e3 for backward in (False, True)]
        ratio = flops_ratio(problem, blocks.Blocks(size, size, group, 0))
        cells.append(f"{ratio:.2f}: {times[0]:.2f}, {times[1]:.2f}")
    return f"| {' | '.join(cells)} |"


HEAD = """| shape | chip | pass | blocks q × k × heads | FLOPs / needed | bytes / least | VMEM, MiB | MXU |
|---|---|---|---|---|---|---|---|"""
WINDOW_BLOCKS = 128, 256, 512
WINDOW_HEAD = f"""| shape | chip | chosen | {" | ".join(f"{size} × {size}" for size in WINDOW_BLOCKS)} |
|---|---|---|---|---|---|"""


def write(page: Path, name: str, table: str) -> None:
    """Puts a table where the page has one of that name."""
    begin, end = f"<!-- table: {name}, benchmarks/attention_kernels.py -->", f"<!-- end of table: {name} -->"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(TOPOLOGIES), help="comma-separated")
    parser.add_argument("--shapes", default=None, help="one of the published shapes (default: all)")
    parser.add_argument("--write", type=Path, help="the page whose tables are to be replaced")
    args = parser.parse_args()
    chips, lines = args.chips.split(","), []
    problems = {name: problem for name, problem in PROBLEMS.items() if args.shapes in (None, name)}
    with tempfile.TemporaryDirectory() as folder:
        schedules = Schedules(Path(folder))
        for name, problem in problems.items():
            for chip in chips:
                lines += (made := rows(chip, name, problem, schedules))
                print("\n".join(made), flush=True)
    narrow = {name: p for name, p in problems.items() if p.mask.window is not None and p.mask.window <= 1024}
    windows = [window_row(chip, name, problem) for name, problem in narrow.items() for chip in chips]
    print("\n".join(windows))
    if args.write:
        write(args.write, "compiled", "\n".join([HEAD, *lines]))
        write(args.write, "windows", "\n".join([WINDOW_HEAD, *windows]))


if __name__ == "__main__":
    main()

"""Writes the tables of docs/meshes.md: what was compared, what is sent between devices, what policies do to memory.

    python benchmarks/meshes.py check --families llama3 mixtral --write docs/meshes.md
    python benchmarks/meshes.py traffic --meshes fsdp=8 data=2,fsdp=4 --write docs/meshes.md
    python benchmarks/meshes.py memory --write docs/meshes.md

`check` runs `transformer.check_mesh` on host devices. The others compile a training step for a TPU slice, which needs
the libtpu of `jax[tpu]` (or TPU_LIBRARY_PATH=.../libtpu.so) and no TPU; nothing runs. Each replaces its own rows and
keeps the others. Several at once need ALLOW_MULTIPLE_LIBTPU_LOAD=1.
"""

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax

from transformer import check_mesh, config, families, sharding
from transformer.nn.model import Transformer
from transformer.planning import topology, traffic
from transformer.planning.collectives import collectives
from transformer.training.meshes import Verdict, random_batch
from transformer.training.state import abstract_state
from transformer.training.step import compile_train_step

ROWS, LENGTH = 16, 512
KEYS = {"check": 1, "traffic": 2, "memory": 2}  # cells that name a row
WIDTH = dict(d_model=512, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=64, vocab_size=1024)
# Where the expert axis is more than 1, the mixture; the same widths, or nearly.
DENSE = "llama3:tiny", dict(WIDTH, d_ff=1536)
MIXTURE = "mixtral:tiny", dict(WIDTH, d_ff=512, num_experts=8)
PRESETS = (
    "data=8",
    "fsdp=8",
    "tensor=8",
    "data=2,fsdp=4",
    "fsdp=4,tensor=2",
    "data=2,fsdp=2,tensor=2",
    "fsdp=2,expert=4",
    "fsdp=2,context=4",
)
# Products next to a gathering or a scattering are taken apart, to overlap it with a permutation for each part: the same
# bytes, and a little more, in messages that don't say what they are for.
APART = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
POLICIES = {
    "nothing": {},
    'remat="dots"': {"compute.remat": "dots"},
    'remat="names", attended, ffn_up, ffn_gate': {
        "compute.remat": "names", "compute.remat_names": ("attended", "ffn_up", "ffn_gate"),
    },
    'remat="names", attended': {"compute.remat": "names", "compute.remat_names": ("attended",)},
    'remat="names", ffn_up, ffn_gate offloaded': {
        "compute.remat": "names", "compute.remat_names": ("attended",), "compute.offload_names": ("ffn_up", "ffn_gate"),
    },
    'remat="full"': {"compute.remat": "full"},
    'moments_dtype="bfloat16"': {"compute.remat": "full", "optimizer.moments_dtype": "bfloat16"},
    'moments_memory="pinned_host"': {"compute.remat": "full", "optimizer.moments_memory": "pinned_host"},
    "accumulate=4": {"compute.remat": "full", "train.accumulate": 4},
    'accumulate=4, accumulate_dtype="bfloat16"': {
        "compute.remat": "full", "train.accumulate": 4, "train.accumulate_dtype": "bfloat16",
    },
}  # fmt: skip


def run_of(page: tuple[str, dict], sizes: dict[str, int], **fields: Any) -> config.Run:
    """The run of a page and its widths on a mesh, with `fields` by dotted name."""
    values = config.load_config(page[0]).to_dict()
    values["model"] |= page[1]
    values["data"] |= dict(seq_len=LENGTH, batch_size=ROWS)
    values["compute"] |= dict(dtype="bfloat16")
    values["mesh"] |= {"data": 1} | sizes
    for name, value in fields.items():
        config.override(values, name, repr(value))
    return config.resolve(values)


def compiled(run: config.Run, devices: list, apart: bool):
    """The training step for devices that needn't be there."""
    mesh = sharding.make_mesh(run.settings.mesh, devices)
    model = Transformer(run.spec, run.settings.compute)
    state, place = abstract_state(model, run.settings, mesh), sharding.batch_sharding(mesh)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in random_batch(run).items()}
    with jax.set_mesh(mesh):
        return compile_train_step(model, run.settings).lower(state, shapes).compile(APART if apart else None)


def check_rows(verdicts: list[Verdict]) -> list[str]:
    """What was compared, a line a family."""
    lines = []
    for v in verdicts:
        worst = [f"{d.size:.1e}, {d.name}, {d.mesh}" if d.name else "–" for d in v.worst.values()]
        told = f"{len(v.same)}" if v.passed else f"DIFFERS: {'; '.join(v.wrong) or 'nothing compared'}"
        lines.append(f"| {v.family} | {told} | {len(v.refused)} | {v.leaves} | {' | '.join(worst)} |")
    return lines


def traffic_row(mesh: str, place: str, devices: list) -> str:
    """Theory and what was compiled, in KB, for each purpose."""
    sizes = check_mesh.parse_mesh(mesh, len(devices))
    page, fields = (MIXTURE, {"compute.experts": "capacity"}) if "expert" in sizes else (DENSE, {})
    run = run_of(page, sizes, **{"compute.attention": "reference", **fields})
    start = time.perf_counter()
    text = compiled(run, devices, apart=True).as_text()
    found = collectives(text, dict.fromkeys(sharding.MESH_AXES, 1) | sizes)
    got = traffic.measured(found)
    model = Transformer(run.spec, run.settings.compute)
    want = traffic.expected(model, ROWS, LENGTH, sizes)
    cells = [f"{want[name] / 1e3:,.0f} / {got[name] / 1e3:,.0f}" for name in traffic.PURPOSES]
    share = sum(c.total for c in found if c.kind == "all-reduce" and {*c.axes} <= {"data", "fsdp", "expert"})
    return (
        f"| {mesh} | {place} | {' | '.join(cells)} | {sum(got.values()) / sum(want.values()):.2f} | "
        f"{share / max(got['gradients'], 1):.0%} | {time.perf_counter() - start:.0f} |"
    )


def memory_row(name: str, place: str, devices: list) -> str:
    """Bytes of a device and of its host: what the step holds, and its peak."""
    start = time.perf_counter()
    memory = compiled(run_of(DENSE, {"fsdp": len(devices)}, **POLICIES[name]), devices, apart=True).memory_analysis()
    cells = [memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.peak_memory_in_bytes]
    cells += [memory.host_argument_size_in_bytes, memory.host_temp_size_in_bytes]
    told = " | ".join(f"{cell / 2**20:,.1f}" for cell in cells)
    return f"| {name} | {place} | {told} | {time.perf_counter() - start:.0f} |"


def write(page: Path, section: str, rows: list[str]) -> None:
    """Puts rows into a section of the page: in place of those of the same key, or at the end."""
    mark = rf"(<!-- rows: {section} -->\n)(.*?)(<!-- end of rows -->)"
    text = page.read_text()
    old = re.search(mark, text, re.DOTALL)[2].splitlines()
    kept = {tuple(row.split("|")[1 : 1 + KEYS[section]]): row for row in [*old, *rows]}
    body = "".join(row + "\n" for row in kept.values())
    page.write_text(re.sub(mark, lambda found: found[1] + body + found[3], text, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("check", "traffic", "memory"))
    parser.add_argument("--families", nargs="+", default=list(families.names()))
    parser.add_argument("--meshes", nargs="+", help="of 8 devices (default: all, or the presets of `traffic`)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--topology", help="default: v5p:2x2x2, and v5p:2x2x1 of `memory`")
    parser.add_argument("--write", type=Path, help="the page whose rows are to be replaced")
    args = parser.parse_args()
    if args.section == "check":
        made = (check_rows(check_mesh.check([family], 8, args.meshes)) for family in args.families)
    else:
        name = args.topology or ("v5p:2x2x2" if args.section == "traffic" else "v5p:2x2x1")
        devices = topology.parse(name).describe()
        row, names = (traffic_row, args.meshes or PRESETS) if args.section == "traffic" else (memory_row, args.policies)
        made = ([row(each, name, devices)] for each in names)
    for rows in made:
        print("\n".join(rows), flush=True)
        if args.write:
            write(args.write, args.section, rows)


if __name__ == "__main__":
    main()

"""The self-check of the lesson: six questions, whose answers point to figures and whose numbers are computed."""

from transformer import spec
from transformer.figures.data import caches, decoding, experts, tiles, windows
from transformer.figures.look import Look
from transformer.figures.sizes import binary

COUNT = 6


def asked(look: Look) -> list[tuple[str, str]]:
    """(question, answer) of each, with [words](#figure) where an answer points to a figure of the page."""
    known = numbers()
    return [(look(f"question {i}"), look(f"answer {i}", **known)) for i in range(1, COUNT + 1)]


def numbers() -> dict[str, str]:
    """What the answers cite, by name, from the data of the figures that they point to."""
    work, held = decoding.work(16), {size.name: size for size in caches.schemes(caches.Shape(), 32768, "bfloat16")}
    limits = decoding.limits("llama3:8b", 8192, rows=(1,))
    moved = tiles.traffic(spec.Mask(causal=True), 16384, 128, 512)
    kept = caches.latent("deepseek_v3:671b")
    (total, active), (more, as_active) = experts.sizes("mixtral:8x7b", (8, 64), 2).values()
    return dict(
        without=f"{work['without'].total[-1]:,}",
        cached=f"{work['with'].total[-1]:,}",
        read=f"{limits.memory[0] * 1e3:.3g}",
        multiply=f"{limits.compute[0] * 1e3:.2g}",
        **{name.lower(): f"{size.numbers // size.layers:,}" for name, size in held.items()},
        reach=str(windows.reach((4,) * 6)),
        far=f"{windows.reach(windows.pattern('mistral:7b-v0.1')):,}",
        standard=binary(sum(moved.standard.values())),
        unskipped=binary(sum(moved.unskipped.values())),
        tiled=binary(sum(moved.tiled.values())),
        heads=str(kept.heads),
        kept=f"{kept.kept:,}",
        made=f"{kept.made:,}",
        total=f"{total / 1e9:.1f}",
        active=f"{active / 1e9:.1f}",
        more=f"{more / 1e9:.0f}",
        as_active=f"{as_active / 1e9:.1f}",
    )

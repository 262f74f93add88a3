"""Draws how a run on pairs learned, from its metrics: `python benchmarks/transduction.py WORKDIR FIGURE.svg`."""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 260, 56, 24, 36
# Loss is drawn on a scale that ends where a run is no longer at its very beginning.
LOSS = 1.5


def read(workdir: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, training loss) and (step, fraction answered exactly) of a run."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]
    return losses, [(r["step"], r["exact_match"]) for r in records if "exact_match" in r]


def figure(losses: list[tuple[int, float]], exact: list[tuple[int, float]]) -> str:
    """Both curves over the steps, as SVG."""
    last, floor = losses[-1][0], HEIGHT - BOTTOM

    def x(step: int) -> float:
        return LEFT + step / last * (WIDTH - 2 * LEFT)

    def y(share: float) -> float:
        return floor - min(share, 1) * (floor - TOP)

    def line(points: list[tuple[int, float]], scale: float, colour: str) -> str:
        where = " ".join(f"{x(step):.1f},{y(value / scale):.1f}" for step, value in points)
        return f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Arial" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{y(share)}" y2="{y(share)}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y(share) + 4}" text-anchor="end" fill="#1f77b4">{share:.0%}</text>',
            f'<text x="{WIDTH - LEFT + 8}" y="{y(share) + 4}" fill="#d62728">{share * LOSS:.2f}</text>',
        ]
    for i in range(5):
        step = round(last * i / 4)
        parts.append(f'<text x="{x(step)}" y="{floor + 18}" text-anchor="middle">{step}</text>')
    parts += [line(losses, LOSS, "#d62728"), line(exact, 1, "#1f77b4")]
    parts += [f'<circle cx="{x(step):.1f}" cy="{y(share):.1f}" r="4" fill="#1f77b4"/>' for step, share in exact]
    parts += [
        f'<text x="{LEFT}" y="14" fill="#1f77b4">unseen pairs answered exactly</text>',
        f'<text x="{WIDTH - LEFT}" y="14" text-anchor="end" fill="#d62728">training loss, nats a token</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">step</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def main() -> None:
    """Reads the run and writes the figure."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    losses, exact = read(Path(sys.argv[1]))
    if not exact:
        sys.exit(f"{sys.argv[1]}: no exact matches in its metrics; train on pairs with train.eval_pairs")
    Path(sys.argv[2]).write_text(figure(losses, exact))


if __name__ == "__main__":
    main()

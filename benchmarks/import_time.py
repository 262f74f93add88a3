"""Time of `import transformer` beside `import jax, flax`, in fresh interpreters that take turns.

    python benchmarks/import_time.py

prints the median of each and the median of the paired ratios. A ratio far below 1 is expected: the package loads
nothing until one of its names is used.
"""

import argparse
import statistics
import subprocess
import sys

TIMED = "import time; start = time.perf_counter(); import {modules}; print(time.perf_counter() - start)"


def seconds(modules: str) -> float:
    """Wall seconds of one import statement in a new interpreter, its start-up left out."""
    done = subprocess.run([sys.executable, "-c", TIMED.format(modules=modules)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: import {modules}:\n{done.stderr}")
    return float(done.stdout)


def main() -> None:
    """Runs the pairs and prints the result."""
    parser = argparse.ArgumentParser(description="Time `import transformer` beside `import jax, flax`.")
    parser.add_argument("--pairs", type=int, default=9, help="how often each is timed (default: 9)")
    pairs = max(1, parser.parse_args().pairs)
    ours, theirs = "transformer", "jax, flax"
    for modules in (ours, theirs):  # the files into the page cache
        seconds(modules)
    times = [(seconds(ours), seconds(theirs)) for _ in range(pairs)]
    for modules, values in zip((ours, theirs), zip(*times, strict=True), strict=True):
        spread = f"{min(values) * 1e3:.2f} to {max(values) * 1e3:.2f}"
        print(f"import {modules:12} {statistics.median(values) * 1e3:9.2f} ms  ({spread})")
    ratios = [a / b for a, b in times]
    print(f"ratio {statistics.median(ratios):.4f}  ({min(ratios):.4f} to {max(ratios):.4f}, {pairs} pairs)")


if __name__ == "__main__":
    main()

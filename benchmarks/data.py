"""What batches cost the process that trains, with its own thread making them and with worker processes.

    python benchmarks/data.py --tokenizer tok/tokenizer.json --workers 0 2

prints, side by side, the CPU seconds that the process itself spends on a million tokens of `python_docs`, which is what
the training loop's Python has to share its interpreter with, and how many tokens a second come out.
"""

import argparse
import time

from transformer.settings import Data
from transformer.tokenizer import load_tokenizer
from transformer.training import data
from transformer.training.examples import Shape


def measure(settings: Data, batches: int) -> tuple[float, float]:
    """(CPU seconds of this process a million tokens, tokens a second), once the first batch is there."""
    tokenizer = load_tokenizer(settings.tokenizer)
    iterator = data.train_iterator(settings, tokenizer, Shape(False, True, tokenizer.vocab_size))
    next(iterator)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(batches):
        next(iterator)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    iterator.close()
    tokens = batches * settings.batch_size * settings.seq_len
    return 1e6 * cpu / tokens, tokens / wall


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--batches", type=int, default=100, help="of 16 rows of 256 tokens (%(default)s)")
    flags = parser.parse_args()
    print("workers  CPU s of the process / million tokens  tokens/s")
    for workers in flags.workers:
        cpu, rate = measure(Data(tokenizer=flags.tokenizer, workers=workers), flags.batches)
        print(f"{workers:7}  {cpu:37.2f}  {rate:8,.0f}", flush=True)


if __name__ == "__main__":
    main()

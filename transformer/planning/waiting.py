"""A sign of life while a compiler works."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def working(what: str, every: float = 30.0) -> Iterator[None]:
    """Tells on stderr how long it takes: by a clock on a terminal, elsewhere by a line every so many seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(what, total=None)
            yield
        return
    start, done = time.perf_counter(), threading.Event()

    def tell() -> None:
        while not done.wait(every):
            print(f"{what}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()

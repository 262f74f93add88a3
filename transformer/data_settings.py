"""The settings of the data: where texts come from, what is to be predicted of what, and the rows."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from transformer.checks import SettingsError, check

Source = Literal["python_docs", "text", "pairs", "numbers", "dates", "reversal", "sort"]
FILE_SOURCES = ("text", "pairs")
PAIR_SOURCES = ("pairs", "numbers", "dates", "reversal", "sort")  # the other sources are of documents
# Which objectives a field of Data takes effect in.
_USED_BY = {
    "noise_density": ("masked", "spans"), "mean_span": ("spans",), "whole_word": ("masked",),
    "target_len": ("spans", "prefix", "pairs"),
}  # fmt: skip
# What a component of a mixture says for itself.
_PER_COMPONENT = ("source", "paths", "text_field", "direction")


@dataclass(frozen=True, kw_only=True)
class Component:
    """One of the sources of a mixture; what it has in common with `Data` means the same there."""

    weight: float  # its share of the text that is read, in bytes, beside the others' weights
    epochs: int | None = None  # how often its texts are read, then the others go on without it; None: for ever
    source: Source = "text"
    paths: tuple[str, ...] = ()
    text_field: str = "text"
    direction: Literal["forward", "backward", "both"] = "forward"

    def __post_init__(self):
        check(0 < self.weight < math.inf, "data.mixture.weight", self.weight, "use a positive share, such as 1.0")
        epochs = self.epochs
        check(epochs is None or epochs >= 1, "data.mixture.epochs", epochs, "use 1 or more, or None: for ever")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Text, tokenizer, what is to be predicted of what, and rows."""

    source: Literal["mixture"] | Source = "python_docs"
    paths: tuple[str, ...] = ()  # files or globs, by their names: training/files.py has the formats
    text_field: str = "text"  # a document in JSON, Parquet and ArrayRecord; "": the record itself is the text
    on_bad: Literal["error", "skip"] = "error"  # a row that can't be read ends the run, or is left out and counted
    cache: str | None = None  # directory of indexes and of what was unpacked; None: both are made anew, in memory
    mixture: tuple[Component, ...] = ()  # of source="mixture"
    direction: Literal["forward", "backward", "both"] = "forward"  # of pairs: source -> target, or target -> source
    tokenizer: str = "bytes"  # "bytes", or the path of a Hugging Face tokenizer.json or a SentencePiece .model
    objective: Literal["causal", "masked", "spans", "prefix", "pairs"] = "causal"
    noise_density: float = 0.15  # fraction of the tokens that "masked" and "spans" hide
    mean_span: float = 3.0  # tokens of a hidden span, on average
    whole_word: bool = False  # "masked" hides words, not tokens
    seq_len: int = 256  # T; of an encoder-decoder the encoder's, S
    target_len: int | None = None  # T of an encoder-decoder; None: what its objective fills beside seq_len
    batch_size: int = 16  # B, rows of one optimiser step over all processes
    validation_fraction: float = 0.05  # of the documents or pairs, chosen by content hash
    workers: int = 0  # processes that read and tokenise ahead; 0: a thread of this one does
    seed: int = 0

    def __post_init__(self):
        check(self.seq_len >= 2, "data.seq_len", self.seq_len, "a row needs at least 2 tokens")
        check(self.batch_size >= 1, "data.batch_size", self.batch_size, "use at least 1 row")
        fraction = self.validation_fraction
        check(0 < fraction < 1, "data.validation_fraction", fraction, "use a fraction between 0 and 1, such as 0.05")
        check(
            0 <= self.workers <= 1024, "data.workers", self.workers, "use 0 (a thread), or a process for a core or two"
        )
        check(self.seed >= 0, "data.seed", self.seed, "use 0 or more")
        self._check_source()
        self._check_objective()

    @property
    def components(self) -> tuple["Data", ...]:
        """The settings of each source alone: of a mixture one for each component, else these."""
        if self.source != "mixture":
            return (self,)
        return tuple(self._component(place, part) for place, part in enumerate(self.mixture))

    def _component(self, place: int, part: Component) -> "Data":
        own = {name: getattr(part, name) for name in _PER_COMPONENT}
        if part.source not in FILE_SOURCES:
            own |= dict(on_bad="error", cache=None)
        try:
            return dataclasses.replace(self, mixture=(), **own)
        except SettingsError as error:
            raise SettingsError(f"data.mixture[{place}]: {error}") from None

    def _check_source(self) -> None:
        source, paths, files = self.source, self.paths, self.source in FILE_SOURCES
        mixed = source == "mixture"
        check(mixed or not self.mixture, "data.mixture", self.mixture, 'needs data.source="mixture"')
        remedy = "data.source=\"mixture\" needs components, such as ({'paths': ('a/*.jsonl',), 'weight': 1.0},)"
        check(bool(self.mixture) or not mixed, "data.mixture", self.mixture, remedy)
        check(files or not paths, "data.paths", paths, 'paths need data.source="text" or "pairs"')
        check(not files or bool(paths), "data.paths", paths, f'data.source="{source}" needs at least one path')
        ways = {"pairs": ("forward", "backward"), "numbers": ("forward", "backward", "both")}.get(source, ("forward",))
        remedy = f'data.source="{source}" goes {" or ".join(ways)}'
        check(self.direction in ways, "data.direction", self.direction, remedy)
        reads = files or any(part.source in FILE_SOURCES for part in self.mixture)
        for name, useful in (("text_field", source == "text"), ("on_bad", reads), ("cache", source == "text" or mixed)):
            value, default = getattr(self, name), getattr(type(self), name)
            remedy = f'data.source="{source}" has no use for it; leave it at {default!r}'
            check(useful or value == default, f"data.{name}", value, remedy)
        for place, part in enumerate(self.mixture):
            self._component(place, part)

    def _check_objective(self) -> None:
        objective, of_pairs = self.objective, self.source in PAIR_SOURCES
        use = 'pairs; use "pairs"' if of_pairs else f"documents; use another objective, or one of {PAIR_SOURCES}"
        remedy = f'data.source="{self.source}" is of {use}'
        mixed = self.source == "mixture"  # whose components are checked each
        check(mixed or of_pairs == (objective == "pairs"), "data.objective", objective, remedy)
        density, span, length = self.noise_density, self.mean_span, self.target_len
        check(0 < density < 1, "data.noise_density", density, "use a fraction between 0 and 1, such as 0.15")
        check(1 <= span < math.inf, "data.mean_span", span, "use at least 1 token")
        check(length is None or length >= 2, "data.target_len", length, "a row needs at least 2 tokens")
        for name, users in _USED_BY.items():
            value, default = getattr(self, name), getattr(type(self), name)
            remedy = f"data.objective={objective!r} has no use for it; leave it at {default!r}"
            check(objective in users or value == default, f"data.{name}", value, remedy)

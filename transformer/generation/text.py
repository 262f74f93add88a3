"""Generation from text: the tokenizer at both ends, stop strings, streaming."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformer.generation.beam import Beams, beam_search
from transformer.generation.speculative import Statistics, speculate
from transformer.generation.tokens import Completion, OnToken, generate
from transformer.nn.model import Transformer
from transformer.settings import check
from transformer.tokenizer import StreamDecoder, Tokenizer

# Called with (index of the prompt, the next piece of its text).
Stream = Callable[[int, str], None]


# Called with the prompts' ids and, by name, what `generate` takes to end and to watch them.
Run = Callable[..., list[Completion]]


@dataclass(frozen=True)
class Text:
    """What a prompt was continued with.

    Attributes:
      tokens: those that it took, of a stop string too.
      logprobs: natural log of the model's probability of each token, before temperature and filters.
    """

    text: str
    tokens: tuple[int, ...]
    reason: Literal["eos", "stop", "length"]
    logprobs: tuple[float, ...]


def generate_text(
    model: Transformer, params: dict, tokenizer: Tokenizer, prompts: Sequence[str], **options: Any
) -> list[str]:
    """The text that follows each prompt; see `complete`, which also tells the tokens and why they ended."""
    return [done.text for done in complete(model, params, tokenizer, prompts, **options)]


def complete(
    model: Transformer,
    params: dict,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    stream: Stream | None = None,
    bos: bool = True,
    **options: Any,
) -> list[Text]:
    """Continues each prompt until one of the tokenizer's end tokens, a stop string or `max_new_tokens` tokens.

    A prompt begins with the tokenizer's BOS, as documents do in training, unless `bos` is False: a chat template
    writes its own. What an encoder reads ends with EOS instead, where there is one. Text ends before the stop string
    that is completed first; `stream` is handed exactly the returned text, piece by piece, and no part of a stop string.

    Args:
      options: of `generate`: sampling, seed, cache_dtype, batch_size, prefill_chunk, on_batch; or, with a draft or
        beams, those of `drawer` and of `speculate` or `beam_search`.

    Raises:
      SettingsError: an empty prompt where the tokenizer has no BOS, an empty stop string, or what `generate` refuses.
    """
    check(not isinstance(prompts, str), "prompts", prompts, "expected a sequence of strings")
    run, encoded = drawer(model, params, max_new_tokens=max_new_tokens, **options), model.spec.encoder is not None
    ids = [
        source_ids(tokenizer, i, prompt) if encoded else prompt_ids(tokenizer, i, prompt, bos)
        for i, prompt in enumerate(prompts)
    ]
    # A decoder behind an encoder writes a text of its own.
    before = (options.get("prefixes") or [[]] * len(ids)) if encoded else ids
    return write(run, tokenizer, ids, stop, stream, before)


def drawer(
    model: Transformer,
    params: dict,
    *,
    draft: tuple[Transformer, dict] | Literal["own"] | None = None,
    beams: Beams | None = None,
    on_statistics: Callable[[Statistics], None] | None = None,
    **options: Any,
) -> Run:
    """`generate`; or `speculate` where there is a draft; or the best text of `beam_search` where there are beams.

    Args:
      draft: (model, parameters) that guess ahead, or "own": the model's own module of multi-token prediction.
      on_statistics: told how the draft did.

    Raises:
      SettingsError: beams with a draft, or with anything that draws; the run raises it for beams that are watched.
    """
    if beams is not None:
        check(draft is None, "draft", draft, "beams leave nothing to guess; leave one of them out")
        return functools.partial(_best, model, params, beams, _searching(options))
    if draft is None:
        return functools.partial(generate, model, params, **options)

    def run(prompts: Sequence[list[int]], **watch: Any) -> list[Completion]:
        guesser = None if draft == "own" else draft
        completions, statistics = speculate(model, params, prompts, draft=guesser, **options, **watch)
        if on_statistics is not None:
            on_statistics(statistics)
        return completions

    return run


def _searching(options: dict[str, Any]) -> dict[str, Any]:
    for name in ("sampling", "seed"):
        check(name not in options, name, options.get(name), "beams leave nothing to draw; leave it out")
    return options


def _best(
    model: Transformer,
    params: dict,
    beams: Beams,
    options: dict[str, Any],
    prompts: Sequence[list[int]],
    *,
    eos_ids: Sequence[int],
    on_token: OnToken | None,
) -> list[Completion]:
    remedy = "the best text is known when all are: there is no stream, and no stop string ends one; leave them out"
    check(on_token is None, "beams", beams, remedy)
    return [texts[0] for texts in beam_search(model, params, prompts, beams=beams, eos_ids=eos_ids, **options)]


def write(
    run: Run,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    stop: Sequence[str],
    stream: Stream | None,
    before: Sequence[Sequence[int]],
) -> list[Text]:
    """The texts of what `run` draws of the prompts, as in `complete`; `before` are the ids that each text follows."""
    check(not isinstance(stop, str), "stop", stop, "expected a sequence of strings")
    check(all(stop), "stop", stop, "an empty string stops everything; leave it out")
    writers = [_Writer(tokenizer, i, ids, stop, stream) for i, ids in enumerate(before)]
    completions = run(
        prompts,
        eos_ids=tokenizer.end_ids,
        # Nobody to tell: then the device need not pause to be read.
        on_token=(lambda row, token: writers[row].add(token)) if stop or stream else None,
    )
    texts = []
    for writer, done in zip(writers, completions, strict=True):
        if not (stop or stream):
            writer.add_all(done.tokens)
        # The last character may complete a stop string only now.
        reason = "stop" if writer.finish() else done.reason
        texts.append(Text(writer.text, done.tokens, reason, done.logprobs))
    return texts


class StopScanner:
    """Passes text on up to the first stop string, holding back what may yet become one."""

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text now known to lie before any stop string, and whether one was completed.

        Of several, the one that ends first counts, then the longest: the result does not depend on the pieces.
        """
        text = self._held + text
        found = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = next((n for n in range(self._reach(text), 0, -1) if self._begins(text[-n:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _reach(self, text: str) -> int:
        return min(len(text), max((len(s) for s in self._stop), default=1) - 1)

    def _begins(self, piece: str) -> bool:
        return any(s.startswith(piece) for s in self._stop)


class _Writer:
    """Tokens of one row to text, and on to the stream."""

    def __init__(
        self, tokenizer: Tokenizer, index: int, before: Sequence[int], stop: Sequence[str], stream: Stream | None
    ):
        self._index, self._stream = index, stream
        self._scanner = StopScanner(stop)
        self._decoder = StreamDecoder(tokenizer)
        # Some decoders drop the space of a first token, so the prompt goes through before, unseen. Of a prompt that
        # ends in what looks like half a character, the decoder still owes that much.
        self._owed = len(tokenizer.decode(before)) - len(self._decoder.push(before))
        self._stopped = False
        self.text = ""

    def add(self, token: int) -> bool:
        """Takes one token; True if it completed a stop string."""
        self._emit(self._decoder.push([token]))
        return self._stopped

    def add_all(self, tokens: Sequence[int]) -> None:
        """Takes every token at once."""
        self._emit(self._decoder.push(tokens))

    def finish(self) -> bool:
        """Passes on what was held back; True if a stop string ended the text."""
        if not self._stopped:
            self._emit(self._decoder.flush())
        if not self._stopped:
            self._write(self._scanner.flush())
        return self._stopped

    def _emit(self, text: str) -> None:
        owed = min(self._owed, len(text))
        self._owed -= owed
        text, self._stopped = self._scanner.push(text[owed:])
        self._write(text)

    def _write(self, text: str) -> None:
        self.text += text
        if text and self._stream is not None:
            self._stream(self._index, text)


def prompt_ids(tokenizer: Tokenizer, i: int, prompt: str, add_bos: bool = True) -> list[int]:
    """What a decoder goes on with."""
    ids, bos = list(tokenizer.encode(prompt)), tokenizer.bos_id if add_bos else None
    # A prompt that spells out its BOS has it already.
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    check(bool(ids), f"prompts[{i}]", prompt, "is empty and the tokenizer has no beginning-of-text token; give it text")
    return ids


def source_ids(tokenizer: Tokenizer, i: int, prompt: str) -> list[int]:
    """What an encoder reads of the i-th text, as in training: ended by EOS."""
    ids, eos = list(tokenizer.encode(prompt)), tokenizer.eos_id
    # A text that spells out its EOS has it already.
    if eos is not None and ids[-1:] != [eos]:
        ids = [*ids, eos]
    check(bool(ids), f"prompts[{i}]", prompt, "is empty and the tokenizer has no end-of-text token; give it text")
    return ids

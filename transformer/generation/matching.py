"""How often a model writes exactly the text that belongs to another one."""

from collections.abc import Sequence
from typing import Any

from transformer.generation.beam import Beams
from transformer.generation.text import drawer, source_ids
from transformer.nn.model import Transformer
from transformer.ops.sampling import Sampling
from transformer.settings import check
from transformer.tokenizer import Tokenizer


def exact_match(
    model: Transformer,
    params: dict,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    *,
    beams: Beams | None = None,
    **options: Any,
) -> float:
    """Fraction of (source, target) pairs whose source makes the model write the target and end.

    Sources are laid out as in training on pairs: for an encoder, or before the target in a decoder's row, where they
    see both ways. Texts are compared as the tokenizer writes them.

    Args:
      beams: how to search; greedy by default.
      options: of `generate`, such as batch_size.

    Raises:
      SettingsError: no pairs, a tokenizer without an end token, or what `generate` refuses.
    """
    check(len(pairs) > 0, "pairs", list(pairs), "give at least one")
    check(bool(tokenizer.end_ids), "tokenizer.end_ids", tokenizer.end_ids, "a text of such a tokenizer never ends")
    encoded = model.spec.encoder is not None
    sources = [source_ids(tokenizer, i, source) for i, (source, _) in enumerate(pairs)]
    if not encoded and tokenizer.bos_id is not None:
        sources = [[tokenizer.bos_id, *ids] for ids in sources]
    targets = [tokenizer.encode(target) for _, target in pairs]
    method = {"sampling": Sampling(temperature=0.0)} if beams is None else {"beams": beams}
    # A text that is longer than every target is wrong, however it goes on.
    limit = 1 + max(map(len, targets))
    run = drawer(model, params, max_new_tokens=limit, both_ways=not encoded, **method, **options)
    right = 0
    for done, target in zip(run(sources, eos_ids=tokenizer.end_ids, on_token=None), targets, strict=True):
        right += done.reason == "eos" and tokenizer.decode(done.tokens) == tokenizer.decode(target)
    return right / len(pairs)

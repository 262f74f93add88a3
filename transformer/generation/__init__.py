"""Text generation: `generate` from token ids, `generate_text` and `complete` from text, `Session` for conversations.

`speculate` is `generate` with a draft, `beam_search` finds the most probable texts, `exact_match` counts right answers,
`score` tells how well a text is foretold, and `fill_mask` asks an encoder.
"""

from transformer.generation.beam import Beams, Hypothesis, beam_search
from transformer.generation.layout import quantize, turn, unroll
from transformer.generation.mask_filling import fill_mask
from transformer.generation.matching import exact_match
from transformer.generation.scoring import Scores, score
from transformer.generation.session import Session
from transformer.generation.speculative import Statistics, speculate
from transformer.generation.text import Text, complete, generate_text
from transformer.generation.tokens import Completion, generate

__all__ = [
    "Beams", "Completion", "Hypothesis", "Scores", "Session", "Statistics", "Text", "beam_search", "complete",
    "exact_match", "fill_mask", "generate", "generate_text", "quantize", "score", "speculate", "turn", "unroll",
]  # fmt: skip

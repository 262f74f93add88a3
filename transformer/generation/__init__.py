"""Text generation: `generate` from token ids, `generate_text` and `complete` from text, `Session` for conversations.

`speculate` is `generate` with a draft.
"""

from transformer.generation.layout import quantize, turn, unroll
from transformer.generation.session import Session
from transformer.generation.speculative import Statistics, speculate
from transformer.generation.text import Text, complete, generate_text
from transformer.generation.tokens import Completion, generate

__all__ = [
    "Completion", "Session", "Statistics", "Text", "complete", "generate", "generate_text", "quantize", "speculate",
    "turn", "unroll",
]  # fmt: skip

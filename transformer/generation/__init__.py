"""Text generation: `generate` from token ids, `speculate` with a draft, `generate_text` and `complete` from text."""

from transformer.generation.speculative import Statistics, speculate
from transformer.generation.text import Text, complete, generate_text
from transformer.generation.tokens import Completion, generate

__all__ = ["Completion", "Statistics", "Text", "complete", "generate", "generate_text", "speculate"]

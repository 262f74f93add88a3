"""The other side of `decode.py`: a checkpoint in Hugging Face's PyTorch, or in llama.cpp, timed on request.

    python other_generators.py torch DIR float32|bfloat16
    python other_generators.py llama FILE.gguf

A process of its own, for an interpreter that has torch and transformers, or llama-cpp-python. One JSON object a line:
{"prompts": [[id, …], …], "new": n} is answered by {"seconds": s} for drawing n tokens greedily after each prompt. The
end of the input ends the process.
"""

import json
import os
import sys
import time


class Torch:
    """`transformers.generate` with its default cache."""

    def __init__(self, directory: str, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompts: list[list[int]], new: int) -> None:
        """Draws exactly `new` tokens a row."""
        ids = self.torch.tensor(prompts)
        options = dict(do_sample=False, min_new_tokens=new, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
        with self.torch.inference_mode():
            self.model.generate(ids, attention_mask=self.torch.ones_like(ids), **options)


class Llama:
    """llama.cpp on the file's own quantised weights; one prompt at a time."""

    def __init__(self, file: str):
        from llama_cpp import Llama as Model

        self.model = Model(file, n_ctx=1024, n_threads=os.cpu_count(), n_threads_batch=os.cpu_count(), verbose=False)

    def generate(self, prompts: list[list[int]], new: int) -> None:
        """Draws exactly `new` tokens a row."""
        for prompt in prompts:
            self.model.reset()
            tokens = self.model.generate(prompt, temp=0.0, reset=False)
            for _ in range(new):
                next(tokens)


def main() -> None:
    """Answers until the input ends."""
    kind, *rest = sys.argv[1:]
    generator = {"torch": Torch, "llama": Llama}[kind](*rest)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        generator.generate(request["prompts"], request["new"])
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()

"""What beam search of Hugging Face finds in some of the cases: `tests/golden/beams.json`.

    python -m tests.golden.make.beams        # needs torch and transformers

For every case: its end tokens, and what is found with and without them. An end token is one that the search without any
comes to in the middle of a text, so that texts end early; of these, one with which nothing is close to a tie: weights
that are a little off find the same texts.
"""

import itertools
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers

GOLDEN = Path(__file__).parents[1]
CASES = ("gpt2", "llama3", "t5", "t5_v1_1", "marian")
NEW = 10
PENALTIES, STOPPINGS = (0.6, 1.0, 2.0), (True, False, "never")


def settings(ends: list[int]) -> list[dict]:
    """Searches of a case: the rules with an end token, two of them, and none, when the rules make no difference."""
    made = [
        dict(num_beams=3 + number % 2, length_penalty=penalty, early_stopping=stopping, eos_token_id=ends[:1])
        for number, (penalty, stopping) in enumerate(itertools.product(PENALTIES, STOPPINGS))
    ]
    made.append(dict(num_beams=3, length_penalty=1.0, early_stopping=False, eos_token_id=ends))
    made.append(dict(num_beams=4, length_penalty=0.6, early_stopping=False, eos_token_id=None))
    return made


def search(model, tokens: torch.Tensor, mask: torch.Tensor, how: dict) -> tuple[list, list]:
    """(new tokens of every text of every row, end token included; their scores)."""
    beams = how["num_beams"]
    config = transformers.GenerationConfig(
        **how, max_new_tokens=NEW, num_return_sequences=beams, do_sample=False, output_scores=True,
        return_dict_in_generate=True, pad_token_id=model.config.pad_token_id or 0,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )  # fmt: skip
    model.generation_config = transformers.GenerationConfig()
    out = model.generate(tokens, attention_mask=mask, generation_config=config)
    first = 1 if model.config.is_encoder_decoder else tokens.shape[1]
    ends = how["eos_token_id"] or []
    texts = []
    for row in out.sequences[:, first:].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row))
        texts.append(row[: end + 1])
    scores = out.sequences_scores.tolist()
    per_row = [slice(i, i + beams) for i in range(0, len(texts), beams)]
    return [texts[part] for part in per_row], [scores[part] for part in per_row]


@torch.no_grad()
def disturb(model) -> None:
    """Moves every weight by about 1e-5 of itself, which is more than rounding does."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-5 * torch.randn(parameter.shape, generator=generator))


def make(case: str) -> dict:
    """The searches of a case, over a batch of texts of different lengths."""
    with np.load(GOLDEN / case / "expected.npz") as arrays:
        padded = "padR" if "decoder_input_ids" in arrays else "padL"
        tokens, mask = (torch.from_numpy(arrays[f"{padded}_{name}"]) for name in ("input_ids", "attention_mask"))
    auto = transformers.AutoModelForSeq2SeqLM if padded == "padR" else transformers.AutoModelForCausalLM
    models = [auto.from_pretrained(GOLDEN / case, attn_implementation="eager").eval() for _ in range(2)]
    disturb(models[1])
    without, _ = search(models[0], tokens, mask, settings([])[-1])
    candidates = dict.fromkeys(token for row in without for text in row for token in text[2:-1])
    for ends in itertools.permutations(candidates, 2):
        searches = []
        for how in settings(list(ends)):
            (texts, scores), (others, _) = (search(model, tokens, mask, how) for model in models)
            if texts != others:
                break
            searches.append({**how, "texts": texts, "scores": [[round(x, 6) for x in row] for row in scores]})
        else:
            found = {how["early_stopping"]: set() for how in searches[:9]}
            for how in searches[:9]:
                found[how["early_stopping"]] |= {json.dumps(row[0]) for row in how["texts"]}
            # Texts of several lengths, and rules that matter.
            if (
                len({len(text) for how in searches for row in how["texts"] for text in row}) > 3
                and len(set(map(frozenset, found.values()))) > 1
            ):
                print(f"{case}: ends {ends}, best texts of each rule: {[len(some) for some in found.values()]}")
                return {"padding": padded, "max_new_tokens": NEW, "searches": searches}
    raise SystemExit(f"{case}: no end tokens far from a tie")


@torch.no_grad()
def main() -> None:
    """Writes the file."""
    torch.set_num_threads(1)
    made = {case: make(case) for case in CASES}
    lines = [f'"{case}": {json.dumps(found)}' for case, found in made.items()]
    (GOLDEN / "beams.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

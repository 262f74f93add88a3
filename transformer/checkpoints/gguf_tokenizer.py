"""The tokenizer and the chat template in a GGUF file's metadata, as the files of a Hugging Face directory."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from transformer.checkpoints.gguf import GGUFFile
from transformer.checkpoints.tensors import CheckpointError

# `tokenizer.ggml.token_type` (ggml-org/llama.cpp, include/llama.h).
CONTROL, USER_DEFINED = 3, 4
# How text is cut before merging (ggml-org/llama.cpp, src/llama-vocab.cpp).
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def write_companions(file: GGUFFile, directory: str | Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and, if there is one, the chat template.

    Raises:
      CheckpointError: a kind of tokenizer that is not implemented, or one that contradicts itself.
    """
    directory, tokens = Path(directory), file.field("tokenizer.ggml.tokens")
    ids = {role: file.field(f"tokenizer.ggml.{name}_token_id", None) for role, name in ROLES.items()}
    wrong = [i for i in ids.values() if i is not None and not 0 <= i < len(tokens)]
    if wrong:
        raise CheckpointError(f"{file.path}: special token {wrong[0]} is outside the vocabulary of {len(tokens)}")
    try:
        build(file, ids["bos_token"]).save(str(directory / "tokenizer.json"))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file.path}: its tokenizer contradicts itself ({error})") from None
    named = {role: tokens[i] for role, i in ids.items() if i is not None}
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    ends = [ids["eos_token"], file.field("tokenizer.ggml.eot_token_id", None)]
    ends = [i for i in dict.fromkeys(ends) if i is not None] or None
    generation = {"bos_token_id": ids["bos_token"], "eos_token_id": ends, "pad_token_id": ids["pad_token"]}
    _write(directory / "generation_config.json", {name: i for name, i in generation.items() if i is not None})
    template = file.field("tokenizer.chat_template", None)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def build(file: GGUFFile, bos_id: int | None) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer of a file."""
    kind, cut = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise CheckpointError(f"{file.path}: tokenizer.ggml.model={kind!r} is not implemented; expected 'gpt2'")
    tokens = file.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges")]
    kinds = file.field("tokenizer.ggml.token_type", [1] * len(tokens))
    llama3 = cut == "llama-bpe"
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=llama3)
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(file, cut)
    tokenizer.decoder = decoders.ByteLevel()
    for number in (CONTROL, USER_DEFINED):
        added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == number]
        tokenizer.add_tokens([AddedToken(token, special=number == CONTROL, normalized=False) for token in added])
    if file.field("tokenizer.ggml.add_bos_token", llama3) and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _pre_tokenizer(file: GGUFFile, cut: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match cut:
        case "gpt-2":
            return byte_level
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case "llama-bpe":
            split = pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = "gpt-2, smollm, llama-bpe"
    raise CheckpointError(f"{file.path}: tokenizer.ggml.pre={cut!r} is not implemented; expected one of {known}")


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

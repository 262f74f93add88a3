"""The `config.json` of well-known checkpoints (`tests/golden/published`), and the size of our pages that each is."""

import dataclasses
import json
from typing import Any

import jax

from tests import common
from tests.checkpoints import common as golden
from transformer import spec
from transformer.checkpoints import hugging_face
from transformer.families.bert import PARTS
from transformer.nn import initial
from transformer.nn.model import Transformer

DIRECTORY = golden.GOLDEN / "published"
NAMES = tuple(sorted(file.stem for file in DIRECTORY.glob("*.json")))
# Checkpoint to (family, size) of a page in configs/.
SIZES = {
    "gpt2": ("gpt2", "small"),
    "gpt2-xl": ("gpt2", "xl"),
    "Llama-2-7b": ("llama2", "7b"),
    "Llama-3-8B": ("llama3", "8b"),
    "Llama-3.1-8B": ("llama3", "3.1-8b"),
    "Llama-3.1-70B": ("llama3", "3.1-70b"),
    "Llama-3.2-1B": ("llama3", "3.2-1b"),
    "Mistral-7B-v0.1": ("mistral", "7b-v0.1"),
    "Mistral-7B-v0.3": ("mistral", "7b-v0.3"),
    "OLMo-2-1124-7B": ("olmo2", "7b"),
    "Mixtral-8x7B": ("mixtral", "8x7b"),
    "gemma-2-2b": ("gemma2", "2b"),
    "gemma-2-9b": ("gemma2", "9b"),
    "gemma-3-1b": ("gemma3", "1b"),
    "gemma-3-4b": ("gemma3", "4b"),
    "gemma-3-27b": ("gemma3", "27b"),
    "Qwen2.5-0.5B": ("qwen2", "0.5b"),
    "Qwen2.5-7B": ("qwen2", "7b"),
    "Qwen3-0.6B": ("qwen3", "0.6b"),
    "Qwen3-8B": ("qwen3", "8b"),
    "Qwen3-30B-A3B": ("qwen3_moe", "30b-a3b"),
    "DeepSeek-V2-Lite": ("deepseek_v2", "lite"),
    "DeepSeek-V3": ("deepseek_v3", "671b"),
    "gpt-oss-20b": ("gpt_oss", "20b"),
    "gpt-oss-120b": ("gpt_oss", "120b"),
    "bert-base-uncased": ("bert", "base"),
    "bert-large-uncased": ("bert", "large"),
    "t5-small": ("t5", "small"),
    "t5-11b": ("t5", "11b"),
    "t5-v1_1-base": ("t5", "v1.1-base"),
    "flan-t5-xl": ("t5", "v1.1-xl"),
    "opus-mt-en-de": ("marian", "opus-mt-en-de"),
}

# Files that hold more than `architectures` says: endings of the tensors that tell.
HELD = {name: frozenset(PARTS.values()) for name in ("bert-base-uncased", "bert-large-uncased")}


def read(name: str) -> spec.Model:
    """The spec that our reader makes of a checkpoint's config."""
    return hugging_face.read_spec(config(name), lambda: HELD.get(name))


def config(name: str) -> dict[str, Any]:
    """The config of a checkpoint, as plain data."""
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def of_page(name: str) -> spec.Model:
    """The spec that our page gives for a checkpoint."""
    return common.build_spec(*SIZES[name])


def count(name: str) -> int:
    """The checkpoint's number of parameters, as our page states it."""
    family, size = SIZES[name]
    return common.page(family).PARAMETERS[size]


def nameless(model: spec.Model) -> spec.Model:
    """A spec without the family that it came from: Llama 2's checkpoints are read by Llama 3's family."""
    return dataclasses.replace(model, origin=None)


def abstract_count(model: spec.Model) -> int:
    """Parameters of the model that a spec builds, as publishers count them; no array is made."""
    params = initial.abstract_params(Transformer(model))
    # Without multi-token prediction.
    return sum(leaf.size for name, tree in params.items() if name != "mtp" for leaf in jax.tree.leaves(tree))

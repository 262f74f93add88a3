"""GGUF files of Llama's architecture (ggml-org/ggml, docs/gguf.md), read as a Hugging Face checkpoint would be.

The `gguf` package parses the file and dequantises its blocks; this module renames and reorders.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from transformer.checkpoints import packages
from transformer.checkpoints.packages import PACKAGE
from transformer.checkpoints.tensors import CheckpointError

AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# 1 / frequency factor of each rotary pair: how Llama 3.1's scaling is stored. A buffer, not a parameter.
ROPE_FACTORS = "rope_freqs.weight"
# Factors that released checkpoints use (Llama 3.1: 8, 3.2: 32), all with these bounds.
PIECEWISE = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def locate(name: str) -> Path:
    """The file that a path names, or "package:NAME" for the one *.gguf file of an installed Python distribution.

    Raises:
      CheckpointError: no such file or distribution, or several files in it.
    """
    if not name.startswith(PACKAGE):
        path = Path(name).absolute()
        if not path.is_file():
            raise CheckpointError(f"{name}: no such file; give a *.gguf file, or package:NAME of an installed package")
        return path
    found = [file for file in packages.files(name) if file.suffix == ".gguf"]
    if len(found) != 1:
        raise CheckpointError(f"{name}: {len(found)} *.gguf files in that package; give the path of one")
    return found[0]


class GGUFFile:
    """The tensors of a file under their Hugging Face names, as `TensorFiles` gives them, and its metadata.

    Raises:
      CheckpointError: the file is damaged, of another architecture, or holds what is not implemented.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            from gguf import GGUFReader
        except ImportError:
            raise CheckpointError(f"{path}: reading GGUF needs the gguf package; pip install gguf") from None
        try:
            reader = GGUFReader(self.path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror})") from None
        except Exception as error:  # a damaged file makes the parser fail in any way
            raise CheckpointError(f"{path}: damaged or not a GGUF file ({error})") from None
        kind = self._fields.get("general.architecture")
        if kind != "llama":
            raise CheckpointError(f"{path}: general.architecture={kind!r} is not implemented; expected 'llama'")
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        factors = self._stored.pop(ROPE_FACTORS, None)
        self._factors = None if factors is None else np.asarray(factors.data, np.float32)
        self._tensors = {self._rename(name): tensor for name, tensor in self._stored.items()}
        self.config = self._config()
        self._heads = {"q": self.config["num_attention_heads"], "k": self.config["num_key_value_heads"]}
        self.names = frozenset(self._tensors)

    def field(self, name: str, *default: Any) -> Any:
        """A value of the metadata; without a default it is required."""
        if name not in self._fields and not default:
            raise CheckpointError(f"{self.path}: {name} is missing")
        return self._fields.get(name, *default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; nothing is read."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def check_kind(self, name: str) -> None:
        """Nothing to refuse before reading: `read` names a quantisation that can't be undone."""

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised: float16 as stored, all else as float32.

        Raises:
          CheckpointError: a quantisation that the gguf package can't undo.
        """
        from gguf import quants

        tensor = self._tensors[name]
        if tensor.data.dtype == np.float16:
            x = np.array(tensor.data)
        else:
            try:
                x = quants.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise CheckpointError(f"{self.path}: {name}: {kind} is not implemented; use a Q8_0 file") from None
        x = x.reshape(self.shape(name))
        match = re.search(r"self_attn\.([qk])_proj", name)
        return unpermute(x, self._heads[match[1]]) if match else x

    def _rename(self, name: str) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
        layer, part = match.groups() if match else (None, None)
        if part not in (AROUND if layer is None else LAYER):
            raise CheckpointError(f"{self.path}: tensor {name} is not implemented for this architecture")
        return f"{AROUND[part]}.weight" if layer is None else f"model.layers.{layer}.{LAYER[part]}.weight"

    def _config(self) -> dict[str, Any]:
        """The `config.json` of the same model; every field of the architecture is read or refused."""
        unread = {name.removeprefix("llama.") for name in self._fields if name.startswith("llama.")}

        def take(name: str, *default: Any) -> Any:
            unread.discard(name)
            return self.field(f"llama.{name}", *default)

        heads, width = take("attention.head_count"), take("embedding_length")
        head_dim, theta = take("attention.key_length", width // heads), take("rope.freq_base", 1e4)
        for name in ("attention.value_length", "rope.dimension_count"):
            self._expect(name, take(name, head_dim), head_dim)
        for name in ("expert_count", "expert_used_count"):  # Mixtral says it is a llama
            self._expect(name, take(name, 0), 0)
        if "token_embd.weight" not in self._stored:
            raise CheckpointError(f"{self.path}: token_embd.weight is missing")
        vocab_size = int(self._stored["token_embd.weight"].shape[1])
        self._expect("vocab_size", take("vocab_size", vocab_size), vocab_size)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": vocab_size,
            "hidden_size": width,
            "num_hidden_layers": take("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": take("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": take("feed_forward_length"),
            "max_position_embeddings": take("context_length"),
            "rms_norm_eps": _shortest(take("attention.layer_norm_rms_epsilon")),
            "rope_parameters": {"rope_theta": _shortest(theta), **self._scaling(take, head_dim, theta)},
            "tie_word_embeddings": "output.weight" not in self._stored,
            "attention_bias": False,
            "mlp_bias": False,
        }
        if unread:
            raise CheckpointError(f"{self.path}: metadata that is not implemented: llama.{sorted(unread)[0]}")
        return config

    def _expect(self, name: str, value: Any, expected: Any) -> None:
        if value != expected:
            raise CheckpointError(f"{self.path}: llama.{name}={value!r} is not implemented; expected {expected!r}")

    def _scaling(self, take, head_dim: int, theta: float) -> dict[str, Any]:
        kind, factor = take("rope.scaling.type", "none"), take("rope.scaling.factor", take("rope.scale_linear", 1.0))
        if self._factors is not None:
            self._expect("rope.scaling.type", kind, "none")
            found = {"rope_type": "llama3", "factor": _shortest(self._factors.max()), **PIECEWISE}
            if not np.allclose(self._factors, piecewise_factors(found, head_dim, theta), rtol=1e-4):
                raise CheckpointError(f"{self.path}: {ROPE_FACTORS} are not those of Llama 3.1; not implemented")
            return found
        if kind == "linear":
            return {"rope_type": "linear", "factor": _shortest(factor)}
        self._expect("rope.scaling.type", kind, "none")
        return {"rope_type": "default"}


def unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection [N·H, D] from interleaved rotary pairs to Hugging Face's two halves."""
    return x.reshape(heads, -1, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def piecewise_factors(scaling: dict[str, Any], head_dim: int, theta: float) -> np.ndarray:
    """What Llama 3.1's scaling divides each rotary frequency by: [head_dim / 2]."""
    turns = scaling["original_max_position_embeddings"] / (2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))

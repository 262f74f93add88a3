"""Reading and writing the `config.json` of a Hugging Face model: no field is ignored in silence."""

from collections.abc import Mapping
from typing import Any

from transformer import spec as s
from transformer.settings import SettingsError

# What a config says that changes nothing we compute: names, training only, tokens (read elsewhere), kernels.
HARMLESS = frozenset({
    "_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "cache_implementation",
    "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "task_specific_params", "gradient_checkpointing", "return_dict", "output_attentions", "output_hidden_states",
    "attn_implementation", "_attn_implementation", "id2label", "label2id", "problem_type", "seq_aux", "aux_loss_alpha",
    "ep_size", "num_nextn_predict_layers", "auto_map", "n_ctx", "reorder_and_upcast_attn", "quantization_config",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "router_jitter_noise", "experts_implementation",
})  # fmt: skip


class HFConfig:
    """A config being read: every field is taken once, expected to be a value, or harmless."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = dict(values)
        self._read = set(HARMLESS)

    def take(self, name: str, *default: Any) -> Any:
        """The value of a field; without a default it is required.

        Raises:
          SettingsError: a required field is missing.
        """
        self._read.add(name)
        if name in self._values:
            return self._values[name]
        if not default:
            raise SettingsError(f"config.json: {name} is missing; this family's checkpoints state it")
        return default[0]

    def expect(self, name: str, *values: Any) -> None:
        """A field that may only be one of `values`, or absent.

        Raises:
          SettingsError: it is something else, which we don't implement.
        """
        found = self.take(name, values[0])
        if found not in values:
            raise SettingsError(f"config.json: {name}={found!r} is not implemented; expected {values[0]!r}")

    def require(self, condition: bool, name: str, value: Any, remedy: str) -> None:
        """Raises `SettingsError` about a field unless the condition holds."""
        if not condition:
            raise SettingsError(f"config.json: {name}={value!r}: {remedy}")

    def rope(self, theta: float | None = None) -> tuple[float, dict[str, Any] | None]:
        """(theta, scaling) from either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
        self._read |= {"rope_parameters", "rope_theta", "rope_scaling"}
        given = self._values.get("rope_parameters")
        scaling = dict(given if given is not None else self._values.get("rope_scaling") or {})
        base = scaling.pop("rope_theta", self._values.get("rope_theta", theta))
        if base is None:
            raise SettingsError("config.json: rope_theta is missing; this family's checkpoints state it")
        return float(base), scaling or None

    def scaling(self, values: Mapping[str, Any] | None, max_length: int):
        """The spec of a rope scaling.

        Raises:
          SettingsError: a kind, or a field of it, that is not implemented.
        """
        values = dict(values or {})
        kind = values.pop("rope_type", values.pop("type", "default"))
        values.pop("type", None)
        original = values.pop("original_max_position_embeddings", None) or max_length
        match kind:
            case "default":
                found = None
            case "linear":
                found = s.LinearScaling(factor=float(values.pop("factor")))
            case "llama3":
                names = ("factor", "low_freq_factor", "high_freq_factor")
                found = s.PiecewiseScaling(original_max_length=original, **{n: float(values.pop(n)) for n in names})
            case "yarn":
                found = _yarn(values, original)
            case _:
                raise SettingsError(f"config.json: rope_scaling.rope_type={kind!r} is not implemented")
        if values:
            raise SettingsError(f"config.json: rope_scaling fields {sorted(values)} are not implemented for {kind!r}")
        return found

    def refuse_scaling(self, values: Mapping[str, Any] | None) -> None:
        """Raises `SettingsError` unless the scaling is none: for families that have no scaled checkpoint."""
        if self.scaling(values, 1) is not None:
            raise SettingsError(f"config.json: rope_scaling={dict(values)} is not implemented for this family")

    def finish(self) -> None:
        """Raises `SettingsError` if a field was neither read nor known to change nothing."""
        rest = {name: value for name, value in self._values.items() if name not in self._read}
        if rest:
            raise SettingsError(f"config.json: fields that are not implemented: {rest}; remove them if they are unused")


def _yarn(values: dict[str, Any], original: int) -> s.YarnScaling:
    optional = {n: values.pop(n) for n in ("attention_factor", "mscale", "mscale_all_dim") if values.get(n) is not None}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        values.pop(name, None)
    return s.YarnScaling(
        factor=float(values.pop("factor")),
        beta_fast=float(values.pop("beta_fast", None) or 32.0),
        beta_slow=float(values.pop("beta_slow", None) or 1.0),
        truncate=bool(values.pop("truncate", True)),
        original_max_length=original,
        **{name: float(value) for name, value in optional.items()},
    )


def scaling_dict(scaling) -> dict[str, Any]:
    """A rope scaling as `config.json` spells it."""
    match scaling:
        case None:
            return {"rope_type": "default"}
        case s.LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case s.PiecewiseScaling():
            names = ("factor", "low_freq_factor", "high_freq_factor")
            kind = "llama3"
        case s.YarnScaling():
            names = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            kind = "yarn"
    values = {name: getattr(scaling, name) for name in names if getattr(scaling, name) is not None}
    return {"rope_type": kind, "original_max_position_embeddings": scaling.original_max_length, **values}


def rope_parameters(theta: float, scaling) -> dict[str, Any]:
    """Theta and scaling in the one dict of today's configs."""
    return {"rope_theta": theta, **scaling_dict(scaling)}


# Our dimensions and their names, of nearly every decoder.
NAMES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "d_ff": "intermediate_size",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}


def decoder_dims(c: HFConfig) -> dict[str, Any]:
    """The dimensions in `NAMES`, and head_dim: hidden_size / num_attention_heads where it is absent or null."""
    heads = c.take("num_attention_heads")
    kv_heads = c.take("num_key_value_heads", heads)
    found = {ours: c.take(theirs) for ours, theirs in NAMES.items() if ours != "num_kv_heads"}
    found["norm_eps"] = float(found["norm_eps"])
    head_dim = c.take("head_dim", None) or c.take("hidden_size") // heads
    return {**found, "num_kv_heads": heads if kv_heads is None else kv_heads, "head_dim": head_dim}


def decoder_fields(dims) -> dict[str, Any]:
    """The fields of `decoder_dims`, for export."""
    return {theirs: getattr(dims, ours) for ours, theirs in NAMES.items()} | {"head_dim": dims.head_dim}


def layer_types(windows: list[int | None]) -> list[str]:
    """`layer_types` of a config: which layers slide."""
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def sliding(c: HFConfig, num_layers: int, default: list[bool]) -> list[bool]:
    """Which layers slide: `layer_types` where it is given, else the family's rule.

    Raises:
      SettingsError: a kind of layer that is not implemented, or the wrong number of them.
    """
    kinds = c.take("layer_types", None)
    if kinds is None:
        return default
    known = {"full_attention": False, "sliding_attention": True}
    if len(kinds) != num_layers or not set(kinds) <= set(known):
        raise SettingsError(f"config.json: layer_types={kinds}: expected {num_layers} of {sorted(known)}")
    return [known[kind] for kind in kinds]


def period_of(layers: list, longest: int = 8) -> int:
    """The shortest period with which `layers` repeat, at most `longest`; their number if there is none."""
    for period in range(1, min(longest, len(layers)) + 1):
        if all(layer == layers[i % period] for i, layer in enumerate(layers)):
            return period
    return len(layers)

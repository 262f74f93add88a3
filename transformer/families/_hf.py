"""Reading and writing the `config.json` of a Hugging Face model: no field is ignored in silence."""

from collections.abc import Callable, Mapping
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
    "ep_size", "auto_map", "n_ctx", "reorder_and_upcast_attn", "quantization_config",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "output_past", "router_jitter_noise",
    "experts_implementation", "dropout", "dropout_rate", "activation_dropout", "classifier_dropout", "classif_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "encoder_layerdrop", "decoder_layerdrop", "init_std",
    "max_length", "num_beams", "bad_words_ids", "forced_eos_token_id",
})  # fmt: skip


# More than any model has; a damaged number would otherwise fill the memory with layers.
MAX_LAYERS = 10_000


class HFConfig:
    """A config being read: every field is taken once, expected to be a value, or harmless."""

    def __init__(self, values: Mapping[str, Any], names: Callable[[], frozenset[str] | None] = lambda: None):
        """`names` gives the names of the tensors that lie beside the config, or None where there are no weights."""
        self._values, self._names = dict(values), names
        self._read = set(HARMLESS)
        self._groups: list[HFConfig] = []

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

    def group(self, name: str, missing: Mapping[str, Any]) -> "HFConfig":
        """The config within a config, read like one; `missing` has the values of fields that its files leave out.

        Raises:
          SettingsError: it is missing, or no group of fields.
        """
        values = self.take(name)
        self.require(isinstance(values, Mapping), name, values, "expected a group of fields")
        self._groups.append(HFConfig({**missing, **values}))
        return self._groups[-1]

    def expect(self, name: str, *values: Any) -> None:
        """A field that may only be one of `values`, or absent.

        Raises:
          SettingsError: it is something else, which we don't implement.
        """
        found = self.take(name, values[0])
        if found not in values:
            raise SettingsError(f"config.json: {name}={found!r} is not implemented; expected {values[0]!r}")

    def count(self, name: str, *default: Any) -> int:
        """A field that is a whole number, at least 1.

        Raises:
          SettingsError: it is missing or something else.
        """
        value = self.take(name, *default)
        self.require(type(value) is int and value >= 1, name, value, "expected a whole number, at least 1")
        return value

    def number(self, name: str, *default: Any) -> float:
        """A field that is a number.

        Raises:
          SettingsError: it is missing or something else.
        """
        value = self.take(name, *default)
        self.require(type(value) in (int, float), name, value, "expected a number")
        return float(value)

    def holds(self, ending: str) -> bool | None:
        """Whether the weights beside the config have a tensor whose name ends so; None where there are no weights."""
        names = self._names()
        return None if names is None else any(name.endswith(ending) for name in names)

    def require(self, condition: bool, name: str, value: Any, remedy: str) -> None:
        """Raises `SettingsError` about a field unless the condition holds."""
        if not condition:
            raise SettingsError(f"config.json: {name}={value!r}: {remedy}")

    def rope(self, theta: float | None = None) -> tuple[float, dict[str, Any] | None]:
        """(theta, scaling) from either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
        self._read |= {"rope_parameters", "rope_theta", "rope_scaling"}
        given = self._values.get("rope_parameters")
        found = given if given is not None else self._values.get("rope_scaling") or {}
        self.require(isinstance(found, Mapping), "rope_scaling", found, "expected a group of fields")
        scaling = dict(found)
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
                found = s.LinearScaling(factor=_float(values, "factor"))
            case "llama3":
                names = ("factor", "low_freq_factor", "high_freq_factor")
                found = s.PiecewiseScaling(original_max_length=original, **{n: _float(values, n) for n in names})
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
        for group in self._groups:
            group.finish()


def _float(values: dict[str, Any], name: str) -> float:
    """Takes a number out of a scaling.

    Raises:
      SettingsError: it isn't there or is no number.
    """
    if type(value := values.pop(name, None)) not in (int, float):
        raise SettingsError(f"config.json: rope_scaling.{name}={value!r}: expected a number")
    return float(value)


def _yarn(values: dict[str, Any], original: int) -> s.YarnScaling:
    optional = {n: values.pop(n) for n in ("attention_factor", "mscale", "mscale_all_dim") if values.get(n) is not None}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        values.pop(name, None)
    return s.YarnScaling(
        factor=_float(values, "factor"),
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
    found = {ours: c.count(theirs) for ours, theirs in NAMES.items() if ours not in ("num_kv_heads", "norm_eps")}
    c.require(found["num_layers"] <= MAX_LAYERS, "num_hidden_layers", found["num_layers"], "no model is that deep")
    heads, kv_heads = found["num_heads"], c.take("num_key_value_heads", None)
    head_dim = c.take("head_dim", None) or found["d_model"] // heads
    c.require(type(head_dim) is int and head_dim >= 1, "head_dim", head_dim, "expected a whole number, at least 1")
    return {
        **found,
        "num_kv_heads": heads if kv_heads is None else c.count("num_key_value_heads"),
        "head_dim": head_dim,
        "norm_eps": c.number("rms_norm_eps"),
    }


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

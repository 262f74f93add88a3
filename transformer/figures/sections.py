"""What the page of all figures shows, and what its reader can choose: plain data, in the order of the lesson."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformer import spec


@dataclass(frozen=True)
class Choice:
    """A control of the page.

    Attributes:
      name: what it is called, a key of the table of words.
      options: by their label (a key of the table of words, or said as it is), what each asks the figure for.
    """

    name: str
    options: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Shown:
    """A figure, of every combination of its choices.

    Attributes:
      least: pixels below which it is not squeezed but scrolled sideways; panels of others are stacked instead.
    """

    figure: str
    choices: tuple[Choice, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    least: int = 0


@dataclass(frozen=True)
class Section:
    """A part of the page: its name (of its title and text in the table of words, and in links) and its figures."""

    name: str
    shown: tuple[Shown, ...]


def _named(argument: str, *names: str) -> dict[str, dict[str, str]]:
    return {name: {argument: name} for name in names}


# Two names of the lesson's family tree each.
PAIRS = {
    f"{one} → {other}": dict(one=one, other=other)
    for one, other in (
        ("vaswani:base", "llama3:8b"), ("vaswani:base", "gpt2:xl"), ("gpt2:xl", "llama3:8b"),
        ("llama3:8b", "deepseek_v3:671b"), ("llama3:8b", "mistral:7b-v0.1"), ("mistral:7b-v0.1", "mixtral:8x7b"),
        ("llama3:8b", "gemma3:27b"), ("mixtral:8x7b", "qwen3_moe:235b-a22b"), ("llama3:8b", "gpt_oss:120b"),
    )
}  # fmt: skip
MASKS = {
    "causal": dict(mask=spec.Mask(causal=True)),
    "both ways": dict(mask=spec.Mask(causal=False)),
    "a window": dict(mask=spec.Mask(causal=True, window=12)),
    "a window and sinks": dict(mask=spec.Mask(causal=True, window=12, sinks=4)),
    "two documents": dict(segments=[1] * 24 + [2] * 40),
}
FIELDS = {
    "windows of 4": dict(windows=(4,) * 6),
    "5 windows : 1 full": dict(windows=(3, 3, 3, 3, 3, None)),
    "in turns": dict(windows=(4, None) * 3),
    "windows and 2 sinks": dict(windows=(4,) * 6, sinks=2),
}
IN_BLOCK = "decoder/body/block_0/"
ARRAYS = {
    f"array {path.removeprefix(IN_BLOCK)}": dict(what=path)
    for path in (
        f"{IN_BLOCK}ffn/up/kernel", f"{IN_BLOCK}attention/query/kernel", f"{IN_BLOCK}attention/key/kernel",
        "embedding/token", "activation/residual", "activation/heads",
    )
}  # fmt: skip
MESHES = {
    "data 2 × fsdp 2 × tensor 2": dict(data=2, fsdp=2, tensor=2),
    "data 8": dict(data=8),
    "fsdp 8": dict(fsdp=8),
    "context 2 × tensor 4": dict(context=2, tensor=4),
}
SMALL_MESHES = {
    "data 2 × fsdp 2 × tensor 2": dict(data=2, fsdp=2, tensor=2),
    "fsdp 8": dict(fsdp=8),
    "fsdp 2 × expert 4": dict(reference="mixtral:tiny", fsdp=2, expert=4),
}
PRECISIONS = _named("dtype", "bfloat16", "float32", "int8")
CACHED = {"causal": {}, "a window of 3": dict(window=3), "both ways": dict(causal=False)}
HEADS = {"as published": {}, "16": dict(heads=16), "64": dict(heads=64), "256": dict(heads=256)}

SECTIONS = (
    Section("journey", (Shown("token_journey"), Shown("softmax_steps"))),
    Section(
        "families",
        (Shown("block_diagrams", (Choice("from and to", PAIRS),)), Shown("family_table", least=1180)),
    ),
    Section(
        "attention",
        (
            Shown("attention_steps", (Choice("mask", {"causal": {}, "both ways": dict(causal=False)}),)),
            Shown("stale_cache", (Choice("cached text", CACHED),)),
        ),
    ),
    Section("decoding", (Shown("decoding_work"), Shown("decoding_flops"), Shown("decoding_limits"))),
    Section(
        "caches",
        (
            Shown(
                "cache_sizes",
                (
                    Choice("model", _named("preset", "llama3:8b", "deepseek_v3:671b", "gemma3:27b")),
                    Choice("query heads", HEADS),
                ),
            ),
            Shown("latent_cache"),
            Shown("published_caches", (Choice("precision", PRECISIONS),), least=520),
        ),
    ),
    Section(
        "windows",
        (
            Shown("receptive_field", (Choice("layers", FIELDS),)),
            Shown("layer_patterns", least=900),
            Shown("ring_cache", (Choice("sinks", {"2": {}, "0": dict(sinks=0)}),)),
        ),
    ),
    Section(
        "rope",
        (
            Shown("rope_rotation", (Choice("distance", {str(n): dict(distance=n) for n in (3, 1, 8)}),)),
            Shown("rope_scores"),
            Shown("rope_wavelengths"),
        ),
    ),
    Section(
        "experts",
        (Shown("router_grid"), Shown("expert_parameters"), Shown("expert_load"), Shown("dropped_tokens")),
    ),
    Section(
        "tiles",
        (
            Shown("attention_tiles", (Choice("mask", MASKS),)),
            Shown("online_softmax"),
            Shown("memory_traffic"),
        ),
    ),
    Section(
        "sharding",
        (
            Shown("sharding", (Choice("array", ARRAYS), Choice("mesh", MESHES))),
            Shown("step_traffic", (Choice("mesh", SMALL_MESHES),)),
            Shown("mesh_traffic", (Choice("model", _named("reference", "llama3:8b", "llama3:70b")),)),
            Shown("hbm_plan", (Choice("model", _named("reference", "llama3:8b", "llama3:70b", "mixtral:8x7b")),)),
        ),
    ),
)

"""Every mechanism as a figure to look at and change: `figures.attention_steps(row=5, language="zh")`.

Each figure is a plotly figure drawn from plain arrays that `transformer.figures.data` computes with the package's own
code. All take `language="en"` or "zh" and `theme="light"` or "dark". Plotly comes with the extra `figures`.
"""

import importlib

_HOMES = {
    "attention": ("attention_steps", "attention_heads"),
    "caches": ("cache_sizes", "published_caches"),
    "decoding": ("decoding_work", "decoding_flops", "decoding_limits"),
    "experts": ("router_grid", "expert_load", "dropped_tokens", "router_picks", "expert_parameters"),
    "families": ("block_diagrams", "family_table"),
    "latent": ("latent_cache",),
    "journey": ("token_journey", "softmax_steps"),
    "placement": ("sharding",),
    "plan": ("hbm_plan", "step_traffic", "mesh_traffic"),
    "prefix": ("stale_cache",),
    "rope": ("rope_rotation", "rope_scores", "rope_wavelengths"),
    "training": ("training_curves", "run_panels", "run_layers"),
    "windows": ("receptive_field", "layer_patterns", "ring_cache"),
    "tiles": ("attention_tiles", "online_softmax", "memory_traffic"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    # Lazy, so that one figure doesn't load what the others need.
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its figures are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

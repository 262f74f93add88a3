"""Every well-known transformer family as data: one pure functional JAX/Flax code base.

A few names are enough for a notebook, and load only when used: `build` a model from a config or a family name,
`init` its parameters, `model.apply` it, `load` a workdir, `generate_text`. `from_hf` and `to_hf` read and write
Hugging Face directories, `from_gguf` reads GGUF files; a `Source` is what an encoder reads for a decoder.
"""

__all__ = ["Source", "build", "from_gguf", "from_hf", "generate_text", "init", "load", "to_hf"]


def __getattr__(name: str):
    # Lazy, so that `import transformer` costs little more than nothing.
    if name in __all__:
        from transformer import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

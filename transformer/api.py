"""The few names that a notebook needs."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import ml_collections
from jax.sharding import Mesh

from transformer import config, families, settings, sharding
from transformer.checkpoints import hugging_face
from transformer.checkpoints import source as sources
from transformer.checkpoints.workdir import Workdir
from transformer.mapping import from_mapping
from transformer.nn import initial
from transformer.nn.context import Source
from transformer.nn.model import Transformer
from transformer.spec import Model
from transformer.tokenizer import Tokenizer

# What says which model is meant.
ModelLike = str | Model | Mapping[str, Any] | ml_collections.ConfigDict


def build(source: ModelLike, **compute: Any) -> Transformer:
    """A model from a family and size ("llama3:8b"), a config page's path, a config, or a spec.

    Args:
      compute: fields of `settings.Compute`, such as dtype="bfloat16" or attention="reference".

    Raises:
      SettingsError, SpecError: naming the field, its value and the remedy.
    """
    spec, base = source, {}
    if isinstance(source, str):
        source = config.load_config(source)
    if not isinstance(source, Model):
        values = source.to_dict() if isinstance(source, ml_collections.ConfigDict) else dict(source)
        spec, base = families.build_spec(values["model"]), values.get("compute", {})
    return Transformer(spec, from_mapping(settings.Compute, {**base, **compute}, "compute."))


def init(model: Transformer, seed: int = 0, mesh: Mesh | None = None, abstract: bool = False) -> dict:
    """Initial parameters; with a mesh in their shards; abstract, only shapes (with shardings if a mesh is given)."""
    if not abstract:
        return initial.params(model, seed, mesh)
    shapes = nn.meta.unbox(initial.abstract_params(model))
    if mesh is None:
        return shapes
    places = initial.param_shardings(model, mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def from_hf(
    directory: str | os.PathLike,
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    mtp: bool = True,
    progress: Callable[[str], None] = lambda _: None,
    **compute: Any,
) -> tuple[Transformer, dict]:
    """(model, parameters) of a Hugging Face directory, read tensor by tensor straight to the mesh.

    Args:
      dtype: of the parameters, and of the computation unless `compute` says otherwise.
      mesh: where the parameters go; by default they are whole on the first device.
      mtp: with modules of multi-token prediction, where there are any; False leaves them out.
      progress: told the path of every parameter that is complete.
      compute: fields of `settings.Compute`.

    Raises:
      CheckpointError, SettingsError: naming the file, field or tensor.
    """
    return read(sources.HuggingFace(directory, mtp), dtype=dtype, mesh=mesh, progress=progress, **compute)


def from_gguf(file: str | os.PathLike, **options: Any) -> tuple[Transformer, dict]:
    """(model, dequantised parameters) of a GGUF file, or of the one that "package:NAME" carries; as `from_hf`."""
    return read(sources.GGUF(file), **options)


def read(
    source: sources.Source,
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    progress: Callable[[str], None] = lambda _: None,
    show: bool = False,
    unrolled: bool = False,
    **compute: Any,
) -> tuple[Transformer, dict]:
    """(model, parameters) of an opened source, as `from_hf`.

    Args:
      show: draws a progress bar on a terminal.
      unrolled: every layer gets arrays of its own, read straight into them (`generation.unroll`).
    """
    if unrolled and source.spec.decoder is not None:
        source.spec = dataclasses.replace(source.spec, decoder=source.spec.decoder.unrolled)
    model = build(source.spec, **{"dtype": dtype, **compute})
    like = init(model, mesh=mesh or _first_device(), abstract=True)
    left = sources.sizes(like)
    with sources.progress_bar(sum(left.values()), f"reading {source.path.name}", show) as advance:

        def tick(path: str, count: int) -> None:
            advance(count)
            left[path] -= count
            if not left[path]:
                progress(path)

        return model, source.read_params(like, dtype, tick)


def to_hf(model: Transformer, params: dict, directory: str | os.PathLike, **options: Any) -> None:
    """Writes a directory that `transformers` loads; options as in `checkpoints.hugging_face.write`."""
    hugging_face.write(model.spec, params, directory, **options)


def _first_device() -> Mesh:
    return sharding.make_mesh(settings.Mesh(), jax.devices()[:1])


def load(workdir: str | os.PathLike, mesh: Mesh | None = None, **compute: Any) -> tuple[Transformer, dict, Tokenizer]:
    """(model, parameters, tokenizer) of the newest checkpoint in a training workdir.

    Args:
      mesh: where the parameters go; by default they are whole on the first device.
      compute: fields of `settings.Compute` that differ from the run's.

    Raises:
      WorkdirError: no run or no checkpoint there.
    """
    place = Workdir(workdir)
    model = build(place.read_config(), **compute)
    shapes = init(model, mesh=mesh or _first_device(), abstract=True)
    try:
        return model, place.restore_params(shapes), place.tokenizer()
    finally:
        place.close()


def generate_text(
    model: Transformer,
    params: dict,
    tokenizer: Tokenizer,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 200,
    **options: Any,
) -> list[str]:
    """The text that follows each prompt.

    Args:
      options: how tokens are drawn (fields of `ops.sampling.Sampling`: temperature, top_k, top_p, min_p,
        repetition_penalty); stop strings and stream, a function of (index of the prompt, piece of text)
        (`generation.complete`); seed, cache_dtype, batch_size, prefill_chunk and so on (`generation.generate`); or
        beams (`generation.Beams`), with which nothing is drawn.
    """
    from transformer import generation
    from transformer.ops.sampling import Sampling

    names = {field.name for field in dataclasses.fields(Sampling)}
    if drawing := {name: options.pop(name) for name in names & set(options)}:
        options["sampling"] = Sampling(**drawing)
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    options = {"max_new_tokens": max_new_tokens, **options}
    return generation.generate_text(model, params, tokenizer, prompts, **options)


__all__ = ["Source", "build", "from_gguf", "from_hf", "generate_text", "init", "load", "read", "to_hf"]

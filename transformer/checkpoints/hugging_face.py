"""Hugging Face directories, read and written."""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from transformer import families, spec
from transformer.checkpoints import weights
from transformer.checkpoints.tensors import CheckpointError, TensorFiles, block_of
from transformer.families import _hf
from transformer.mapping import from_mapping
from transformer.settings import SettingsError, check
from transformer.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
# How many modules of multi-token prediction a checkpoint has.
NEXT_N = "num_nextn_predict_layers"
SHARD_BYTES = 5 * 10**9
# What travels along with the weights, unread by us.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "vocab.txt",
    "spiece.model", "source.spm", "target.spm",
)  # fmt: skip


SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(directory: str | os.PathLike) -> dict[str, Any]:
    """The `config.json` of a directory.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    file = Path(directory) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: can't be read ({error.strerror}); give a Hugging Face directory") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise CheckpointError(f"{file}: has no model_type; give the config of a model")
    return values


def read_spec(config: Mapping[str, Any], names: Callable[[], frozenset[str] | None] = lambda: None) -> spec.Model:
    """The spec of a Hugging Face config.

    Args:
      names: gives the names of the tensors beside it, where there are any: they say which optional parts there are.

    Raises:
      CheckpointError: `names` can't be had.
      SettingsError, SpecError: an unknown model type; a field that is missing, contradictory or not implemented.
    """
    name = families.of_model_type(config["model_type"])
    reader = _hf.HFConfig(config, names)
    try:
        dims = families.get(name).from_hf(reader)
        reader.finish()
        # Every dimension has the type that the family declares, before anything is computed from it.
        dims = from_mapping(type(dims), vars(dims), "config.json: ")
        for field in ("num_layers", "num_decoder_layers"):
            layers = getattr(dims, field, 1)
            check(layers <= _hf.MAX_LAYERS, f"config.json: {field}", layers, "no model is that deep")
        return families.make(name, dims)
    except (CheckpointError, SettingsError, spec.SpecError):
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError) as error:
        raise SettingsError(f"config.json: a field of {name} has a value that can't be used ({error!r})") from None


def open_spec(directory: str | os.PathLike, mtp: bool = True) -> spec.Model:
    """The spec of a directory.

    Modules of multi-token prediction that the config states and no file holds are left out: `transformers` drops them
    from what it saves.

    Args:
      mtp: False leaves out multi-token prediction, wherever it is.

    Raises:
      CheckpointError, SettingsError, SpecError: as `read_config`, `read_spec` and `TensorFiles` do.
    """
    config = read_config(directory)

    @functools.cache
    def held() -> frozenset[str] | None:
        there = any(Path(directory).glob("*.safetensors"))
        return TensorFiles(Path(directory)).names if there else None

    found = read_spec(config, held)
    if found.mtp is None:
        return found
    if mtp and held() is not None:
        table = families.get(found.origin.family).table(found)
        mtp = any(row.name in held() for row in table.around if row.paths[0].startswith("mtp/"))
    return found if mtp else read_spec({**config, NEXT_N: 0}, held)


def read_params(
    directory: str | os.PathLike,
    model: spec.Model,
    like: dict,
    dtype: Any,
    progress: weights.Tick = lambda path, count: None,
) -> dict:
    """The parameters of a directory, leaf by leaf in the shardings of `like` (abstract arrays).

    Raises:
      CheckpointError: missing, unknown, damaged or misshapen tensors.
    """
    files = TensorFiles(Path(directory), block_of(read_config(directory)))
    table = families.get(model.origin.family).table(model)
    return weights.load(files, table, model, like, np.dtype(dtype), progress)


def write(
    model: spec.Model,
    params: dict,
    directory: str | os.PathLike,
    *,
    dtype: Any = None,
    tokenizer: Tokenizer | None = None,
    companions: str | os.PathLike | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes `config.json` and sharded safetensors that `transformers` loads; all of it or nothing.

    Args:
      dtype: of the tensors written; that of each parameter by default.
      tokenizer: whose special ids the configs state, where `companions` doesn't say otherwise.
      companions: a directory whose tokenizer and generation files are copied along, and whose configs may state the
        special ids. Without either they are null: left out, `transformers` would put in those of the first checkpoint.
      progress: told the bytes of every tensor that is written.

    Raises:
      CheckpointError: the directory exists and is not empty, or the model has no such form.
    """
    origin, target = model.origin, Path(directory).absolute()
    family = families.get(origin.family) if origin else None
    if family is None or not hasattr(family, "to_hf"):
        what = f"family {origin.family!r} has no Hugging Face form" if origin else "the spec was made by no family"
        raise CheckpointError(f"to_hf: {what}; build the model from one that has")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists and is not empty; give a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    # A directory beside the target, renamed at the very end: a killed export never looks whole.
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        ids = _special_ids(tokenizer, companions)
        tensors = weights.dump(params, family.table(model), model)
        kind = write_tensors(partial, tensors, None if dtype is None else np.dtype(dtype), shard_bytes, progress)
        _write_json(partial / "config.json", family.to_hf(origin.dims) | ids | {"dtype": kind})
        stated = {name: value for name, value in ids.items() if value is not None}
        if model.decoder_start is not None:
            stated["decoder_start_token_id"] = model.decoder_start
        if stated and model.decoder is not None:
            _write_json(partial / "generation_config.json", stated)
        for name in COMPANIONS if companions else ():
            if (Path(companions) / name).is_file():
                shutil.copyfile(Path(companions) / name, partial / name)
        if target.exists():
            target.rmdir()
        partial.chmod(0o755)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _special_ids(tokenizer: Tokenizer | None, companions: str | os.PathLike | None) -> dict[str, Any]:
    """What the configs state of the tokens that begin, end and pad a text: the config's word before the tokenizer's."""
    found = dict.fromkeys(SPECIAL_IDS)
    if tokenizer:
        ends = list(tokenizer.end_ids)
        found |= {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    for name in ("generation_config.json", "config.json") if companions else ():
        file = Path(companions) / name
        try:
            values = json.loads(file.read_bytes()) if file.is_file() else {}
            found |= {field: values[field] for field in SPECIAL_IDS if values.get(field) is not None}
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{file}: not a JSON object ({error}); mend or remove it") from None
    return found


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_tensors(
    directory: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype: np.dtype | None,
    shard_bytes: int,
    progress: Callable[[int], None] = lambda count: None,
) -> str:
    """Fills files of at most `shard_bytes` (more only for a single larger tensor); returns the name of the dtype."""
    shard, held, shards, where, total, kinds = {}, 0, 0, {}, 0, set()

    def flush():
        nonlocal shard, held, shards
        shards += 1
        file = directory / f"shard-{shards}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the library leaves it to its owner alone
        where.update(dict.fromkeys(shard, shards))
        shard, held = {}, 0

    for name, tensor in tensors:
        tensor = tensor if dtype is None else tensor.astype(dtype)
        if shard and held + tensor.nbytes > shard_bytes:
            flush()
        shard[name], held, total = tensor, held + tensor.nbytes, total + tensor.nbytes
        kinds.add(tensor.dtype.name)
        progress(tensor.nbytes)
    flush()
    if shards == 1:
        os.replace(directory / "shard-1.safetensors", directory / "model.safetensors")
    else:
        files = {n: f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)}
        for number, file in files.items():
            os.replace(directory / f"shard-{number}.safetensors", directory / file)
        index = {"metadata": {"total_size": total}, "weight_map": {name: files[n] for name, n in where.items()}}
        _write_json(directory / INDEX, index)
    return kinds.pop() if len(kinds) == 1 else "float32"


def is_directory(path: str | os.PathLike) -> bool:
    """True for what looks like a Hugging Face directory rather than a training workdir."""
    file = Path(path) / "config.json"
    try:
        return isinstance(json.loads(file.read_text(encoding="utf-8")).get("model_type"), str)
    except (OSError, ValueError, AttributeError):
        return False

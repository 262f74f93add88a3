"""The recorded outputs of Hugging Face models (`tests/golden`), discovered, and what the tests here share."""

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

import transformer
from transformer.checkpoints.weights import flatten
from transformer.nn.model import Transformer

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = tuple(sorted(file.parent.name for file in GOLDEN.glob("*/model.safetensors")))
# By what they are: decoders alone, encoders alone, and both.
KINDS = {case: json.loads((GOLDEN / case / "meta.json").read_text())["kind"] for case in CASES}
DECODERS, ENCODERS, PAIRS = (tuple(c for c in CASES if KINDS[c] == kind) for kind in ("causal", "bert", "seq2seq"))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Stands for a field that is left out.
ABSENT = object()
HEADER = 8  # bytes of the length that a safetensors file begins with


@functools.cache
def imported(case: str) -> tuple[Transformer, dict]:
    """(model, parameters) of a case, in float32."""
    return transformer.from_hf(GOLDEN / case)


@functools.cache
def expected(case: str) -> Mapping[str, np.ndarray]:
    """The recorded arrays of a case."""
    with np.load(GOLDEN / case / "expected.npz") as arrays:
        return dict(arrays)


def config(case: str, file: str = "config.json") -> dict[str, Any]:
    """A config of a case, as plain data."""
    return json.loads((GOLDEN / case / file).read_text())


def quantized(case: str) -> bool:
    """True where weights are stored in few bits, which we read and don't write."""
    return "quantization_config" in config(case)


# A plain model, and the two kinds of weights in few bits.
PLAIN = CASES[next(i for i, c in enumerate(CASES) if config(c)["model_type"] == "llama")]
FEW_BITS = tuple(filter(quantized, CASES))


def copy(case: str, directory: Path) -> Path:
    """A directory with the case's config and weights, to be damaged."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / case / name, directory / name)
    return directory


def stored(*files: Path) -> dict[str, np.ndarray]:
    """The tensors of safetensors files as they lie there, read by the library alone."""
    found = {}
    for path in files:
        with safe_open(path, framework="numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)
    return found


def assert_identical(got: Any, want: Any) -> None:
    """Two trees of arrays are the same bit for bit, names, dtypes and NaN included."""
    got, want = flatten(got), flatten(want)
    assert set(got) == set(want)
    for name in want:
        a, b = np.asarray(jax.device_get(got[name])), np.asarray(jax.device_get(want[name]))
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), f"{name} differs"


def shard(directory: Path) -> dict[str, str]:
    """Cuts the weights in two files with an index; returns its map."""
    held = stored(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(held))}
    for file in set(files.values()):
        save_file({name: x for name, x in held.items() if files[name] == file}, directory / file)
    write_index(directory, files)
    return files


def write_index(directory: Path, weight_map) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def dequantized(case: str) -> dict[str, np.ndarray]:
    """Few-bit tensors of a case as float32, from their definitions, element by element."""
    path = GOLDEN / case / "model.safetensors"
    length = int.from_bytes(path.read_bytes()[:HEADER], "little")
    body = path.read_bytes()[HEADER:]
    header = json.loads(body[:length])
    header.pop("__metadata__", None)
    kinds = {"F32": np.float32, "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    raw = {
        name: np.frombuffer(body[length:][slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
    block = config(case)["quantization_config"].get("weight_block_size")
    found = {}
    for name, x in raw.items():
        if f"{name}_scale_inv" in raw:
            scale, out = raw[f"{name}_scale_inv"], np.empty(x.shape, np.float32)
            for at in np.ndindex(x.shape):
                out[at] = np.float32(x[at]) * scale[at[0] // block[0], at[1] // block[1]]
            found[name] = out
        elif name.endswith("_blocks"):
            found[name.removesuffix("_blocks")] = from_fp4(x, raw[name.replace("_blocks", "_scales")])
        elif not name.endswith(("_scale_inv", "_scales")):
            found[name] = x
    return found


def weights(case: str) -> dict[str, np.ndarray]:
    """The tensors of a case, those in few bits as what they stand for."""
    return dequantized(case) if quantized(case) else stored(GOLDEN / case / WEIGHTS)


def from_fp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Sign, two bits of exponent (bias 1), one of mantissa; the input axis comes before the output one."""
    experts, out, groups, half = blocks.shape
    found = np.empty((experts, groups * 2 * half, out), np.float32)
    for e, o, g, i in np.ndindex(blocks.shape):
        for part in range(2):
            code = (int(blocks[e, o, g, i]) >> 4 * part) & 15
            exponent, mantissa = code >> 1 & 3, code & 1
            value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
            sign = -1.0 if code & 8 else 1.0
            found[e, g * 2 * half + 2 * i + part, o] = sign * value * 2.0 ** (int(scales[e, o, g]) - 127)
    return found

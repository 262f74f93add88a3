"""Tensors of a safetensors directory, read lazily, one at a time, dequantised where they are stored in few bits."""

import json
import logging
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

log = logging.getLogger(__name__)

FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
BYTES = {"U8": np.dtype(np.uint8)}
# Elements looked at together: a whole tensor's comparison would be half as large as the tensor.
CHUNK = 2**20
# Values of the sixteen codes of a 4-bit float (OCP Microscaling Formats v1.0, E2M1).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class CheckpointError(ValueError):
    """A checkpoint can't be used; the message names the file or tensor and what is wrong with it."""


class TensorFiles:
    """The tensors of a directory by name: `names`, `shape(name)`, `read(name)`.

    Three layouts count as one tensor each: plain; 8-bit floats with a block scale (`NAME` and `NAME_scale_inv`,
    DeepSeek-V3); 4-bit blocks (`NAME_blocks` and `NAME_scales`, MXFP4 of gpt-oss). Only safetensors files are read:
    pickle files can run code and are refused.

    Raises:
      CheckpointError: no weights, a missing or damaged file, or an index that leaves the directory.
    """

    def __init__(self, directory: Path, block: tuple[int, int] = (128, 128)):
        self._directory, self._block = Path(directory), block
        self._files: dict[Path, Any] = {}
        self._offsets: dict[Path, dict[str, int]] = {}
        self._where = self._find()
        stored = set(self._where)
        self._fp8 = {name for name in stored if f"{name}_scale_inv" in stored}
        self._fp4 = {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")}
        lost = [name for name in self._fp4 if f"{name}_scales" not in stored]
        if lost:
            raise CheckpointError(f"{directory}: {lost[0]}_blocks has no {lost[0]}_scales beside it")
        hidden = {f"{name}_scale_inv" for name in self._fp8}
        hidden |= {f"{name}_{part}" for name in self._fp4 for part in ("blocks", "scales")}
        self.names = frozenset((stored - hidden) | self._fp4)
        for name in sorted(self._fp8):
            check_fp8(self._shape(name), self._shape(f"{name}_scale_inv"), self._block, name)
        for name in sorted(self._fp4):
            check_fp4(self._shape(f"{name}_blocks"), self._shape(f"{name}_scales"), name)

    def _find(self) -> dict[str, Path]:
        """Tensor name to file, from the index or the one file there is."""
        index = self._directory / "model.safetensors.index.json"
        if index.is_file():
            return self._from_index(index)
        files = sorted(self._directory.glob("*.safetensors"))
        if len(files) == 1:
            return dict.fromkeys(self._open(files[0]).keys(), files[0])
        if files:
            raise CheckpointError(f"{self._directory}: {len(files)} safetensors files but no {index.name}")
        pickles = sorted(p.name for s in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in self._directory.glob(s))
        hint = f"; {pickles[0]} is a pickle file, which can run code and is refused" if pickles else ""
        raise CheckpointError(f"{self._directory}: no *.safetensors files{hint}")

    def _from_index(self, index: Path) -> dict[str, Path]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            pairs = [(str(name), str(file)) for name, file in weight_map.items()]
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from None
        where, root = {}, self._directory.resolve()
        for name, file in pairs:
            path = self._directory / file
            # Links inside the directory are fine (hub caches are made of them), names that leave it are not.
            if Path(file).name != file or not path.parent.resolve().is_relative_to(root):
                raise CheckpointError(f"{index}: {name} points outside the directory, to {file!r}")
            where[name] = path
        for path in sorted(set(where.values())):
            present = set(self._open(path).keys())
            missing = [name for name, file in where.items() if file == path and name not in present]
            if missing:
                raise CheckpointError(f"{path}: {missing[0]} is in the index but not in the file")
        return where

    def _open(self, path: Path):
        if path not in self._files:
            if not os.path.isfile(path):  # also of names that no file system takes
                raise CheckpointError(f"{path}: missing; download the checkpoint again")
            try:
                self._files[path] = safe_open(path, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: damaged or not a safetensors file ({error})") from None
        return self._files[path]

    def _slice(self, name: str):
        return self._open(self._where[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, dequantised; nothing is read."""
        if name in self._fp4:
            *lead, blocks, half = self._slice(f"{name}_blocks").get_shape()
            return (*lead[:-1], blocks * half * 2, lead[-1])
        return self._shape(name)

    def check_kind(self, name: str) -> None:
        """Raises `CheckpointError` unless the tensor holds numbers that can be weights; nothing is read."""
        parts = (f"{name}_blocks", f"{name}_scales") if name in self._fp4 else (name,)
        for part in parts:
            kind = self._slice(part).get_dtype()
            if kind not in ({"U8"} if name in self._fp4 else FLOATS):
                raise CheckpointError(f"{part}: is stored as {kind}, which can't be weights")

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """One tensor; quantised ones as float32. NaN is told, not refused."""
        if name in self._fp4:
            x = dequantize_fp4(self._raw(f"{name}_blocks"), self._raw(f"{name}_scales"))
        elif name in self._fp8:
            x = dequantize_fp8(self._raw(name), self._raw(f"{name}_scale_inv"), self._block, name)
        else:
            x = self._raw(name)
        flat = x.reshape(-1)
        if any(np.isnan(flat[start : start + CHUNK]).any() for start in range(0, flat.size, CHUNK)):
            log.warning("%s has NaN weights", name)
        return x

    def _raw(self, name: str) -> np.ndarray:
        """A tensor as it is stored, read from its place in the file.

        The library would map the file into memory, where every page once read stays and counts; and it knows no 8-bit
        floats in numpy.
        """
        path, kind, shape = self._where[name], self._slice(name).get_dtype(), self._shape(name)
        if kind not in FLOATS | BYTES:
            raise CheckpointError(f"{name}: is stored as {kind}, which can't be weights")
        try:
            if path not in self._offsets:
                self._offsets[path] = _offsets(path)
            offset = self._offsets[path][name]
            return np.fromfile(path, (FLOATS | BYTES)[kind], math.prod(shape), offset=offset).reshape(shape)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: {name} can't be read ({error})") from None


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor of a file begins, from its header, which the library has checked by then."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def check_fp8(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], name: str) -> None:
    """Raises `CheckpointError` unless there is a scale for every block of a matrix."""
    expected = tuple(math.ceil(size / step) for size, step in zip(shape, block, strict=False))
    if len(shape) != 2 or scale != expected:
        raise CheckpointError(f"{name}: {shape} in blocks of {block} needs scales {expected}, not {scale}")


def check_fp4(blocks: tuple[int, ...], scales: tuple[int, ...], name: str) -> None:
    """Raises `CheckpointError` unless there is a scale for every group of a layer's experts."""
    if len(blocks) != 4 or blocks[:-1] != scales:
        raise CheckpointError(f"{name}: blocks {blocks} need scales {blocks[:-1]}, not {scales}")


def dequantize_fp8(x: np.ndarray, scale: np.ndarray, block: tuple[int, int], name: str = "tensor") -> np.ndarray:
    """x · scale by blocks of rows and columns, the last ones ragged (deepseek-ai/DeepSeek-V3, inference/kernel.py)."""
    check_fp8(x.shape, scale.shape, block, name)
    scale = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: x.shape[0], : x.shape[1]]
    return x.astype(np.float32) * scale.astype(np.float32)


def dequantize_fp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 [E, out, groups, 16] bytes and [E, out, groups] exponents to float32 [E, in, out].

    A byte holds two codes, the low nibble first; a scale is a power of two with bias 127.
    """
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    x = np.ldexp(FP4[codes], scales.astype(np.int32)[..., None] - 127)
    return np.swapaxes(x.reshape(*blocks.shape[:-2], -1), -1, -2)


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The block size of 8-bit scales that a `config.json` states.

    Raises:
      CheckpointError: a quantisation that is not implemented.
    """
    values = config.get("quantization_config") or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"config.json: quantization_config={values!r}: expected a group of fields")
    method = values.get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise CheckpointError(f"config.json: quantization_config.quant_method={method!r} is not implemented")
    match values.get("weight_block_size"):
        case None:
            return 128, 128
        case [int(rows), int(columns)] if rows >= 1 and columns >= 1:
            return rows, columns
        case other:
            raise CheckpointError(f"config.json: quantization_config.weight_block_size={other!r}: expected two sizes")

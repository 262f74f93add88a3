"""Files as streams of bytes, decompressed while they are read, and what is damaged about them."""

import gzip
import importlib
import io
import os
import zlib
from typing import Any, BinaryIO

from transformer.settings import SettingsError

KINDS = (".gz", ".zst")
BUFFER = 2**17  # bytes


class DamagedFile(Exception):
    """The compressed stream ends early or contradicts itself."""


def needs(module: str, name: str) -> Any:
    """A library that a file's format needs.

    Raises:
      SettingsError: it is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise SettingsError(
            f"{name}: needs {package}, which is not installed; pip install {package} (the extra [data] has it)"
        ) from None


def opened(name: str, plain: bool = False) -> BinaryIO:
    """A file's bytes, without the compression that its name tells, or as they are.

    Raises:
      SettingsError: it can't be opened, or zstandard is missing.
      DamagedFile: from reading.
    """
    compression = "" if plain else os.path.splitext(name.lower())[1]
    zstandard = needs("zstandard", name) if compression == ".zst" else None
    try:
        file = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise SettingsError(f"data.paths: {name} can't be read ({error.strerror}); check its permissions") from None
    if compression == ".gz":
        return io.BufferedReader(_Gzip(file), BUFFER)
    return io.BufferedReader(_Zstd(file, zstandard), BUFFER) if zstandard else file


class _Stream(io.RawIOBase):
    """Bytes out of a compressed file; closes it."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


class _Gzip(_Stream):
    def __init__(self, file: BinaryIO):
        super().__init__(file)
        self._plain = gzip.GzipFile(fileobj=file)

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self._plain.readinto(buffer)
        except (EOFError, OSError, zlib.error) as error:
            raise DamagedFile(str(error)) from None


class _Zstd(_Stream):
    """Frame by frame: the library's own reader takes a frame that is cut off for a file that ends."""

    def __init__(self, file: BinaryIO, zstandard: Any):
        super().__init__(file)
        self._new, self._error = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame, self._begun, self._rest, self._ready = self._new(), False, b"", memoryview(b"")

    def readinto(self, buffer: memoryview) -> int:
        while not self._ready:
            content = self._rest or self._file.read(BUFFER)
            self._rest = b""
            if not content:
                if self._begun:
                    raise DamagedFile("a frame has no end")
                return 0
            try:
                self._ready, self._begun = memoryview(self._frame.decompress(content)), True
            except self._error as error:
                raise DamagedFile(str(error)) from None
            if self._frame.eof:
                self._rest, self._frame, self._begun = self._frame.unused_data, self._new(), False
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

"""Token shards: a file of token ids with a header that says what they are.

Layout, little-endian: 64 bytes of header (magic `danlu.tk`, format version, bytes a token, number
of tokens, CRC-32 of the tokens, tokenizer fingerprint, zeros), then the tokens as uint16 or uint32.
Opening compares header and file size, which finds a cut-off file in constant time; `verify` reads
all of it.
"""

import contextlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from danlu.base.errors import DataError
from danlu.base.files import atomic_write

__all__ = ["Shard", "ShardWriter", "open_shard", "write_shard"]

_MAGIC: Final = b"danlu.tk"
_VERSION: Final = 1
_HEADER = struct.Struct("<8sIIQI12s24x")
_TYPES: Final[Mapping[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_AGAIN = "Delete the folder it is in and run danlu prepare again."


@dataclass(frozen=True, slots=True)
class Shard:
    """An opened shard; nothing of it is in memory until `tokens` is asked for.

    Attributes:
        path: the file.
        length: number of tokens.
        dtype: uint16 or uint32.
        crc: CRC-32 of the tokens' bytes, as written.
        tokenizer: fingerprint of the tokenizer that made it.
    """

    path: Path
    length: int
    dtype: np.dtype[Any]
    crc: int
    tokenizer: str

    def tokens(self) -> npt.NDArray[Any]:
        """The tokens, mapped from the file; shape (length,), read-only."""
        return np.memmap(
            self.path, dtype=self.dtype, mode="r", offset=_HEADER.size, shape=(self.length,)
        )

    def verify(self) -> None:
        """Reads all tokens and compares their checksum.

        Raises:
            DataError: they are not what was written.
        """
        crc = 0
        with open(self.path, "rb") as file:
            file.seek(_HEADER.size)
            while piece := file.read(1 << 20):
                crc = zlib.crc32(piece, crc)
        if crc != self.crc:
            raise DataError(
                str(self.path),
                f"the tokens are damaged (CRC {crc:08x}, not {self.crc:08x}).",
                _AGAIN,
            )


class ShardWriter:
    """Appends tokens to a shard that is being written; see `write_shard`."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any]) -> None:
        self.length = self.crc = 0
        self._file, self._dtype = file, dtype

    def write(self, ids: npt.NDArray[Any]) -> None:
        """Appends `ids`, shape (n,), which must fit the shard's type."""
        data = np.ascontiguousarray(ids, dtype=self._dtype).tobytes()
        self.crc = zlib.crc32(data, self.crc)
        self.length += len(ids)
        self._file.write(data)


@contextlib.contextmanager
def write_shard(path: Path, *, dtype: np.dtype[Any], tokenizer: str) -> Iterator[ShardWriter]:
    """A shard that takes its name when the block ends well; no trace of it stays otherwise.

    Args:
        path: its final name.
        dtype: uint16 or uint32.
        tokenizer: fingerprint of the tokenizer, twelve characters.
    """
    assert dtype == _TYPES[dtype.itemsize], "a shard holds uint16 or uint32"
    with atomic_write(path, "wb") as file:
        file.write(bytes(_HEADER.size))
        writer = ShardWriter(file, dtype)
        yield writer
        file.seek(0)
        fields = (_MAGIC, _VERSION, dtype.itemsize, writer.length, writer.crc, tokenizer.encode())
        file.write(_HEADER.pack(*fields))


def open_shard(path: Path) -> Shard:
    """Opens a shard after a look at its header and size.

    Raises:
        DataError: it is missing, cut off, or not a shard of this version.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER.size)
            size = file.seek(0, 2)
    except FileNotFoundError:
        raise DataError(str(path), "the token shard is missing.", _AGAIN) from None
    except OSError as error:
        raise DataError(
            str(path), f"the token shard cannot be read ({error.strerror}).", "Check permissions."
        ) from None
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DataError(str(path), "this is not a token shard, or its head is cut off.", _AGAIN)
    _, version, width, length, crc, tokenizer = _HEADER.unpack(header)
    if version != _VERSION or width not in _TYPES:
        raise DataError(
            str(path), f"format {version} is not one this danlu knows ({_VERSION}).", _AGAIN
        )
    expected = _HEADER.size + length * width
    if size != expected:
        raise DataError(
            str(path), f"the token shard is cut off ({size} of {expected} bytes).", _AGAIN
        )
    return Shard(
        path, length, _TYPES[width], crc, tokenizer.rstrip(b"\0").decode("ascii", "replace")
    )

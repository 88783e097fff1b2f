"""Writes a safetensors file front to back, without holding more than one piece of one tensor in memory.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_CODES = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}


def dtype_code(dtype: np.dtype[Any]) -> str:
    """The name of a dtype in the format; raises ValueError for one that is not used here."""
    if dtype not in _CODES:
        raise ValueError(f"dtype {dtype} is not one of {[str(d) for d in _CODES]}")
    return _CODES[dtype]


class SafetensorsWriter:
    """A file whose tensors are declared at the start and written in that order.

    As a context manager it writes under a temporary name; the file takes its own when the block ends without an error,
    and nothing stays behind when it ends with one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        metadata: Mapping[str, str],
    ):
        """Opens the file.

        Args:
          path: the file; replaced when it exists.
          tensors: dtype and shape of every tensor, in the order in which they will be written.
          metadata: texts for the file's header.

        Raises:
          OSError: the file cannot be written.
        """
        self._path = pathlib.Path(path)
        self._part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        self._names = list(tensors)
        self._dtypes = [dtype for dtype, _ in tensors.values()]
        self._bytes_left = [dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values()]
        self._current = 0
        prefix = _prefix(tensors, metadata)
        self._file = open(self._part, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(prefix)

    def write(self, name: str, values: NDArray[Any]) -> None:
        """Writes a tensor, or its next rows; raises ValueError when it is not what was declared."""
        while self._current < len(self._names) and not self._bytes_left[self._current]:
            self._current += 1
        expected = self._names[self._current] if self._current < len(self._names) else None
        if name != expected:
            raise ValueError(f"{self._path}: {name} was written where {expected} was expected")
        dtype, left = self._dtypes[self._current], self._bytes_left[self._current]
        if values.dtype != dtype or values.nbytes > left:
            raise ValueError(
                f"{self._path}: {name} takes {left} more bytes of {dtype}, not {values.nbytes} of {values.dtype}"
            )
        self._file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        self._bytes_left[self._current] -= values.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._file.close()
            self._part.unlink(missing_ok=True)

    def _finish(self) -> None:
        missing = [name for name, left in zip(self._names, self._bytes_left, strict=True) if left]
        if missing:
            raise ValueError(f"{self._path}: {missing} were declared but not wholly written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._part.replace(self._path)


def _prefix(tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The length field and the header, padded so that the data starts at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": dtype_code(dtype), "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

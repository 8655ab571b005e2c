"""Safetensors files read so that they can be written back byte for byte.

The library's own writer chooses an order and drops what it does not know. Here the header of a file
is kept as it is, and only the numbers behind it are written anew.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from ..errors import RecipeError
from .export import DTYPES

_METADATA = "__metadata__"


class Entry(NamedTuple):
    """A tensor of a header: its type and shape, and where its bytes lie behind the header."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def entries(header: bytes) -> dict[str, Entry]:
    """The tensors that a header (its JSON) describes, in the order of their bytes."""
    found = {}
    for name, entry in json.loads(header).items():
        if name != _METADATA:
            start, end = entry["data_offsets"]
            found[name] = Entry(np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"]), start, end)
    return dict(sorted(found.items(), key=lambda item: item[1][2:]))


def read_tensors(path: Path) -> tuple[bytes, dict[str, np.ndarray]]:
    """The header and the tensors of a file.

    Args:
      path: A safetensors file.

    Raises:
      RecipeError: The file cannot be read, is damaged, or has a type that is not known here.
    """
    try:
        with safetensors.safe_open(str(path), framework="np"):
            pass  # checks the header, and that it accounts for every byte of the file
        raw = path.read_bytes()
    except (OSError, safetensors.SafetensorError) as error:
        raise RecipeError(
            f"{path}: expected a safetensors file; got {error}; copy the file again"
        ) from error
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = raw[8 : 8 + length], memoryview(raw)[8 + length :]
    try:
        described = entries(header)
    except KeyError as error:
        raise RecipeError(
            f"{path}: expected types such as F32, F16 and BF16; got {error}; convert the file"
        ) from error
    return header, {
        name: np.frombuffer(body[entry.start : entry.end], entry.dtype).reshape(entry.shape)
        for name, entry in described.items()
    }


def write_tensors(path: Path, header: bytes, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file with the header given; every tensor has the type and shape stated there.

    Raises:
      OSError: The file cannot be written; an older one of this name stays whole.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, entry in entries(header).items():
            array = tensors[name]
            assert (array.dtype, array.shape) == (entry.dtype, entry.shape), name
            file.write(np.ascontiguousarray(array).tobytes())
    os.replace(partial, path)


def make_header(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The header of a new file, in the library's order: wide types first, then by name."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    described: dict[str, Any] = {_METADATA: dict(metadata)}
    start = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        array = tensors[name]
        end = start + array.nbytes
        described[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)

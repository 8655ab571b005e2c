"""Safetensors files read so that they can be written back byte for byte.

The library's own writer chooses an order and drops what it does not know. Here the header of a file
is kept as it is, and only the numbers behind it are written anew.
"""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from ..errors import RecipeError

# By the first letter of what safetensors calls a type; the rest is its bits.
_KINDS = {"F": "float", "I": "int", "U": "uint"}


def _dtype(name: str) -> np.dtype:
    if name == "BF16":
        return np.dtype(jnp.bfloat16)
    return np.dtype("bool" if name == "BOOL" else f"{_KINDS[name[0]]}{name[1:]}")


def read_tensors(path: Path) -> tuple[bytes, dict[str, np.ndarray]]:
    """The header and the tensors of a file."""
    try:
        raw = path.read_bytes()
        entries = safetensors.deserialize(raw)
    except (OSError, safetensors.SafetensorError) as error:
        raise RecipeError(
            f"{path}: expected a safetensors file; got {error}; copy the file again"
        ) from error
    tensors = {}
    for name, entry in sorted(entries, key=lambda entry: entry[0]):
        try:
            array = np.frombuffer(entry["data"], _dtype(entry["dtype"]))
        except (KeyError, TypeError) as error:
            raise RecipeError(
                f"{path}: expected types such as F32, F16 and BF16; got {entry['dtype']!r}; "
                "convert the file"
            ) from error
        tensors[name] = array.reshape(entry["shape"])
    return _header(raw), tensors


def write_tensors(path: Path, header: bytes, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file with the header given; every tensor has the type and shape stated there."""
    entries = {name: e for name, e in json.loads(header).items() if name != "__metadata__"}
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in sorted(entries, key=lambda name: entries[name]["data_offsets"]):
            array = tensors[name]
            assert [_dtype(entries[name]["dtype"]), *entries[name]["shape"]] == [
                array.dtype,
                *array.shape,
            ], name
            file.write(np.ascontiguousarray(array).tobytes())
    os.replace(partial, path)


def make_header(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The header that the library gives a new file."""
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return _header(safetensors.numpy.save(whole, {"format": "pt"}))


def _header(raw: bytes) -> bytes:
    (length,) = struct.unpack("<Q", raw[:8])
    return raw[8 : 8 + length]

"""The arrays of a model in one file, for whoever serves it: safetensors, FP8 included.

Names are dotted paths in the model, such as `layers.0.mlp.up.kernel`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx
from safetensors import flax as tensors

from ..errors import RecipeError

# What safetensors calls the types that NumPy has no name for.
DTYPES = {
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def _arrays(model: nnx.Module) -> dict[str, tuple[Any, Any]]:
    """Variables and their values by name, without streams of random keys."""
    state = nnx.state(model, nnx.Not(nnx.RngState))
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): (variable, variable.get_value()) for path, variable in flat}


def save_tensors(model: nnx.Module, path: Path) -> None:
    """Writes the arrays of a model to a safetensors file.

    Args:
      model: Any NNX model whose variables hold arrays.
      path: The file; its folder is made.

    Raises:
      RecipeError: A variable holds no array, or the file cannot be written.
    """
    arrays = {name: value for name, (_, value) in _arrays(model).items()}
    for name, value in arrays.items():
        if not hasattr(value, "shape"):
            raise RecipeError(
                f"{name} holds a {type(value).__name__}, and safetensors has arrays only; "
                "export what unitscale.quant.to_static made"
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors.save_file(arrays, str(path))
    except OSError as error:
        raise RecipeError(
            f"cannot write {path}: {error.strerror}; give a path that can be written"
        ) from error


def load_tensors(model: nnx.Module, path: Path) -> None:
    """Reads the arrays of a model, in place, from a file that `save_tensors` wrote.

    Args:
      model: A model of the same structure; of `nnx.eval_shape` too.
      path: The file.

    Raises:
      RecipeError: The file cannot be read, or has other names, shapes or dtypes than the model.
    """
    try:
        read = dict(safetensors.deserialize(path.read_bytes()))
    except (OSError, safetensors.SafetensorError) as error:
        raise RecipeError(f"cannot read {path}: {error}; give a file of save_tensors") from error
    wanted = _arrays(model)
    if missing := sorted(wanted.keys() ^ read.keys()):
        side = "the model" if missing[0] in read else "the file"
        raise RecipeError(f"{path}: {missing[0]} is not in {side}; give the model that was saved")
    for name, (variable, like) in wanted.items():
        entry = read[name]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        if tuple(entry["shape"]) != like.shape or dtype != like.dtype:
            raise RecipeError(
                f"{path}: {name} must be {like.dtype}{list(like.shape)}; got "
                f"{dtype}{entry['shape']}; give the model that was saved"
            )
        array = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
        variable.set_value(jnp.asarray(array))

"""FP8 weights in Hugging Face folders, in the formats that other libraries publish and read.

A weight (out, in) in FP8 has a scale per tensor, per output, or per block, and its value is
weight * scale. Folders with `quant_method` "fp8" (DeepSeek, Qwen) name the scale
`weight_scale_inv`, and those of compressed-tensors `weight_scale`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from unitscale import ScaledArray
from unitscale.quant import Block, Dynamic, quantize

from ..errors import RecipeError
from ._folder import CONFIG, FLOAT8, INDEX, QUANTIZATION, Folder, Tensor, json_bytes

Scheme = Literal["tensor", "channel", "block"]
_METHODS, _SIZE = ("fp8", "compressed-tensors"), 128
_SCALES = ("weight_scale_inv", "weight_scale")
# Scales of activations and of the KV cache: activations are quantized as `precision` says.
_IGNORED = ("input_scale", "output_scale", "kv_scale", "k_scale", "v_scale", "q_scale")


def dequantize(folder: Folder) -> Folder:
    """Return a folder with weights in the dtype of its config.json, and FP8 weights in `narrow`."""
    scheme = folder.config.get(QUANTIZATION)
    if scheme is None:
        return folder
    scheme = scheme if isinstance(scheme, dict) else {"quant_method": scheme}
    groups = (scheme.get("config_groups") or {}).values()
    weights = [group["weights"] for group in groups if group.get("weights")]
    kinds = {(x.get("type"), x.get("num_bits")) for x in weights}
    method = scheme.get("quant_method")
    if method not in _METHODS or kinds - {("float", 8)}:
        raise RecipeError(
            f"{folder.path}: {QUANTIZATION}.quant_method: expected {' or '.join(_METHODS)} in FP8; "
            f"got {method!r} {kinds or ''}; give the folder of the model before it was quantized"
        )
    blocks = [scheme.get("weight_block_size"), *(x.get("block_structure") for x in weights)]
    wanted = str(folder.config.get("dtype") or folder.config.get("torch_dtype") or "bfloat16")
    dtype = jnp.dtype(wanted.removeprefix("torch."))
    narrow: dict[str, Callable[[], ScaledArray]] = {}
    given = folder.tensors.items()
    kept = {name: array for name, array in given if name.rpartition(".")[2] not in _IGNORED}
    for name in [name for name, array in kept.items() if array.dtype in FLOAT8]:
        scales = [s for s in (name.removesuffix("weight") + part for part in _SCALES) if s in kept]
        if not name.endswith("weight") or len(scales) != 1:
            raise RecipeError(
                f"{folder.path}: expected one scale for the FP8 tensor {name}, "
                f"{' or '.join(_SCALES)}; got {len(scales)}; copy the whole folder"
            )
        weight, scale = kept[name], kept.pop(scales[0])
        narrow[name] = partial(_scaled, folder.path, name, weight, scale, blocks)
        read = lambda make=narrow[name]: np.asarray(make().value).astype(dtype)  # noqa: E731
        kept[name] = Tensor(weight.shape, dtype, read)
    config = {key: value for key, value in folder.config.items() if key != QUANTIZATION}
    return replace(_with_tensors(folder, config, kept), narrow=narrow)


def _scaled(
    path: Path, name: str, weight: Tensor, stored: Tensor, block_sizes: list[Any]
) -> ScaledArray:
    """Return an FP8 weight as a ScaledArray, with a scale per tensor, per output or per block."""
    scale = np.asarray(stored, np.float32)
    outputs, inputs = weight.shape
    per_output = scale.shape in ((outputs,), (outputs, 1))
    if scale.size == 1 or per_output:
        scale = scale.reshape((outputs, 1) if per_output else ())
        return ScaledArray(jnp.asarray(weight), jnp.asarray(scale))
    for size in block_sizes:
        if size and scale.shape == (-(-outputs // size[0]), -(-inputs // size[1])):
            blocks = min(int(size[0]), outputs), min(int(size[1]), inputs)
            return ScaledArray(jnp.asarray(weight), jnp.asarray(scale), block_shape=blocks)
    raise RecipeError(
        f"{path}: the scale of {name} {list(weight.shape)} must be one number, or one per output "
        f"or block of {QUANTIZATION}; got {list(scale.shape)}; give the {CONFIG} of these weights"
    )


def quantized(folder: Folder, names: list[str], scheme: Scheme) -> Folder:
    """Return a folder with the named weights in E4M3, with power-of-two scales."""
    block = scheme == "block"
    strategy = Block(_SIZE, dims=2) if block else Dynamic(scheme)

    def parts(weight: Any) -> tuple[jax.Array, jax.Array]:
        found = quantize(jnp.asarray(weight, jnp.float32), "float8_e4m3fn", strategy)
        scale = jnp.asarray(found.scale, jnp.float32)
        return found.data, scale.reshape(1) if scheme == "tensor" else scale

    written = dict(folder.tensors)
    for name in names:
        weight = written[name]
        # For other sizes, transformers infers smaller blocks from the number of scales.
        if block and any(n > _SIZE and n % _SIZE for n in weight.shape):
            got = f"{name} {list(weight.shape)}"
            raise RecipeError(f"--fp8 block: expected multiples of {_SIZE}; got {got}; use channel")
        shapes = jax.eval_shape(parts, jax.ShapeDtypeStruct(weight.shape, jnp.float32))
        names_of = name, f"{name.removesuffix('weight')}{_SCALES[not block]}"
        for index, (key, x) in enumerate(zip(names_of, shapes, strict=True)):
            read = lambda w=weight, i=index: np.asarray(parts(w)[i])  # noqa: E731
            written[key] = Tensor(x.shape, x.dtype, read)
    eight: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    if block:
        method: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
        method |= {"activation_scheme": "dynamic", "weight_block_size": [_SIZE, _SIZE]}
        method |= {"modules_to_not_convert": ["lm_head"]}
    else:
        of_inputs = eight | {"strategy": "token" if scheme == "channel" else "tensor"}
        group = {
            "targets": ["Linear"],
            "weights": eight | {"strategy": scheme, "dynamic": False},
            "input_activations": of_inputs | {"dynamic": True},
        }
        method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        method |= {"quantization_status": "compressed", "config_groups": {"group_0": group}}
        method |= {"ignore": ["lm_head"]}
    return _with_tensors(folder, folder.config | {QUANTIZATION: method}, written)


def _with_tensors(folder: Folder, config: dict[str, Any], tensors: dict[str, Tensor]) -> Folder:
    """Return a folder with another config and tensors: a scale is in the file of its weight."""
    home = {name: file for file, (_, names) in folder.files.items() for name in names}

    def file_of(name: str) -> str:
        return home.get(name) or home[f"{name.rpartition('.')[0]}.weight"]

    files = {
        file: (metadata, [name for name in tensors if file_of(name) == file])
        for file, (metadata, _) in folder.files.items()
    }
    texts = folder.texts | {CONFIG: json_bytes(config)}
    if INDEX in texts:
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in tensors.values())
        places = {name: file_of(name) for name in sorted(tensors)}
        texts[INDEX] = json_bytes({"metadata": {"total_size": size}, "weight_map": places})
    return replace(folder, config=config, texts=texts, files=files, tensors=tensors)

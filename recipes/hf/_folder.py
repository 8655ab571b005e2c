"""Files of a Hugging Face folder: config.json, tokenizer, chat template and safetensors."""

import importlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp  # registers bfloat16 with NumPy
import numpy as np
from safetensors import SafetensorError, numpy as safetensors, safe_open

from unitscale import ScaledArray

from ..errors import RecipeError, read_text, refused

CONFIG, GENERATION, TOKENS = "config.json", "generation_config.json", "tokenizer_config.json"
SINGLE, INDEX, TEMPLATE = "model.safetensors", "model.safetensors.index.json", "chat_template.jinja"
QUANTIZATION = "quantization_config"  # a key of config.json
# Small files of a model that `save` copies.
_TEXTS = (
    *(CONFIG, "tokenizer.json", INDEX, GENERATION, TOKENS, "special_tokens_map.json", TEMPLATE),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)
FLOATS = tuple(np.dtype(dtype) for dtype in (np.float32, np.float16, jnp.bfloat16))
FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
_DTYPES = {  # NumPy's names
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8", "F16": "f2"},
    **{"F32": "f4", "F64": "f8", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor that is read, and converted, each time it is used."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]  # returns an array, or a read-only view of a file

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.read(), dtype, order="C")


@dataclass(frozen=True)
class Folder:
    """The contents of a folder, to write it again."""

    path: Path
    config: dict[str, Any]
    texts: dict[str, bytes]  # small files
    files: dict[str, tuple[dict[str, str] | None, list[str]]]  # metadata and names of tensors
    tensors: dict[str, Tensor]
    ends: tuple[int, ...]  # token ids that end a text
    # Functions that read weights (out, in) in FP8.
    narrow: dict[str, Callable[[], ScaledArray]] = field(default_factory=dict)


def read_config(path: Path, name: str = CONFIG, what: str = "Hugging Face model") -> dict[str, Any]:
    """Read a folder's config.json, or another JSON file that it must have."""
    if not (path / name).is_file():
        got = f"one without {name}" if path.exists() else "nothing"
        raise RecipeError(
            f"{path}: expected the folder of a {what}, with {name}; got {got}; copy all its files"
        )
    return _read_json(path / name)


def read_folder(path: Path) -> Folder:
    """Read the small files of a folder; tensors are read when they are used."""
    config, shards = read_config(path), _shards(path)
    files: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name in shards or [SINGLE]:
        metadata, found = read_tensors(path / name)
        files[name] = metadata, list(found)
        tensors |= found
    texts = {name: path / name for name in _TEXTS if shards or name != INDEX}
    texts = {name: file.read_bytes() for name, file in texts.items() if file.is_file()}
    stated = config | (_read_json(path / GENERATION) if GENERATION in texts else {})
    ends = stated.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    whole = tuple(index for index in ends if isinstance(index, int))
    return Folder(path, config, texts, files, tensors, whole)


def write_folder(path: Path, folder: Folder) -> None:
    """Write the files of a folder, which needs memory for the tensors of one file."""
    with refused(f"cannot write {path}", "give a folder that can be written"):
        path.mkdir(parents=True, exist_ok=True)
        for name, (metadata, names) in folder.files.items():
            write_tensors(path / name, {name: folder.tensors[name] for name in names}, metadata)
        for name, content in folder.texts.items():
            (path / name).write_bytes(content)


def read_tensors(path: Path) -> tuple[dict[str, str] | None, dict[str, Tensor]]:
    """Read the metadata of a safetensors file, and map its tensors to memory."""
    if not path.is_file():
        raise RecipeError(
            f"{path.parent}: expected {path.name}; got no such file; copy the whole folder, or "
            "convert pickled weights with save_pretrained of transformers or peft"
        )
    try:
        with safe_open(path, "np") as checked:
            metadata, names = checked.metadata(), sorted(checked.keys())
        with path.open("rb") as file:
            raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:begin])
        dtypes = {name: np.dtype(_DTYPES[header[name]["dtype"]]) for name in names}
    except (OSError, SafetensorError, KeyError) as error:
        what = f"{path}: expected a safetensors file of types such as F32, F16 and BF16"
        raise RecipeError(f"{what}; got {error}; copy it again, or convert it") from error

    def read(name: str) -> np.ndarray:
        raw.madvise(mmap.MADV_DONTNEED)  # drop tensors read before from resident memory
        shape, start = header[name]["shape"], begin + header[name]["data_offsets"][0]
        return np.frombuffer(raw, dtypes[name], math.prod(shape), start).reshape(shape)

    shapes = {name: tuple(header[name]["shape"]) for name in names}
    return metadata, {n: Tensor(shapes[n], dtypes[n], partial(read, n)) for n in names}


def json_bytes(content: dict[str, Any]) -> bytes:
    """Format a JSON file as the libraries of Hugging Face do."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None) -> None:
    """Write a safetensors file; an old one is replaced only when the new one is complete."""
    unfinished = path.with_name(f"{path.name}.partial")
    whole = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    unfinished.touch()
    mode = unfinished.stat().st_mode  # follows the umask; save_file makes files private
    try:
        safetensors.save_file(whole, unfinished, metadata)
    except SafetensorError as error:  # a full disk, for example
        unfinished.unlink()
        raise OSError(str(error)) from error
    unfinished.chmod(mode)
    os.replace(unfinished, path)


def _shards(path: Path) -> list[str]:
    """Return the files in the index of shards; [] if weights are in a single file."""
    if (path / SINGLE).is_file() or not (path / INDEX).is_file():
        return []
    index = _read_json(path / INDEX).get("weight_map")
    files = sorted({*map(str, index.values())}) if isinstance(index, dict) else []
    missing = [name for name in files if Path(name).name != name or not (path / name).is_file()]
    if missing or not files:
        raise RecipeError(
            f"{path / INDEX}: expected weight_map with names of files in this folder; got "
            f"{missing[0] if missing else index!r}; copy the whole folder"
        )
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(file, "folder", "copy the whole folder"))
    except ValueError as error:
        raise RecipeError(f"{file}: expected JSON; got {error}; copy the file again") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{file}: expected a JSON object; got {type(content).__name__}")
    return content


def chat_prompt(folder: str, message: str) -> str:
    """Format a user's message with a folder's chat template, in Jinja's sandbox."""
    try:
        jinja: Any = importlib.import_module("jinja2")  # optional
        sandbox: Any = importlib.import_module("jinja2.sandbox")
    except ModuleNotFoundError as error:
        raise RecipeError('--chat needs jinja2: pip install "unitscale[hf]"') from error
    path = Path(folder)
    tokens = _read_json(path / TOKENS) if (path / TOKENS).is_file() else {}
    template = tokens.get("chat_template")
    if (path / TEMPLATE).is_file():
        template = read_text(path / TEMPLATE, "--chat", "copy the whole folder")
    if not isinstance(template, str):
        raise RecipeError(
            f"--chat: expected {path} to have {TEMPLATE}, or chat_template in {TOKENS}; got "
            "neither; give the folder of a chat model, or leave out --chat"
        )

    def raise_exception(text: str) -> None:  # templates call it to refuse messages
        raise jinja.TemplateError(text)

    special = {name: tokens.get(name) or "" for name in ("bos_token", "eos_token")}
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": message}],
            add_generation_prompt=True,
            raise_exception=raise_exception,
            **{n: t.get("content", "") if isinstance(t, dict) else t for n, t in special.items()},
        )
    except (jinja.TemplateError, TypeError, ValueError, KeyError) as error:
        raise RecipeError(
            f"{path}: the chat template failed: {error}; write the prompt out, without --chat"
        ) from error

"""A Hugging Face folder: config.json, the tokenizer, and safetensors in one file or in shards."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RecipeError, read_text, refused
from ._tensors import read_tensors, write_tensors

CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Small files that belong to a model and are written back as they came.
_TEXTS = (
    CONFIG,
    "tokenizer.json",
    INDEX,
    GENERATION,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Folder:
    """All that is needed to write the same folder again.

    Attributes:
      path: Where it was read.
      config: What config.json holds.
      texts: Small files by name.
      headers: Header of each safetensors file, by file name.
      tensors: Tensors of all files, by name.
    """

    path: Path
    config: dict[str, Any]
    texts: dict[str, bytes]
    headers: dict[str, bytes]
    tensors: dict[str, np.ndarray]

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text: of generation_config.json, or else of config.json."""
        stated = self.config
        if GENERATION in self.texts:
            stated = stated | _parsed(self.texts[GENERATION].decode(), self.path / GENERATION)
        ids = stated.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        return tuple(index for index in ids if isinstance(index, int))


def read_config(path: Path) -> dict[str, Any]:
    """What config.json of a folder holds."""
    if not path.is_dir():
        raise RecipeError(
            f"{path}: expected a folder of a Hugging Face model; got "
            f"{'a file' if path.exists() else 'nothing'}; name the folder that has {CONFIG}, in "
            "a config as init=FOLDER"
        )
    if not (path / CONFIG).is_file():
        raise RecipeError(
            f"{path}: expected a folder of a Hugging Face model, with {CONFIG}; got one without; "
            "name another, or copy the whole folder"
        )
    return read_json(path / CONFIG)


def read_folder(path: str | Path) -> Folder:
    """Reads a folder whole."""
    path = Path(path)
    config = read_config(path)
    headers, tensors = {}, {}
    for name, wanted in _tensor_files(path).items():
        headers[name], found = read_tensors(path / name)
        if wanted is not None and wanted != found.keys():
            odd = sorted(wanted ^ found.keys())[0]
            where = f"{name}, but not {INDEX}" if odd in found else f"{INDEX}, but not {name}"
            raise RecipeError(
                f"{path}: expected {name} to hold the tensors that {INDEX} lists; got {odd} in "
                f"{where}; copy both files again"
            )
        tensors |= found
    files = (path / name for name in _TEXTS)
    texts = {file.name: file.read_bytes() for file in files if file.is_file()}
    if SINGLE in headers:
        texts.pop(INDEX, None)  # left over from shards that are not read
    return Folder(path, config, texts, headers, tensors)


def write_folder(path: Path, folder: Folder, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the files of a folder, with other numbers for its tensors."""
    with refused(f"cannot write {path}", "give a folder that can be written"):
        path.mkdir(parents=True, exist_ok=True)
        for name, header in folder.headers.items():
            write_tensors(path / name, header, tensors)
        for name, content in folder.texts.items():
            (path / name).write_bytes(content)


def _tensor_files(path: Path) -> dict[str, set[str] | None]:
    """The safetensors files of a folder; with an index, what each holds."""
    if (path / SINGLE).is_file():
        return {SINGLE: None}
    if (path / INDEX).is_file():
        return _shards(path)
    refuse_pickles(path, SINGLE, "transformers' AutoModel.from_pretrained(...)")
    raise RecipeError(
        f"{path}: expected {SINGLE}, or shards with {INDEX}; got neither; copy the whole folder"
    )


def refuse_pickles(path: Path, wanted: str, opener: str) -> None:
    """Raises where a folder has pickles in place of a safetensors file; they are never opened."""
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise RecipeError(
            f"{path}: expected {wanted}; got the pickle file {pickles[0]}, which can run any code "
            f"and is not read; convert it where it is trusted, with {opener}.save_pretrained(...)"
        )


def _shards(path: Path) -> dict[str, set[str] | None]:
    by_name = read_json(path / INDEX).get("weight_map")
    if not isinstance(by_name, dict) or not by_name:
        raise RecipeError(
            f"{path / INDEX}: expected weight_map, from tensors to files; got {by_name!r}; copy "
            "the file again"
        )
    shards: dict[str, set[str] | None] = {}
    for file in sorted({str(file) for file in by_name.values()}):
        if Path(file).name != file or not (path / file).is_file():
            raise RecipeError(
                f"{path / INDEX}: expected the name of a file beside it; got {file!r}, which is "
                "not there; copy the whole folder"
            )
        shards[file] = {name for name, place in by_name.items() if place == file}
    return shards


def read_json(file: Path) -> dict[str, Any]:
    return _parsed(read_text(file, "folder", "copy the whole folder"), file)


def _parsed(text: str, file: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise RecipeError(f"{file}: expected JSON; got {error}; copy the file again") from error
    if not isinstance(content, dict):
        raise RecipeError(
            f"{file}: expected a JSON object; got {type(content).__name__}; copy the file again"
        )
    return content

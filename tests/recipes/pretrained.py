"""Copies of the tiny Hugging Face folders, to change or damage."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.flax
import safetensors.numpy

FIXTURES = Path(__file__).with_name("pretrained_fixtures")
BERTS = ("bert-mlm", "bert-qa", "bert-classes")
OTHERS = ("roberta-mlm", "roberta-classes", "modernbert-mlm", "modernbert-classes")
DECODERS = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
FOLDERS = ("gpt2", *BERTS, *DECODERS, *OTHERS)
SHARDS = {"bert-qa": 2, "llama2": 3}
WEIGHTS = "model.safetensors"


def copied(name: str, to: Path) -> Path:
    """Copy a fixture's folder, so that a test can change it."""
    return Path(shutil.copytree(FIXTURES / name, to / name))


def reference(folder: Path) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return inputs of a model and the logits that `transformers` computes."""
    stored = dict(np.load(folder / "reference.npz"))
    given = {name: stored[name].astype(np.int32) for name in stored if name != "logits"}
    if "attention_mask" in given:  # padding comes after segments, which RoBERTa has none of
        given.setdefault("token_type_ids", np.zeros_like(given["input_ids"]))
    names = ("input_ids", "token_type_ids", "attention_mask")
    return tuple(given[name] for name in names if name in given), stored["logits"]


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}), "utf-8")


Tensors = dict[str, np.ndarray]


def change_tensors(folder: Path, change: Callable[[Tensors], Mapping[str, Any]]) -> None:
    """Rewrite model.safetensors with changed tensors."""
    path = folder / WEIGHTS
    tensors = change(safetensors.numpy.load_file(str(path)))
    arrays = {name: jnp.asarray(array) for name, array in tensors.items()}
    safetensors.flax.save_file(arrays, str(path), {"format": "pt"})


def one_layer(folder: Path) -> Path:
    """Remove the second of two layers, to halve compile time."""
    change_config(folder, **{"n_layer" if folder.name == "gpt2" else "num_hidden_layers": 1})
    second = (".layer.1.", ".layers.1.", ".h.1.")
    change_tensors(
        folder, lambda old: {k: v for k, v in old.items() if not any(s in k for s in second)}
    )
    return folder

"""Use a trained model: write text with it, or export its arrays to a safetensors file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx
from safetensors import flax as tensors

from unitscale import to_array
from unitscale.nn import convert, to_static, unpadded

from .config import TOKENIZER_FILE, DataConfig, RunConfig
from .errors import RecipeError, refused
from .gpt.generate import Writer, writes
from .hf import load
from .run.evaluate import trained_model
from .run.state import load_trained, with_run_tokenizer
from .text import SubwordTokenizer, open_tokenizer, require_vocab


def open_run(config: RunConfig, say: Callable[[str], None]) -> Writer:
    """Open the model of a run with its tokenizer, to write text."""
    model: Any = trained_model(config, *load_trained(config, say))
    data = with_run_tokenizer(config).data
    if not writes(model) or not isinstance(data, DataConfig):
        raise RecipeError(
            f"recipe: expected a model that continues text; got one of recipe {config.recipe}; "
            "name a config of recipe gpt"
        )
    tokenizer = open_tokenizer(data)
    require_vocab(tokenizer, model.config.vocab)
    return Writer.of_run(model, tokenizer, data.sequence_length)


def open_folder(folder: str, adapter: str | None = None) -> Writer:
    """Open the decoder of a Hugging Face folder, with a LoRA adapter's folder added to it."""
    pretrained = load(folder, "lm", adapter=adapter)
    tokenizer = SubwordTokenizer.read(Path(folder) / TOKENIZER_FILE, key=folder)
    require_vocab(tokenizer, pretrained.config.vocab, folder)
    longest = pretrained.config.context
    assert longest is not None, "a folder states the longest sequence"
    ends = pretrained.source.ends
    return Writer(pretrained.model, tokenizer, longest, start=tokenizer.start, ends=ends)


def export(config: RunConfig, path: Path, say: Callable[[str], None], *, fp8: bool = False) -> str:
    """Write the arrays of a run to a new safetensors file.

    With `fp8` the kernels of a plain model's linear layers are stored in FP8, each with a scale.
    """
    if path.suffix != ".safetensors" or path.exists():
        raise RecipeError(
            "FILE: expected a new file of safetensors, such as model.safetensors; got "
            f"{path}{', which exists' if path.exists() else ''}; name another"
        )
    model = trained_model(config, *load_trained(config, say))
    if fp8:
        report = convert(model, "fp8_dynamic")
        if not report.converted:
            layer, reason = next(iter(report.skipped.items()))
            raise RecipeError(
                f"--fp8: expected linear layers that can be stored in FP8; got none of "
                f"{len(report.layers)}: {layer}, for one, as {reason}; export it without --fp8"
            )
        to_static(model)
    return f"{save_tensors(model, path):,} arrays of {config.name} are in {path}"


def save_tensors(model: nnx.Module, path: Path) -> int:
    """Write the arrays of a model by their dotted paths, such as `layers.0.mlp.up.kernel`.

    A vocabulary is written without its padding, and a shared array under each of its paths.
    """
    arrays, variables = {}, dict(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState))))
    for parts, module in nnx.iter_modules(model):
        for name, variable in vars(module).items():  # a state has shared variables only once
            if isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.RngState):
                variables.setdefault((*parts, name), variable)
    for parts, variable in variables.items():
        name, value = ".".join(map(str, parts)), unpadded(variable)
        if not hasattr(value, "shape"):
            raise RecipeError(
                f"{name} holds a {type(value).__name__}, and safetensors has arrays only; "
                "export what unitscale.nn.to_static made"
            )
        arrays[name] = to_array(value, "float32")
    with refused(f"cannot write {path}", "give a path that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()  # of a path that cannot be written the library says less
        tensors.save_file(arrays, str(path))
    return len(arrays)

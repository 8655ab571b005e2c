"""Use a trained model: evaluate it, generate text, or export its arrays."""

from pathlib import Path
from typing import Any

from flax import nnx

from unitscale import to_array
from unitscale.nn import AmaxState, unpadded

from .config import TOKENIZER_FILE, DataConfig, RunConfig
from .errors import RecipeError, Say, refused
from .gpt.generate import Writer
from .hf import load, write_tensors
from .recipe import recipe_of
from .run.folder import run_folder, writing
from .run.state import load_checkpoint, load_trained, merged, with_kept_tokenizer
from .run.step import make_evaluation, mean_loss
from .text import SubwordTokenizer, open_tokenizer, require_vocab
from .train import save_scores, shown


def evaluate(config: RunConfig, say: Say, warn: Say) -> None:
    """Report the loss over all validation data, and the scores."""
    recipe = recipe_of(config)
    graphdef, restored = load_checkpoint(config, warn)
    state, data = restored.state, recipe.load_data(with_kept_tokenizer(config, needed=True))
    if restored.facts.get("text", data.digest) != data.digest:
        say("this is not the data that the run was trained on; its loss differs")
    evaluation = make_evaluation(graphdef, config.precision)
    loss = mean_loss(evaluation, state.params, state.rest, data.validation())
    say(f"step {int(state.step)}  validation loss {shown(config, loss, data.token_size)}")
    model, folder = merged(config, graphdef, state), run_folder(config)
    with writing(folder):
        save_scores(folder, recipe.scores(config, data, model, folder), say)


def open_run(config: RunConfig, say: Say) -> Writer:
    """Open a run's model and tokenizer for generating text."""
    model: Any = merged(config, *load_trained(config, say))
    data = with_kept_tokenizer(config, needed=True).data
    if not hasattr(model, "init_cache") or not isinstance(data, DataConfig):
        what = "recipe: expected a model that continues text, of recipe gpt"
        raise RecipeError(f"{what}; got one of recipe {config.recipe}")
    tokenizer = open_tokenizer(data)
    require_vocab(tokenizer, model.config.vocab)
    return Writer.of_run(model, tokenizer, data.sequence_length)


def open_folder(folder: str, adapter: str | None = None) -> Writer:
    """Open the decoder in a Hugging Face folder, with a LoRA adapter added if one is given."""
    pretrained = load(folder, "lm", adapter=adapter)
    tokenizer = SubwordTokenizer.read(Path(folder) / TOKENIZER_FILE, key=folder)
    require_vocab(tokenizer, pretrained.config.vocab, folder)
    longest = pretrained.config.context
    assert longest is not None, "a folder states the longest sequence"
    ends = pretrained.source.ends
    return Writer(pretrained.model, tokenizer, longest, start=tokenizer.start, ends=ends)


def export(config: RunConfig, path: Path, say: Say) -> str:
    """Write the arrays of a run to a new safetensors file."""
    if path.suffix != ".safetensors" or path.exists():
        raise RecipeError(f"OUTPUT: expected a new file ending in .safetensors; got {path}")
    model = merged(config, *load_trained(config, say))
    return f"{save_tensors(model, path):,} arrays of {config.name} are in {path}"


def save_tensors(model: nnx.Module, path: Path) -> int:
    """Write a model's arrays under dotted paths, without padding of vocabularies and amax state."""
    arrays = {}
    for parts, variable in nnx.to_flat_state(nnx.state(model, nnx.Not((nnx.RngState, AmaxState)))):
        arrays[".".join(map(str, parts))] = to_array(unpadded(variable), "float32")
    with refused(f"cannot write {path}", "give a path that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, arrays, None)
    return len(arrays)

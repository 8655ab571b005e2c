"""Measures a run that was trained: its loss over all validation data, and its scores."""

from collections.abc import Callable, Iterator

from flax import nnx

from .config import RunConfig
from .run.evaluate import make_evaluation, mean_loss, save_scores, shown, shown_scores
from .run.folder import run_folder
from .run.precision import plain
from .run.recipe import recipe_of
from .run.state import load_checkpoint, with_run_tokenizer


def evaluate(config: RunConfig, say: Callable[[str], None]) -> Iterator[str]:
    """The lines that `python -m recipes evaluate` prints."""
    recipe = recipe_of(config)
    graphdef, restored = load_checkpoint(config, say)
    state, data = restored.state, recipe.load_data(with_run_tokenizer(config))
    if restored.facts.get("text", data.digest) != data.digest:
        yield "the data is not what the run was trained on: its loss there is another"
    evaluation = make_evaluation(graphdef, config.precision)
    loss = mean_loss(evaluation, state.params, state.rest, data.validation())
    yield f"step {int(state.step)}  validation loss {shown(config, loss, data.token_size)}"
    model = nnx.merge(graphdef, *plain(config.precision, (state.params, state.rest)))
    folder = run_folder(config)
    if scores := save_scores(folder, recipe.scores(config, data, model, folder)):
        yield shown_scores(scores)

"""The command line: `python -m recipes train|finetune|evaluate|generate|describe|sweep|bench`.

What a user can put right is one message on standard error and exit code 2 (or 1 where a run
failed); `--traceback` shows where it came from.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .bench import BENCHMARKS
from .charlm.config import CharlmConfig
from .configfile import load_any_config, load_config, load_run_config
from .errors import RecipeError, complain
from .finetune.config import FinetuneConfig
from .mnist.config import MnistConfig

app = typer.Typer(
    help="Train and use the models of unitscale.",
    epilog="Add --traceback to any command to see where an error comes from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelPath = Annotated[
    str, typer.Argument(metavar="CONFIG", help="a YAML file, or a Hugging Face folder of GPT-2")
]
ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="such as train.steps=100")
]
_TRACEBACK = "--traceback"


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option(help="move an earlier run of this name aside")] = False,
    convert: Annotated[
        bool, typer.Option(help="resume in the number formats of this config, whatever they were")
    ] = False,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="of several processes, the first")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="how many train this run")] = None,
    process: Annotated[int | None, typer.Option(min=0, help="which of them this is")] = None,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="ask Slurm, Open MPI, ... for these three")
    ] = False,
    heartbeat: Annotated[
        int, typer.Option(min=1, help="seconds after which a silent process counts as lost")
    ] = 100,
) -> None:
    """Train a model; all runs but those of images resume from its newest checkpoint.

    Several processes train one run where each is started with the same command and either the three
    options --coordinator, --processes and --process, the environment variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or --distributed.
    """
    settings = load_any_config(config, overrides or ())
    # Imported after the config is known to be right: this imports JAX.
    from .processes import Processes, joined, require_one

    with joined(Processes(coordinator, processes, process, distributed, heartbeat)):
        if isinstance(settings, MnistConfig):
            from .mnist.train import train as train_classifier

            require_one(settings.recipe)
            outcome = train_classifier(settings, fresh=fresh, console=Console())
        elif isinstance(settings, CharlmConfig):
            from .charlm.train import train as train_characters

            require_one(settings.recipe)
            outcome = train_characters(settings, fresh=fresh, console=Console())
        else:
            from .train import train as train_run

            outcome = train_run(settings, fresh=fresh, convert=convert, console=Console())
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


@app.command()
def finetune(
    config: ConfigPath,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option(help="move an earlier run of this name aside")] = False,
) -> None:
    """Fine-tune a pretrained BERT on a task, and score it."""
    settings = load_any_config(config, overrides or ())
    if not isinstance(settings, FinetuneConfig):
        raise RecipeError(
            f"{config}: expected a config of recipe finetune; got recipe {settings.recipe}; name "
            "one such as configs/bert/squad.yaml"
        )
    train(config, overrides, fresh)


@app.command()
def sweep(
    words: Annotated[
        list[str], typer.Argument(metavar="CONFIG... [KEY=VALUE]...", help="YAML files, overrides")
    ],
    jobs: Annotated[int, typer.Option(min=1, help="points trained at the same time")] = 1,
    fresh: Annotated[bool, typer.Option(help="move earlier sweeps of these names aside")] = False,
) -> None:
    """Train every point of a grid at its best learning rate; the same command continues."""
    overrides = [word for word in words if "=" in word]
    paths = [word for word in words if "=" not in word]
    if not paths:
        raise RecipeError(
            "sweep: expected a config file; got none; name one such as configs/charlm/small.yaml"
        )
    configs = [(path, load_any_config(path, overrides)) for path in paths]
    from .charlm.sweep import sweep as run_sweep

    for path, config in configs:
        if not isinstance(config, CharlmConfig):
            raise RecipeError(
                f"{path}: expected a config of recipe charlm; got recipe {config.recipe}, which "
                "has no sweep; use train"
            )
        run_sweep(config, jobs=jobs, fresh=fresh, console=Console())


@app.command()
def evaluate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the loss of a trained model over all validation data, and the scores of a task."""
    settings = load_run_config(config, overrides or ())
    from .evaluate import make_evaluation, mean_loss, shown
    from .state import load_trained, with_run_tokenizer
    from .task import load_data

    graphdef, state = load_trained(settings, _warn)
    data: Any = load_data(with_run_tokenizer(settings))
    evaluation = make_evaluation(graphdef, settings.scalify)
    loss = mean_loss(evaluation, state.params, state.rest, list(data.validation()))
    typer.echo(f"step {int(state.step)}  validation loss {shown(settings, loss)}")
    if isinstance(settings, FinetuneConfig):
        from .finetune.task import score

        for line in score(settings, data, graphdef, state):
            typer.echo(line)


@app.command()
def generate(
    config: ModelPath,
    overrides: Overrides = None,
    prompt: Annotated[str, typer.Option(help="text to continue")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="tokens to add")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="draw from the k likeliest")] = None,
    seed: Annotated[int, typer.Option(min=0, help="decides the draws")] = 0,
) -> None:
    """Continue a prompt with a trained model, or with the GPT-2 of a Hugging Face folder."""
    if Path(config).is_dir():
        if overrides:
            raise RecipeError(
                f"override {overrides[0]!r}: expected none, as {config} is a folder; remove it"
            )
        from .data import TOKENIZER_FILE, SubwordTokenizer, require_vocab
        from .pretrained import load

        pretrained = load(config, "lm")
        model, longest = pretrained.model, pretrained.config.context or 0
        tokenizer = SubwordTokenizer.read(Path(config) / TOKENIZER_FILE, key=config)
        require_vocab(tokenizer, pretrained.config.vocab, config)
        context = min(longest, tokenizer.encode(prompt).size + tokens)  # no more than is asked for
    else:
        settings = load_config(config, overrides or ())
        from flax import nnx

        from .gpt.task import load_tokenizer
        from .scaling import plain
        from .state import load_trained, with_run_tokenizer

        graphdef, state = load_trained(settings, _warn)
        model = nnx.merge(graphdef, *plain(settings.scalify, (state.params, state.rest)))
        tokenizer = load_tokenizer(with_run_tokenizer(settings))
        context = settings.data.sequence_length
    from .generate import sample_text

    text = sample_text(
        model,
        tokenizer,
        prompt,
        tokens=tokens,
        seed=seed,
        context=context,
        temperature=temperature,
        top_k=top_k,
    )
    typer.echo(text)


@app.command()
def describe(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print parameters, FLOPs and bytes of a training run; nothing is trained or allocated."""
    settings = load_run_config(config, overrides or ())
    from .describe import report

    for line in report(settings):
        typer.echo(line)


bench = typer.Typer(help="Print the figures in README.md.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _register(name: str, summary: str) -> None:
    context = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @bench.command(name, help=summary, context_settings=context)
    def run(context: typer.Context) -> None:
        module = importlib.import_module(f"recipes.bench.{name}")
        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command.command(help=summary)(module.main)
        command(context.args, prog_name=f"python -m recipes bench {name}")


for _name, _summary in BENCHMARKS.items():
    _register(_name, _summary)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
      arguments: What follows `python -m recipes`; by default that of this process.

    Returns:
      The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    wants_traceback = _TRACEBACK in words
    words = [word for word in words if word != _TRACEBACK]
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it writes
    try:
        app(words, prog_name="python -m recipes")  # a wrong word is reported there, exit code 2
    except RecipeError as error:
        if wants_traceback:
            raise
        complain(str(error))
        return error.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _warn(message: str) -> None:
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)

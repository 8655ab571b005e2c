"""The command line. A user's mistake prints one message and exits with code 2 or 1."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from .bench import BENCHMARKS, ELSEWHERE
from .config import RunConfig
from .errors import RecipeError, complain, told_by
from .registry import load_config
from .run.folder import CONFIG, downloaded, is_run, run_folder, saved_steps
from .run.pool import start_process

app = typer.Typer(
    help="Train unitscale models and use them.",
    epilog="Add --traceback to any command to see where an error comes from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file")]
ModelPath = Annotated[
    str, typer.Argument(metavar="CONFIG", help="a YAML file, a run's folder, or one with a model")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="such as train.steps=100")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="start anew; rename the old run's folder")]
Convert = Annotated[bool, typer.Option("--convert", help="resume in the config's number formats")]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    fresh: Fresh = False,
    convert: Convert = False,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="address of the first process")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="number of processes")] = None,
    process: Annotated[int | None, typer.Option(min=0, help="index of this process")] = None,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="read these three from Slurm, Open MPI, ...")
    ] = False,
    heartbeat: Annotated[
        int, typer.Option(min=1, help="seconds of silence after which a process counts as lost")
    ] = 100,
) -> None:
    """Train a model, or resume the same run from its newest checkpoint.

    To train one run with several processes, start each with the same command and either the options
    --coordinator, --processes and --process, or the environment variables JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID, or --distributed.
    """
    options: Any = {"detect": distributed, "heartbeat": heartbeat}
    options |= {"coordinator": coordinator, "processes": processes, "process": process}
    _train(load_config(config, overrides or ()), fresh, convert, **options)


@app.command()
def finetune(
    config: ConfigPath, overrides: Overrides = None, fresh: Fresh = False, convert: Convert = False
) -> None:
    """Fine-tune a pretrained model (init) on a task, and score it. Otherwise as train."""
    settings = load_config(config, overrides or ())
    if not getattr(settings, "init", None):
        raise RecipeError(f"init: expected a model to tune; got none in {config}; set init=FOLDER")
    _train(settings, fresh, convert)


def _train(settings: RunConfig, fresh: bool, convert: bool, **processes: Any) -> None:
    try:
        # Imported late, because it imports JAX: a wrong config is reported without that delay.
        from .run.processes import joined
        from .train import train as train_run

        with joined(**processes):
            outcome = train_run(settings, fresh=fresh, convert=convert, console=Console())
    except KeyboardInterrupt:  # outside of the training loop, which handles signals itself
        *_, step = 0, *saved_steps(run_folder(settings))
        kept = f"the checkpoint of step {step} is kept" if step else "nothing was trained yet"
        _warn(f"stopped: {kept}; run the same command to resume")
        raise typer.Exit(130) from None
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


@app.command()
def sweep(
    words: Annotated[
        list[str], typer.Argument(metavar="CONFIG|KEY=VALUE", help="YAML files and overrides")
    ],
    jobs: Annotated[int, typer.Option(min=1, help="grid points trained at the same time")] = 1,
    fresh: Fresh = False,
) -> None:
    """Find the best learning rate at every point of a grid; run it again to continue."""
    overrides = [word for word in words if "=" in word]
    configs = [load_config(word, overrides) for word in words if "=" not in word]
    if not configs:
        raise RecipeError("sweep: expected a config file, such as configs/gpt/transfer.yaml")
    from .sweep.search import sweep as run_sweep

    failed: RecipeError | None = None
    for config in configs:
        try:
            run_sweep(config, jobs=jobs, fresh=fresh, console=Console())
        except RecipeError as error:
            if error.exit_code != 1:
                raise
            failed = error  # some points failed; the other sweeps continue
    if failed:
        raise failed


@app.command()
def evaluate(config: ModelPath, overrides: Overrides = None) -> None:
    """Print a trained model's scores, and its loss over all validation batches."""
    settings = _settings(config, overrides)
    from .trained import evaluate as evaluate_run

    evaluate_run(settings, typer.echo, _warn)


@app.command()
def generate(
    config: ModelPath,
    overrides: Overrides = None,
    prompt: Annotated[str, typer.Option(help="text to continue", show_default="newline")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="tokens to add")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 picks the likeliest token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="only the k likeliest tokens")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="seed of the sampling")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="format the prompt with the folder's chat template")
    ] = False,
    adapter: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="a LoRA adapter to add to a folder's model")
    ] = None,
) -> None:
    """Continue a prompt with a trained model, or with a decoder in a Hugging Face folder."""
    config = downloaded(config)
    if not Path(config).is_dir() or is_run(config):
        if chat or adapter is not None:
            raise RecipeError(f"--chat, --adapter: expected a Hugging Face folder; got {config}")
        settings = _settings(config, overrides)
        from .trained import open_run

        writer = open_run(settings, _warn)
    else:
        if overrides:
            raise RecipeError(f"override {overrides[0]!r}: expected none, as {config} is a folder")
        from .hf import chat_prompt
        from .trained import open_folder

        prompt = chat_prompt(config, prompt) if chat else prompt
        writer = open_folder(config, adapter)
    draws = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    for piece in writer.stream(prompt, echo=not chat, **draws):
        sys.stdout.write(piece)
        sys.stdout.flush()
    typer.echo()


@app.command()
def describe(config: ModelPath, overrides: Overrides = None) -> None:
    """Print parameters, FLOPs and bytes of a training step, without running it."""
    settings = _settings(config, overrides)
    from .describe import report

    for line in report(settings):
        typer.echo(line)


@app.command()
def export(
    config: ModelPath,
    path: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="a .safetensors file to write, or a folder")
    ],
    overrides: Overrides = None,
    fp8: Annotated[
        Literal["tensor", "channel", "block"] | None,
        typer.Option(help="write a decoder in FP8, with a scale per tensor, channel or block"),
    ] = None,
) -> None:
    """Write the arrays of a trained model to a safetensors file.

    With --fp8, CONFIG is a Hugging Face folder, such as runs/NAME/pretrained. Its linear layers are
    written to a new folder in FP8, in formats that vLLM and transformers read.
    """
    if fp8 is None:
        settings = _settings(config, overrides)
        from .trained import export as export_run

        typer.echo(export_run(settings, path, _warn))
        return
    if overrides:
        raise RecipeError(f"override {overrides[0]!r}: expected none with --fp8; remove it")
    _save(path, config, fp8=fp8)


def _save(path: Path, folder: str, adapter: str | None = None, fp8: Any = None) -> None:
    from .hf import load, save

    if path.exists():
        raise RecipeError(f"OUTPUT: expected a new folder; got {path}, which exists; name another")
    save(load(downloaded(folder), "lm", adapter=adapter), path, fp8=fp8)
    typer.echo(f"the model is in {path}")


@app.command()
def merge(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="a Hugging Face decoder")],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="a LoRA adapter's folder")],
    path: Annotated[Path, typer.Argument(metavar="OUTPUT", help="the folder to write")],
) -> None:
    """Add a LoRA adapter to a Hugging Face model, and write the result to a new folder."""
    _save(path, folder, adapter)


bench = typer.Typer(help="Reproduce the figures of the documentation.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _register(name: str, summary: str) -> None:
    context = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @bench.command(name, help=summary, context_settings=context)
    def run(context: typer.Context) -> None:
        module, function, *options = ELSEWHERE.get(name, (name, "main"))
        main = getattr(importlib.import_module(f"recipes.bench.{module}"), function)
        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command.command(help=summary)(main)
        command([*options, *context.args], prog_name=f"python -m recipes bench {name}")


for _name, _summary in BENCHMARKS.items():
    _register(_name, _summary)


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    others = [word for word in words if word != "--traceback"]
    start_process()
    try:
        app(others, prog_name="python -m recipes")  # reports unknown options itself, exit code 2
    except Exception as error:
        told = told_by(error)
        if len(others) < len(words) or told is None:
            raise
        complain(str(told))
        return told.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _settings(path: str, overrides: list[str] | None) -> RunConfig:
    """Load a YAML file, or the config stored in a run's folder."""
    if not is_run(path):
        return load_config(path, overrides or ())
    return load_config(Path(path) / CONFIG, overrides or (), kept=True).kept_in(Path(path))


def _warn(message: str) -> None:
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)

"""The arrays of a trained model in one file, for whoever serves it: safetensors, FP8 included."""

from collections.abc import Callable
from pathlib import Path

from flax import nnx
from safetensors import flax as tensors

from unitscale import to_array
from unitscale.nn import convert, to_static, unpadded

from .config import RunConfig
from .errors import RecipeError, refused
from .run.precision import plain
from .run.state import load_trained


def export(config: RunConfig, path: Path, say: Callable[[str], None], *, fp8: bool = False) -> str:
    """Writes the parameters of a run to a safetensors file.

    Args:
      config: Names the run.
      path: A new file; its folder is made.
      say: Called with a line for each damaged checkpoint that was passed over.
      fp8: Stores the kernels of a plain model's linear layers in FP8, each with a scale.
    Raises:
      RecipeError: No such run, one without a checkpoint, one whose layers have no FP8 kernels, or
        the file exists, has another suffix or cannot be written.
    """
    if path.suffix != ".safetensors" or path.exists():
        raise RecipeError(
            "FILE: expected a new file of safetensors, such as model.safetensors; got "
            f"{path}{', which exists' if path.exists() else ''}; name another"
        )
    graphdef, state = load_trained(config, say)
    model = nnx.merge(graphdef, *plain(config.precision, (state.params, state.rest)))
    if fp8:
        _store_in_fp8(model)
    size = save_tensors(model, path)
    return f"{size:,} arrays of {config.name} are in {path}"


def _store_in_fp8(model: nnx.Module) -> None:
    try:
        report = convert(model, "fp8_dynamic")
    except ValueError as error:
        raise RecipeError(
            "--fp8: expected a model with linear layers of flax.nnx, as model.library plain has; "
            "got one without; export it without --fp8"
        ) from error
    if not report.converted:
        path, reason = next(iter(report.skipped.items()))
        raise RecipeError(
            f"--fp8: expected linear layers that can be stored in FP8; got none of "
            f"{len(report.layers)}: {path}, for one, as {reason}; export it without --fp8"
        )
    to_static(model)


def save_tensors(model: nnx.Module, path: Path) -> int:
    """Writes the arrays of a model by their dotted paths, such as `layers.0.mlp.up.kernel`.

    A vocabulary is written without its padding.
    """
    arrays, variables = {}, dict(nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState))))
    for parts, module in nnx.iter_modules(model):
        for name, variable in vars(module).items():  # a state has once what several modules share
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

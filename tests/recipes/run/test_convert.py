"""A run goes on in other number formats, and back, and on other devices."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes import train as train_module
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.run.checkpoint import Checkpoints
from recipes.run.convert import convert, reshaped
from recipes.run.formats import between, formats, is_reshaped, with_formats
from recipes.run.loss_scale import LossScale
from recipes.run.state import init_state, load_trained, restore
from unitscale import to_array
from unitscale.core import format_of
from unitscale.nn import AmaxState

from ..runs import loss_of, run, untrained

MakeConfig = Callable[..., GPTConfig]
OURS = ("model.library=unitscale", "optimizer.umup=true", "model.dropout=0.0")
FORMATS = {
    "float32": (),
    "fp8": ("precision.policy=fp8",),
    "fp8_delayed": ("precision.policy=fp8_delayed",),
    "fp8_readout": ("precision.policy=fp8_delayed", "precision.readout=true"),
    "fp8_readout_gradients": ("precision.policy=fp8", "precision.readout=gradients"),
    "policies": ("precision.policy=fp8", "precision.layers={'*.down': float32}"),
    "6 bytes": ("precision.weights=float16", "precision.moments=[float8_e4m3fn, float16]"),
    "small in float32": (
        "precision.weights=float16",
        "precision.moments=[float8_e4m3fn, float16]",
        "precision.min_size=100",
    ),
    "stochastic": ("precision.weights=float16", "precision.rounding=stochastic"),
    "padded": ("model.vocab_multiple=100",),
    "skips": ("optimizer.skip_nonfinite=3",),
    "exchange": ("mesh={data: 2, gradients: float8_e4m3fn}",),
}


def values(tree: Any) -> Any:
    return to_array(tree, jnp.float32)


@pytest.mark.parametrize("target", [name for name in FORMATS if name != "padded"])
@pytest.mark.parametrize("source", ["float32", "6 bytes"])
def test_values_are_carried_over(make_config: MakeConfig, source: str, target: str) -> None:
    old, new = (make_config(*OURS, *FORMATS[name]) for name in (source, target))
    _, _, first = init_state(old.model_copy(update={"seed": 5}))
    saved = first._replace(step=first.step + 7)
    _, optimizer, like = init_state(new)
    state = convert(saved, old, new, optimizer, like)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert int(state.step) == 7
    narrow = old.optimizer.weights or new.optimizer.weights
    half = format_of("float16").eps / 2 if narrow else 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=half, atol=half * 2**-3),
        values(state.params),
        values(saved.params),
    )
    gone, there = (nnx.to_flat_state(nnx.filter_state(s.rest, AmaxState)) for s in (saved, state))
    # A table has one for its use as a readout, tied or not.
    products = {"fp8_delayed": 6, "fp8_readout": 8}
    assert (len(gone), len(there)) == (0, products.get(target, 0))


@pytest.mark.parametrize("name", ["float32", "6 bytes"])
def test_a_vocabulary_is_padded_and_back(make_config: MakeConfig, name: str) -> None:
    """Parameters and moments; what is added is zero."""
    old, new = (make_config(*OURS, *FORMATS[name], *more) for more in ((), FORMATS["padded"]))
    assert is_reshaped(old, new)
    assert not is_reshaped(old, old)
    before, after = between(old, new)
    saved, like = init_state(before)[2], init_state(after)[2]
    padded = reshaped(saved, like)
    assert jax.tree.map(jnp.shape, padded) == jax.tree.map(jnp.shape, like)
    table = np.asarray(padded.params["embed"]["embedding"].get_value())
    assert table.shape[0] % 100 == 0 < table[old.model.vocab :].size
    np.testing.assert_array_equal(table[old.model.vocab :], 0)
    back = reshaped(padded, saved)
    jax.tree.map(np.testing.assert_array_equal, values(back.params), values(saved.params))


@pytest.mark.parametrize("name", ["stochastic", "exchange"])
@pytest.mark.parametrize("shape", ["model.scan=true", "model.vocab_multiple=100"])
def test_a_checkpoint_is_read_in_another_shape(
    make_config: MakeConfig, tmp_path: Path, name: str, shape: str
) -> None:
    """Of formats with a part that plain arrays have not: a key, or a factor per parameter."""
    old, new = (make_config(*OURS, *FORMATS[name], *more) for more in ((), (shape,)))
    untrained(old, tmp_path)
    like = init_state(new)[2]
    restored = restore(new, Checkpoints(tmp_path, read_only=True), like, None, print)
    assert restored is not None
    found, wanted = (jax.tree.flatten(state) for state in (restored.state, like))
    assert found[1] == wanted[1]
    assert list(map(jnp.shape, found[0])) == list(map(jnp.shape, wanted[0]))
    assert int(restored.state.step) == restored.step
    # Nothing was trained: what the seed drew, layers in a stack and a vocabulary with zeros.
    before, after = between(old, new)
    drawn = reshaped(init_state(before)[2], init_state(after)[2]).params
    half = format_of("float16").eps / 2 if name == "stochastic" else 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=half, atol=half * 2**-3),
        values(restored.state.params),
        values(drawn),
    )


STRATEGIES = {name: (f"precision.policy={name}", "monitor={}") for name in ("fp8", "fp8_delayed")}


@pytest.mark.parametrize("source", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("target", STRATEGIES.values(), ids=STRATEGIES)
def test_scales_are_carried_within_a_strategy(
    make_config: MakeConfig, source: tuple[str, ...], target: tuple[str, ...]
) -> None:
    """Those of another are not: they would be frozen, or of a history of another length."""
    old, new = (make_config(*OURS, *words) for words in (source, target))
    saved, (_, optimizer, like) = init_state(old)[2], init_state(new)
    amax, rest = nnx.split_state(saved.rest, AmaxState, ...)
    moved = nnx.merge_state(jax.tree.map(lambda leaf: leaf + 1, amax), rest)
    state = convert(saved._replace(rest=moved), old, new, optimizer, like)
    expected = moved if source == target else like.rest
    found, wanted = (nnx.filter_state(rest, AmaxState) for rest in (state.rest, expected))
    assert nnx.to_flat_state(found)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_dynamic_loss_scale_is_carried_over(make_config: MakeConfig) -> None:
    words = (*OURS, "precision.loss_scale=dynamic")
    old, new = make_config(*words), make_config(*words, *FORMATS["fp8"])
    saved, (_, optimizer, like) = init_state(old)[2], init_state(new)
    settled = LossScale(jnp.float32(8), jnp.int32(5))
    state = convert(saved._replace(loss_scale=settled), old, new, optimizer, like)
    assert state.loss_scale == settled


def test_the_config_of_the_saved_state_comes_back(make_config: MakeConfig) -> None:
    for name, words in FORMATS.items():
        config = make_config(*OURS, *words)
        again = with_formats(make_config(*OURS), formats(config))
        assert formats(again) == formats(config), name
        plain = formats(make_config(*OURS))
        assert formats(with_formats(config, plain)) == plain, name


def test_scalify_and_plain(make_config: MakeConfig) -> None:
    old = make_config("scalify={storage: float16}")
    new = make_config()
    _, _, saved = init_state(old)
    _, optimizer, like = init_state(new)
    state = convert(saved, old, new, optimizer, like)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-11, atol=2**-11),
        state.params,
        values(saved.params),
    )
    _, optimizer, back_like = init_state(old)
    back = convert(state, new, old, optimizer, back_like)
    jax.tree.map(np.testing.assert_array_equal, values(back.params), values(saved.params))


# The words of a run, and how far its loss may move: 8-bit moments are rounded once more on the
# way, dropout draws other masks.
SCANS = {
    "float32": (FORMATS["float32"], 1e-4),
    "fp8_delayed": (FORMATS["fp8_delayed"], 1e-2),
    "fp8": (FORMATS["fp8"], 1e-2),
    "6 bytes": (FORMATS["6 bytes"], 1e-2),
    "dropout": (("model.dropout=0.1",), 0.1),
}
PADDED = ("float32", "6 bytes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "model.scan=true") for name in SCANS),
        *((name, "model.vocab_multiple=100") for name in PADDED),
    ],
)
def test_a_run_goes_on_in_another_shape_and_back(
    make_config: MakeConfig, name: str, shape: str
) -> None:
    """Half of the steps as a scan over layers, or padded; it ends where the run without does."""
    words_of_run, rel = SCANS[name]

    def go_on(*words: str, convert: bool = False) -> float:
        return loss_of(make_config(*OURS, *words_of_run, *words), convert=convert)

    expected = go_on()
    folder = train_module.open_run(make_config(*OURS, *words_of_run)) / "checkpoints"
    shutil.rmtree(folder / "6")
    assert go_on(shape, convert=True) == pytest.approx(expected, rel=rel)
    assert (folder / "6").exists()
    shutil.rmtree(folder / "6")
    assert go_on("train.steps=6", convert=True) == pytest.approx(expected, rel=rel)


@pytest.mark.slow
def test_a_float32_run_goes_on_in_fp8_and_back(make_config: MakeConfig) -> None:
    def go_on(*words: str, convert: bool = False) -> tuple[float, str]:
        outcome, said = run(make_config(*OURS, *words), convert=convert)
        assert outcome.validation_loss is not None
        return outcome.validation_loss, said

    few = ("precision.policy=fp8", *FORMATS["6 bytes"])
    expected, _ = go_on()
    folder = train_module.open_run(make_config(*OURS)) / "checkpoints"
    whole = folder.with_name("whole")
    shutil.move(folder / "6", whole)
    with pytest.raises(RecipeError, match=r"(?s)policy: float32 -> fp8.*or --convert to go on in"):
        go_on(*few)
    loss, said = go_on(*few, convert=True)
    assert "the checkpoint of step 3 has other formats than the run; converting it" in said
    assert "resuming after step 3 of 6" in said
    assert loss != expected
    assert loss == pytest.approx(expected, rel=0.01)
    _, state = load_trained(make_config(*OURS, *few), print)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float16", "float32"}
    # Back: from the float32 checkpoint of step 3 under the config in FP8, and from FP8 itself.
    assert go_on(convert=True)[0] == pytest.approx(loss, rel=0.01)
    shutil.rmtree(folder / "6")
    assert go_on()[0] == expected
    with pytest.raises(RecipeError, match=r"seed: 0 -> 1\nchange name .* aside$"):
        go_on("seed=1", convert=True)

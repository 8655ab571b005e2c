"""Resuming a run in other number formats, back again, and on other devices."""

import itertools
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes import train as train_module
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.run.state import LossScale, convert, formats, init_state, load_trained, with_formats
from unitscale import to_array
from unitscale.core import format_of
from unitscale.nn import AmaxState

from ..runs import run

MakeConfig = Callable[..., GPTConfig]
OURS = ("model.library=unitscale", "optimizer.umup=true", "model.dropout=0.0")
FORMATS = {
    "float32": (),
    "fp8": ("precision.policy=fp8",),
    "fp8_delayed": ("precision.policy=fp8_delayed",),
    "fp8_readout": ("precision.policy=fp8_delayed", "precision.readout=true"),
    "policies": ("precision.policy=fp8", "precision.layers={'*.down': float32}"),
    "6 bytes": ("precision.weights=float16", "precision.moments=[float8_e4m3fn, float16]"),
    "small in float32": (
        "precision.weights=float16",
        "precision.moments=[float8_e4m3fn, float16]",
        "precision.min_size=100",
    ),
    "stochastic": ("precision.weights=float16", "precision.rounding=stochastic"),
    "skips": ("optimizer.skip_nonfinite=3",),
    "exchange": ("mesh.data=2", "precision.exchange=float8_e4m3fn"),
}


def values(tree: Any) -> Any:
    return to_array(tree, jnp.float32)


CASES = [
    ("6 bytes", "float32"),
    ("float32", "fp8_delayed"),
    ("float32", "small in float32"),
    *(
        pytest.param(source, target, marks=pytest.mark.slow)
        for source in ("float32", "6 bytes")
        for target in ("policies", "fp8_readout", "stochastic", "skips", "exchange")
    ),
]


@pytest.mark.parametrize(("source", "target"), CASES)
def test_values_are_carried_over(make_config: MakeConfig, source: str, target: str) -> None:
    old, new = (make_config(*OURS, *FORMATS[name]) for name in (source, target))
    _, _, first = init_state(old.model_copy(update={"seed": 5}))
    saved = first._replace(step=first.step + 7)
    _, optimizer, like = init_state(new)
    state = convert(saved, old, new, optimizer, like)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert int(state.step) == 7
    narrow = old.precision.weights or new.precision.weights
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


def test_scales_are_carried_within_a_strategy(make_config: MakeConfig) -> None:
    """Scales of another strategy are not copied: they might never move, or have another history."""
    made = []
    for policy in ("fp8", "fp8_delayed"):
        config = make_config(*OURS, f"precision.policy={policy}", "precision.monitor=0.1")
        _, optimizer, like = init_state(config)
        amax, rest = nnx.split_state(like.rest, AmaxState, ...)
        moved = nnx.merge_state(jax.tree.map(lambda leaf: leaf + 1, amax), rest)
        made.append((config, optimizer, like, like._replace(rest=moved)))
    for (old, *_, saved), (new, optimizer, like, _) in itertools.product(made, made):
        state = convert(saved, old, new, optimizer, like)
        expected = saved.rest if old is new else like.rest
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
        again = with_formats(make_config(*OURS), {"formats": formats(config)})
        assert formats(again) == formats(config), name
        plain = formats(make_config(*OURS))
        assert formats(with_formats(config, {"formats": plain})) == plain, name


def test_scalify_and_plain(make_config: MakeConfig) -> None:
    old = make_config("precision=scalify_float16")
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
    with pytest.raises(
        RecipeError, match=r"(?s)precision.policy: float32 -> fp8.*or --convert to resume in"
    ):
        go_on(*few)
    loss, said = go_on(*few, convert=True)
    assert "converting the checkpoint of step 3 to this config's formats" in said
    assert "resuming after step 3 of 6" in said
    assert loss != expected
    assert loss == pytest.approx(expected, rel=0.01)
    _, state = load_trained(make_config(*OURS, *few), print)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float16", "float32"}
    # Back: from the float32 checkpoint of step 3 under the config in FP8, and from FP8 itself.
    assert go_on(convert=True)[0] == pytest.approx(loss, rel=0.01)
    shutil.rmtree(folder / "6")
    assert go_on()[0] == expected
    with pytest.raises(RecipeError, match=r"seed: 0 -> 1\nchange name, .* aside$"):
        go_on("seed=1", convert=True)

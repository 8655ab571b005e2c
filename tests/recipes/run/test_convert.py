"""Resuming in other number formats, and starting from the weights of an earlier run."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.bert.task import build as build_bert, load_data as load_bert_data
from recipes.config import TOKENIZER_FILE, RunConfig
from recipes.errors import RecipeError
from recipes.gpt.task import build, load_data
from recipes.run.folder import open_run
from recipes.run.state import LossScale, convert, formats, init_state, load_trained, with_formats
from unitscale import to_array
from unitscale.core import format_of
from unitscale.nn import AmaxState

from ..conftest import MakeConfig
from ..runs import loss_of, run, untrained
from ..support import bert_config, write_bert

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
    pytest.param("float32", "small in float32", marks=pytest.mark.slow),
    *(pytest.param("6 bytes", x, marks=pytest.mark.slow) for x in ("fp8_readout", "exchange")),
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
    folder = open_run(make_config(*OURS)) / "checkpoints"
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


def weights(model: nnx.Module) -> dict[tuple[Any, ...], np.ndarray]:
    return by_path(nnx.state(model, nnx.Param))


def by_path(state: Any) -> dict[tuple[Any, ...], np.ndarray]:
    return {path: np.asarray(to_array(leaf.get_value())) for path, leaf in nnx.to_flat_state(state)}


def kept(config: RunConfig) -> tuple[str, dict[tuple[Any, ...], np.ndarray]]:
    """Save an untrained run; return its folder and weights."""
    run = open_run(config)
    state = untrained(config, run)
    return str(run), by_path(state.params)


RUNS = {
    "scalify": ("precision=scalify_float16",),
    "plain": (),
    "scanned": (*OURS, "model.scan=true"),
    "6 bytes": (*OURS, "precision.weights=float16", "precision.min_size=0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_weights_are_those_of_the_run(make_config: MakeConfig, words: tuple[str, ...]) -> None:
    folder, expected = kept(make_config(*words))
    found = weights(build(make_config(*words, f"init={folder}", "name=next", "seed=7")))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=str(path))


@pytest.mark.slow
def test_it_begins_where_the_run_ended_and_goes_on_without_it(make_config: MakeConfig) -> None:
    first = make_config(*OURS, "optimizer.learning_rate=1.0")
    ended = loss_of(first)
    words = ("name=next", f"init={Path(first.train.runs_dir) / first.name}")
    slow = make_config(*OURS, *words, "optimizer.learning_rate=1e-6")
    assert loss_of(slow) == pytest.approx(ended, abs=1e-4)
    (Path(first.train.runs_dir) / first.name).rename(Path(first.train.runs_dir) / "moved")
    _, state = load_trained(slow, pytest.fail)  # its own checkpoint has all of it
    assert int(state.step) == slow.train.steps
    with pytest.raises(RecipeError, match="init: expected the folder of a run of recipe gpt, or a"):
        make_config(*OURS, *words)


@pytest.mark.slow
def test_the_shape_need_not_be_said_again_and_formats_may_be_others(
    make_config: MakeConfig,
) -> None:
    shape = ("model.layers=2", "model.positions=learned", "model.context=32")
    folder, expected = kept(make_config(*OURS, *shape))
    words = (f"init={folder}", "name=next", "model={}", "optimizer.umup=true")
    config = make_config(*words, "precision.policy=fp8_delayed")
    assert (config.model.width, config.model.layers, config.model.context) == (16, 2, 32)
    assert (config.model.library, config.model.dropout) == ("unitscale", 0.0)
    assert make_config(*words, "model.dropout=0.2").model.dropout == 0.2
    found = weights(build(config))
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value.astype(found[path].dtype))


def test_the_tokenizer_is_the_run_s(make_config: MakeConfig, tmp_path: Path) -> None:
    trained = "data.tokenizer={kind: bpe, vocab: 300}"
    first = make_config(*OURS, "model.vocab=null", trained)
    data = load_data(first)
    folder, _ = kept(first)
    data.save(Path(folder))
    other = tmp_path / "other.txt"
    other.write_text("other words, and others: " * 400, "utf-8")
    words = (*OURS, f"init={folder}", "name=next", f"data.path={other}")
    for given in ((), (trained,)):
        config = make_config(*words, *given)
        assert config.data.tokenizer.path == str(Path(folder).absolute() / TOKENIZER_FILE)
        assert load_data(config).tokenizer.identity == data.tokenizer.identity
    with pytest.raises(RecipeError, match=r"data\.tokenizer: expected .*'file', .*got .*'byte'"):
        make_config(*words, "data.tokenizer.kind=byte")


WRONG = {
    "model.width=32": r"model\.width: expected 16, as in init .*; got 32; remove it",
    "model.residual={scheme: fixed}": r"model\.residual: expected \{.*got \{'scheme': 'fixed'\}",
    "data.tokenizer={kind: bpe}": r"data\.tokenizer: expected .*'byte'.* got .*'bpe'\}; remove it",
    "data.sequence_length=64": r"model\.context must be at least .*; got 16 and 64",
    "lora={}": r"lora needs init, a Hugging Face folder; got .*tiny; set init",
}


def test_another_model_is_refused(make_config: MakeConfig) -> None:
    folder, _ = kept(make_config("model.positions=learned"))
    for word, message in WRONG.items():
        with pytest.raises(RecipeError, match=message):
            make_config(f"init={folder}", "name=next", "model.positions=learned", word)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", ["sentence_order", "next_sentence"])
def test_a_bert_may_be_asked_something_else(tmp_path: Path, pairs: str) -> None:
    first = bert_config(write_bert(tmp_path), "data.pairs=next_sentence", "name=first")
    folder, expected = kept(first)
    load_bert_data(first).save(Path(folder))
    words = (f"init={folder}", f"data.pairs={pairs}", "seed=7", "name=next")
    found = weights(build_bert(bert_config(tmp_path / "tiny-bert.yaml", *words)))
    same = {
        path[0]: bool((found[path] == value).all())
        for path, value in expected.items()
        if path[-1] != "bias"
    }
    parts = ("encoder", "dense", "norm", "pooler", "pair_readout")
    assert same == {part: part != "pair_readout" or pairs == "next_sentence" for part in parts}


def test_a_bert_starts_from_berts_alone(tmp_path: Path, make_config: MakeConfig) -> None:
    path = write_bert(tmp_path)
    with pytest.raises(RecipeError, match="init: expected the folder of a run of recipe bert; got"):
        bert_config(path, "init=nowhere")
    run = open_run(make_config())
    with pytest.raises(RecipeError, match="expected recipe bert; got gpt"):
        bert_config(path, f"init={run}")

"""Starting a run from the weights of an earlier run, with another text and other formats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from recipes.bert.task import build as build_bert, load_data as load_bert_data
from recipes.config import TOKENIZER_FILE, RunConfig
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build, load_data
from recipes.run.folder import open_run
from recipes.run.state import load_trained
from unitscale import to_array

from ..masked import bert_config, write_bert
from ..runs import loss_of, untrained

MakeConfig = Callable[..., GPTConfig]
OURS = ("model.library=unitscale", "optimizer.umup=true", "model.dropout=0.0")


def weights(model: nnx.Module) -> dict[tuple[Any, ...], np.ndarray]:
    return values(nnx.state(model, nnx.Param))


def values(state: Any) -> dict[tuple[Any, ...], np.ndarray]:
    return {path: np.asarray(to_array(leaf.get_value())) for path, leaf in nnx.to_flat_state(state)}


def kept(config: RunConfig) -> tuple[str, dict[tuple[Any, ...], np.ndarray]]:
    """Save an untrained run; return its folder and weights."""
    run = open_run(config)
    state = untrained(config, run)
    return str(run), values(state.params)


SLOW = {
    "plain": (),
    "scanned": (*OURS, "model.scan=true"),
    "6 bytes": (*OURS, "precision.weights=float16", "precision.min_size=0"),
}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("precision=scalify_float16",), id="scalify"),
        *(pytest.param(words, id=name, marks=pytest.mark.slow) for name, words in SLOW.items()),
    ],
)
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


def test_the_shape_need_not_be_said_again_and_formats_may_be_others(
    make_config: MakeConfig,
) -> None:
    shape = ("model.width=24", "model.layers=2", "model.positions=learned", "model.context=32")
    folder, expected = kept(make_config(*OURS, *shape))
    words = (f"init={folder}", "name=next", "model={}", "optimizer.umup=true")
    config = make_config(*words, "precision.policy=fp8_delayed")
    assert (config.model.width, config.model.layers, config.model.context) == (24, 2, 32)
    assert (config.model.library, config.model.dropout) == ("unitscale", 0.0)
    assert make_config(*words, "model.dropout=0.2").model.dropout == 0.2
    found = weights(build(config))
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value.astype(found[path].dtype))


def test_the_tokenizer_is_the_run_s(make_config: MakeConfig, text_file: Path) -> None:
    trained = "data.tokenizer={kind: bpe, vocab: 300}"
    first = make_config(*OURS, "model.vocab=null", trained)
    data = load_data(first)
    folder, _ = kept(first)
    data.save(Path(folder))
    other = text_file.with_name("other.txt")
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


@pytest.mark.parametrize(
    "pairs", ["sentence_order", pytest.param("next_sentence", marks=pytest.mark.slow)]
)
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
    with pytest.raises(RecipeError, match="expected a run of recipe bert; got one of gpt"):
        bert_config(path, f"init={run}")

"""Fine-tuning a BERT of a Hugging Face folder: in each format, and back to such a folder."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from recipes.cli import main
from recipes.errors import RecipeError
from recipes.finetune.model import PlainModel
from recipes.finetune.task import build, load_data
from recipes.hf import load

from ..pretrained import copied, one_layer
from ..tasks import logits, tuned, write_tasks

Captured = pytest.CaptureFixture[str]
STANDARD = "optimizer={umup: false, name: sgd, b1: 0.0, learning_rate: 0.05}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of a BERT that has the head of neither."""
    folder = tmp_path_factory.mktemp("plain")
    write_tasks(folder, one_layer(copied("bert-mlm", folder)))
    return folder


@pytest.mark.slow
def test_logits_of_each_policy_are_those_of_the_model(folder: Path) -> None:
    """Less rounding: an epsilon of the products' format, over some ten products in a row."""
    found = {}
    for policy in ("float32", "float16", "fp8"):
        config = tuned(folder, "classification", STANDARD, f"policy={policy}")
        model, data = build(config), load_data(config)
        found[policy] = logits(model, data, config.scalify)
    batch = next(data.scored.batches(len(data.scored)))
    plain = load(config.init, "classification", new_head=True, classes=2).model
    expected = plain(*(batch[name] for name in ("ids", "segments", "mask")))
    np.testing.assert_allclose(found["float32"], expected, rtol=1e-5, atol=1e-6)
    size = float(np.sqrt(np.mean(np.square(expected))))
    for policy, dtype in (("float16", jnp.float16), ("fp8", jnp.float8_e4m3fn)):
        error = float(np.sqrt(np.mean(np.square(found[policy] - expected))))
        assert 0 < error < 10 * float(jnp.finfo(dtype).eps) * size, policy


@pytest.mark.slow
def test_questions_in_fp8_and_back(folder: Path, capsys: Captured) -> None:
    words = [str(folder / "squad.yaml"), STANDARD, "policy=fp8", "train.steps=2"]
    assert main(["finetune", *words]) == 0
    said = capsys.readouterr().out
    written = folder / "runs" / "squad" / "pretrained"
    assert f"the tuned model as a Hugging Face folder is in {written}" in said
    kept = load(written).model.ends.kernel[...]
    first = build(tuned(folder, "squad", *words[1:]))
    assert isinstance(first, PlainModel)
    assert (kept != first.bert.ends.kernel[...]).any()
    assert main(["evaluate", *words]) == 0
    scores = [line for line in said.splitlines() if line.startswith("exact match")]
    assert scores == [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("exact match")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.umup=true"], r"optimizer\.umup: expected false for the Hugging Face folder"),
        (["policy=fp8_delayed"], r"policy: expected float32, bfloat16, float16, fp8 for the Hugg"),
        (["policy=fp8", "monitor={}"], r"monitor, .* expected null for the Hugging Face folder"),
        (["optimizer.weights=float16"], r"optimizer\.weights .* expected null"),
    ],
)
def test_what_a_plain_model_has_not_is_refused(
    folder: Path, words: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        tuned(folder, "squad", STANDARD, *words)


def test_what_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="learned 32 positions; got 64"):
        load_data(tuned(folder, "squad", STANDARD, "data.sequence_length=64"))
    gpt = copied("gpt2", tmp_path)
    with pytest.raises(RecipeError, match="bert, roberta, modernbert; got 'gpt2'"):
        load_data(tuned(folder, "squad", STANDARD, f"init={gpt}"))

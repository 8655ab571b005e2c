"""Training resumes bit for bit, stops at the first value that is not finite, and reports."""

import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

from recipes import train as train_module
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.registry import load_config
from recipes.run.checkpoint import Checkpoints
from recipes.run.report import Metrics, read_metrics
from recipes.run.state import LossScale, init_state
from recipes.run.step import make_train_step
from recipes.text import Corpus
from recipes.train import Outcome
from unitscale.nn import AmaxState

from .runs import final_arrays, resumes_bit_for_bit, run, timeless

MakeConfig = Callable[..., GPTConfig]
UNITSCALE = [
    "model.library=unitscale",
    "optimizer={umup: true, learning_rate: 0.1, weight_decay: 1e-4}",
]
PRECISIONS = {
    "plain": [],
    "fp8": [*UNITSCALE, "precision.policy=fp8"],
    "fp8_delayed": [*UNITSCALE, "precision.policy=fp8_delayed"],
    # A learning rate at which weights saturate, so that scales move.
    "monitor": [
        "model.library=unitscale",
        "precision.policy=fp8",
        "optimizer={umup: true, learning_rate: 1000.0}",
        "precision.monitor=1e-4",
        "precision.rebalance=true",
    ],
    "few bits": [
        "model.library=unitscale",
        "optimizer={umup: true, learning_rate: 0.1, weight_decay: 1e-4}",
        "precision={weights: float16, moments: [float8_e4m3fn, float8_e4m3fn], "
        "rounding: stochastic}",
    ],
    "scalify": ["precision=scalify_fp8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", PRECISIONS.values(), ids=PRECISIONS)
def test_stopped_and_resumed_is_bit_for_bit_the_uninterrupted_run(
    make_config: MakeConfig, overrides: list[str]
) -> None:
    # Checkpoints at 3 would hide whether the signal wrote one.
    overrides = [*overrides, "train.checkpoint_every=100"]
    resumes_bit_for_bit(*(make_config(*overrides, f"name={name}") for name in ("whole", "stopped")))


def test_delayed_scales_follow_what_training_sees(make_config: MakeConfig) -> None:
    config = make_config(*PRECISIONS["fp8_delayed"])
    graphdef, optimizer, state = init_state(config)
    step = make_train_step(graphdef, optimizer)
    batch = np.zeros((4, 17), np.int32)

    def scales(state) -> np.ndarray:
        own = nnx.to_flat_state(nnx.filter_state(state.rest, AmaxState))
        return np.stack([variable.get_value().scale for _, variable in own])

    assert scales(state).shape == (6, 3)  # query, key, value, out, up, down
    assert np.all(scales(state) == 1)
    state, _ = step(state, batch, np.int32(0))
    moved = scales(state)
    assert np.all(moved < 1)  # amax of unit-scaled tensors is far below 448
    # A step that does not count moves nothing.
    state, _ = step(state, batch, np.int32(7))
    np.testing.assert_array_equal(scales(state), moved)


def test_a_run_that_lost_its_last_steps_repeats_them(make_config: MakeConfig) -> None:
    """A crash after step 5: the newest checkpoint is of step 3, the metrics go on to 5."""
    config = make_config()
    outcome, _ = run(config)
    rows = timeless(outcome.folder)
    newest = outcome.folder / "checkpoints" / "6"
    newest.rename(outcome.folder / "away")
    again, said = run(config)
    assert "resuming after step 3 of 6" in said
    assert timeless(again.folder) == rows


@pytest.mark.usefixtures("plots")
def test_what_a_run_leaves_behind(make_config: MakeConfig) -> None:
    config = make_config("train.sample_tokens=5", "train.sample_prompt=def")
    outcome, said = run(config)
    assert outcome.folder == Path(config.train.runs_dir) / "tiny"
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
        "loss.png",
        "rms.png",
        "checkpoints",
    }
    assert load_config(outcome.folder / "config.yaml") == config
    assert sorted(p.name for p in (outcome.folder / "checkpoints").iterdir()) == ["3", "6"]
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]
    assert "step 6/6  loss" in said
    assert "sample: def" in said
    last = said[said.index("trained in ") :]
    assert f" tokens/s: validation loss {outcome.validation_loss:.4f}" in last
    assert "loss.png" in last


def test_a_finished_run_is_not_trained_again(make_config: MakeConfig) -> None:
    config = make_config()
    first, _ = run(config)
    metrics = (first.folder / "metrics.jsonl").read_bytes()
    again, said = run(config)
    assert "all 6 steps are done" in said
    assert again.validation_loss == first.validation_loss
    assert (first.folder / "metrics.jsonl").read_bytes() == metrics


def test_the_loss_falls(make_config: MakeConfig) -> None:
    config = make_config("train.steps=60", "train.log_every=60", "train.checkpoint_every=60")
    outcome, _ = run(config)
    assert outcome.validation_loss is not None
    assert outcome.validation_loss < 0.75 * np.log(256)


@pytest.mark.parametrize("tolerated", [0, 2])
def test_a_loss_that_is_not_finite_stops_the_run(make_config: MakeConfig, tolerated: int) -> None:
    """The learning rate explodes after a good checkpoint; looking only every 100 steps."""
    config = make_config(
        "precision.policy=float16",
        "optimizer={learning_rate: 1e5, schedule: constant, warmup_steps: 3, skip_nonfinite: "
        f"{tolerated}}}",
        "train={steps: 100, log_every: 100, checkpoint_every: 1, eval_every: 100, keep: 100}",
    )
    with pytest.raises(RecipeError) as caught:
        run(config)
    said = str(caught.value)
    assert caught.value.exit_code == 1
    left_out = ", after 2 such steps in a row that were left out" if tolerated else ""
    assert f"gradient is not finite{left_out}; the first value that is not finite is" in said
    checkpoints = Path(config.train.runs_dir) / "tiny" / "checkpoints"
    saved = sorted(int(path.name) for path in checkpoints.iterdir())
    assert said.startswith(f"step {saved[-1] + 1}:")
    assert f"the checkpoint of step {saved[-1]} is untouched" in said
    for array in final_arrays(config):
        assert np.isfinite(array.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("decay", "what"),
    [(1e6, "its update has left weights that are not"), (0.0, "the validation loss is not")],
)
def test_a_last_update_that_ruins_the_weights_is_an_error(
    make_config: MakeConfig, decay: float, what: str
) -> None:
    config = make_config(
        "optimizer={name: adamw, learning_rate: 1e35, warmup_steps: 0, schedule: constant}",
        f"optimizer.weight_decay={decay}",
        "train={steps: 1, checkpoint_every: 1, eval_every: 100}",
    )
    with pytest.raises(RecipeError, match=f"^step 1: {what} finite; .*learning_rate") as caught:
        run(config)
    assert caught.value.exit_code == 1
    kept = "no checkpoint was written" if "weights" in what else "so pass --fresh to begin again"
    assert kept in str(caught.value)


def test_the_layer_that_broke_is_named(make_config: MakeConfig) -> None:
    """A weight that is infinite in a checkpoint shows in the layer that it belongs to."""
    config = make_config("train.log_every=5")
    folder = run(config)[0].folder
    (folder / "checkpoints" / "6").rename(folder / "away-6")
    _, _, like = init_state(config)
    restored = Checkpoints(folder).restore(like)
    assert restored is not None
    kernel = restored.state.params["layers"][0]["mlp"]["up"]["kernel"]
    kernel[...] = kernel[...].at[0, 0].set(jnp.inf)
    (folder / "checkpoints" / "3").rename(folder / "away-3")
    Checkpoints(folder).save(3, restored.state, restored.position, restored.facts)
    with pytest.raises(RecipeError, match=r"step 4: .* is the output of layers\.0\.mlp\.up;"):
        run(config)


def test_a_step_that_is_not_finite_changes_nothing(make_config: MakeConfig) -> None:
    graphdef, optimizer, state = init_state(make_config())
    step = make_train_step(graphdef, optimizer)
    batch = np.zeros((4, 17), np.int32)
    state, values = step(state, batch, np.int32(0))
    assert np.isfinite(values["loss"])
    assert state.step == 1
    kernel = state.params["embed"]["embedding"]
    kernel[...] = kernel[...].at[0, 0].set(jnp.nan)
    before = jax.tree.map(lambda leaf: np.asarray(leaf), (state.params, state.opt_state))
    state, values = step(state, batch, np.int32(1))
    assert not np.isfinite(values["loss"])
    state, _ = step(state, batch, np.int32(2))
    assert state.step == 1
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))


def test_a_skipped_step_is_seen_by_every_later_one(make_config: MakeConfig) -> None:
    graphdef, optimizer, state = init_state(make_config())
    before = jax.tree.map(np.asarray, state.params)
    state, _ = make_train_step(graphdef, optimizer)(state, np.ones((4, 17), np.int32), np.int32(1))
    assert state.step == 0
    jax.tree.map(np.testing.assert_array_equal, before, state.params)


def test_the_step_is_that_of_plain_jax(make_config: MakeConfig) -> None:
    config = make_config("model.dropout=0.0", "optimizer={name: sgd, b1: 0.0, schedule: constant}")
    graphdef, optimizer, state = init_state(config)
    batch = np.arange(4 * 17, dtype=np.int32).reshape(4, 17)

    def loss(params):
        model = nnx.merge(graphdef, params, state.rest)
        logits = model(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(state.params)
    expected = jax.tree.map(lambda p, g: np.asarray(p - 0.01 * g), state.params, grads)
    new, values = make_train_step(graphdef, optimizer)(state, batch, np.int32(0))
    assert float(values["loss"]) == pytest.approx(float(value), rel=1e-6)
    # One rounding each for the product and the sum, in another order under jit.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), expected, new.params)


def test_another_text_is_not_resumed(make_config: MakeConfig, text_file: Path) -> None:
    words = "data.tokenizer={kind: bpe, vocab: 270}", "model.vocab=270"
    outcome, _ = run(make_config(*words))
    tokenizer = (outcome.folder / "tokenizer.json").read_bytes()
    text_file.write_text(text_file.read_text("utf-8").upper(), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"data: it is not what .* was trained on"):
        run(make_config(*words))
    assert (outcome.folder / "tokenizer.json").read_bytes() == tokenizer


def test_another_config_is_not_resumed_and_fresh_moves_the_old_run(make_config: MakeConfig) -> None:
    first, _ = run(make_config())
    changed = make_config("seed=1")
    with pytest.raises(RecipeError, match=r"run of another config:\n  seed: 0 -> 1\nchange name"):
        run(changed)
    outcome, said = run(changed, fresh=True)
    assert "resuming" not in said
    old = first.folder.with_name("tiny.old-1")
    assert yaml.safe_load((old / "config.yaml").read_text("utf-8"))["seed"] == 0
    assert outcome.step == 6


def test_the_run_folder_cannot_be_made(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RecipeError, match=r"train\.runs_dir: cannot write the run folder .*Not a"):
        run(make_config(f"train.runs_dir={tmp_path / 'file'}"))


def test_a_disk_that_fills_up_between_checkpoints(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Metrics, step: int, **values: float) -> None:
        if step == 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Metrics, "write", full)
    message = (
        r"cannot write to .*tiny: No space left on device; the checkpoint of step 3 is untouch"
    )
    with pytest.raises(RecipeError, match=message) as caught:
        run(make_config())
    assert caught.value.exit_code == 1


def test_the_rate_that_is_logged_is_that_of_the_last_update(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is near 5: times 2^127 and 2^126 it overflows, and two steps are left out."""
    first = LossScale(jnp.float32(2.0**127), jnp.int32(0))
    monkeypatch.setattr(LossScale, "create", lambda: first)
    config = make_config(
        "precision.loss_scale=dynamic",
        "optimizer={schedule: linear, final_fraction: 0.0, learning_rate: 6e-3}",
    )
    rows = read_metrics(run(config)[0].folder / "metrics.jsonl")
    rates = [row["learning_rate"] for row in rows if "loss" in row]
    np.testing.assert_allclose(rates, [6e-3, 6e-3, 6e-3, 5e-3, 4e-3, 3e-3], rtol=1e-6)


def test_reads_no_device_value_between_log_lines(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between log lines the loop only hands batches to the device."""
    config = make_config("train={steps: 6, log_every: 6, eval_every: 9, checkpoint_every: 9}")
    reads: list[int] = []
    batches: list[int] = []
    original, finite = Corpus.training, train_module._Run.check_finite

    class Counted:
        def __init__(self, corpus, *args, **kwargs):
            self._batches = original(corpus, *args, **kwargs)
            self.get_state, self.set_state = self._batches.get_state, self._batches.set_state

        def __iter__(self):
            return self

        def __next__(self):
            batches.append(len(batches))
            return next(self._batches)

    def check(self, *args):
        reads.append(len(batches))
        return finite(self, *args)

    monkeypatch.setattr(Corpus, "training", lambda self, *a, **k: Counted(self, *a, **k))
    monkeypatch.setattr(train_module._Run, "check_finite", check)
    run(config)
    assert set(reads) == {6}


def test_trains_outside_the_main_thread(make_config: MakeConfig) -> None:
    """Signals can be handled in the main thread alone; a notebook may train elsewhere."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run(make_config())[0]))
    thread.start()
    thread.join()
    assert outcomes[0].step == 6

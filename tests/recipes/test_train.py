"""Training resumes exactly, stops at the first value that is not finite, and reports; commands."""

import io
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from flax import nnx
from rich.console import Console

from recipes import train as train_module
from recipes.bench import BENCHMARKS
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.gpt.task import load_data
from recipes.registry import load_config
from recipes.run.checkpoint import Checkpoints
from recipes.run.folder import Metrics, open_run, read_metrics
from recipes.run.state import init_state, make_schedule
from recipes.run.step import make_train_step
from recipes.train import Outcome

from .conftest import MakeConfig, write_config
from .runs import StopAfter, final_arrays, resumes_bit_for_bit, run, timeless, untrained

Captured = pytest.CaptureFixture[str]
UNITSCALE = [
    "model.library=unitscale",
    "optimizer={umup: true, learning_rate: 0.1, weight_decay: 1e-4}",
]
PRECISIONS = {
    "plain": [],
    "fp8_delayed": [*UNITSCALE, "precision.policy=fp8_delayed"],
    # A learning rate at which weights saturate, so that scales move.
    "monitor": [
        "model.library=unitscale",
        "precision={policy: fp8, monitor: 1e-4, rebalance: true}",
        "optimizer={umup: true, learning_rate: 1000.0}",
    ],
    "few bits": [
        *UNITSCALE,
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, str]:
    """The config, outcome and output of a finished run."""
    path = write_config(tmp_path_factory.mktemp("finished"))
    return path, *run(load_config(path, ["train.sample_tokens=5", "train.sample_prompt=def"]))


@pytest.fixture
def again(finished, tmp_path: Path) -> MakeConfig:
    """Copy the finished run; return its config with overrides."""
    path, outcome, _ = finished
    shutil.copytree(outcome.folder, tmp_path / "copied" / "tiny")
    return lambda *words: load_config(path, [f"train.runs_dir={tmp_path / 'copied'}", *words])


def test_what_a_run_leaves_behind(finished) -> None:
    path, outcome, said = finished
    names = {path.name for path in outcome.folder.iterdir()}
    files = {"config.yaml", "metrics.jsonl", "loss.png", "rms.png"}
    assert names == {*files, "tensorboard", "checkpoints"}
    config = load_config(path, ["train.sample_tokens=5", "train.sample_prompt=def"])
    assert outcome.folder == Path(config.train.runs_dir) / "tiny"
    assert load_config(outcome.folder / "config.yaml") == config
    assert sorted(p.name for p in (outcome.folder / "checkpoints").iterdir()) == ["3", "6"]
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]
    rates = [row["learning_rate"] for row in rows if "loss" in row]
    np.testing.assert_allclose(rates, list(map(make_schedule(config.optimizer, 6), range(6))))
    assert ["tokens_per_second" in row for row in rows if "loss" in row] == [False, *[True] * 5]
    assert re.search(r"step 1/6  loss [\d.]+\n", said)
    assert re.search(r"step 6/6  loss [\d.]+  [\d,]+ tokens/s\n", said)
    assert "sample: def" in said
    last = said[said.index("trained in ") :]
    assert f" tokens/s: validation loss {outcome.validation_loss:.4f}" in last
    assert "loss.png" in last


@pytest.mark.slow
def test_a_run_that_lost_its_last_steps_repeats_them(
    finished, again: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """After a crash at step 5, the newest checkpoint is of step 3, and metrics go up to 5."""
    config, (path, first, _) = again(), finished
    folder = Path(config.train.runs_dir) / "tiny"
    (folder / "checkpoints" / "6").rename(folder / "away")
    stopping = StopAfter(folder, resume_step=3)
    stopping.step = 6  # the last
    monkeypatch.setattr(train_module.runs, "open_metrics", lambda *_: stopping)
    outcome, said = run(config)
    assert "resuming after step 3 of 6" in said
    assert "stopped by SIGTERM after step 6" in said
    assert timeless(outcome.folder) == timeless(first.folder)
    metrics = (folder / "metrics.jsonl").read_bytes()
    # Finished, it is not trained again.
    monkeypatch.setattr(train_module, "make_train_step", lambda *_, **__: pytest.fail)
    assert main(["train", str(path), f"train.runs_dir={folder.parent}"]) == 0
    said = capsys.readouterr().out
    assert "all 6 steps are done" in said
    assert f"validation loss {first.validation_loss:.4f}" in said
    assert (folder / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
@pytest.mark.parametrize("tolerated", [0, 2])
def test_a_loss_that_is_not_finite_stops_the_run(make_config: MakeConfig, tolerated: int) -> None:
    """The learning rate explodes after a good checkpoint; values are checked every 100 steps."""
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
    left_out = ", after 2 such steps in a row were skipped" if tolerated else ""
    assert f"gradient is not finite{left_out}; the first value that is not finite is" in said
    checkpoints = Path(config.train.runs_dir) / "tiny" / "checkpoints"
    saved = sorted(int(path.name) for path in checkpoints.iterdir())
    assert said.startswith(f"step {saved[-1] + 1}:")
    assert f"the checkpoint of step {saved[-1]} is untouched" in said
    for array in final_arrays(config):
        assert np.isfinite(array.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("decay", "steps", "what"),
    [(1e6, 2, "weights"), pytest.param(0.0, 1, "the validation loss", marks=pytest.mark.slow)],
)
def test_an_update_that_ruins_the_weights_is_an_error(
    make_config: MakeConfig, decay: float, steps: int, what: str
) -> None:
    config = make_config(
        "optimizer={name: adamw, learning_rate: 1e35, warmup_steps: 0, schedule: constant}",
        f"optimizer.weight_decay={decay}",
        f"train={{steps: {steps}, checkpoint_every: 1, eval_every: 100}}",
    )
    with pytest.raises(RecipeError, match=f"^step 1: .*{what} .*not finite; ") as caught:
        run(config)
    assert caught.value.exit_code == 1


@pytest.mark.slow
def test_the_layer_that_broke_is_named(finished, again: MakeConfig) -> None:
    """With an infinite weight in a checkpoint, the message names its layer."""
    config = again()
    folder = Path(config.train.runs_dir) / "tiny"
    shutil.rmtree(folder / "checkpoints" / "6")
    _, _, like = init_state(config)
    restored = Checkpoints(folder).restore(like)
    assert restored is not None
    kernel = restored.state.params["layers"][0]["mlp"]["up"]["kernel"]
    kernel[...] = kernel[...].at[0, 0].set(jnp.inf)
    shutil.rmtree(folder / "checkpoints" / "3")
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, restored.state, restored.position, restored.facts)
    checkpoints.wait()
    with pytest.raises(RecipeError, match=r"step 4: .* is the output of layers\.0\.mlp\.up;"):
        run(config)


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


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_and_a_disk_that_fills_up(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RecipeError, match=r"train\.runs_dir: cannot write the run folder"):
        run(make_config(f"train.runs_dir={tmp_path / 'file'}"))
    (open_run(other := make_config("name=other")) / "tensorboard").touch()
    with pytest.raises(RecipeError, match=r"other: File exists; there is no checkpoint"):
        run(other)

    def full(self: Metrics, step: int, **values: float) -> None:
        if step == 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Metrics, "write", full)
    message = "cannot write to .*tiny: No space left on device; the checkpoint of step 3 is untouch"
    with pytest.raises(RecipeError, match=message) as caught:
        run(make_config())
    assert caught.value.exit_code == 1


@pytest.mark.slow
def test_trains_outside_the_main_thread(make_config: MakeConfig) -> None:
    """Only the main thread can handle signals, but a notebook may train in another thread."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, color_system=None)
    config = make_config("train={steps: 2, eval_every: 1}")
    thread = threading.Thread(target=lambda: train_module.train(config, console=console))
    thread.start()
    thread.join()
    for part in ("100%", "2/2 loss ", "step 1  validation loss", "trained in float32"):
        assert part in output.getvalue()


def test_evaluate_and_generate(finished, capsys: Captured) -> None:
    path = str(finished[0])
    assert main(["evaluate", path]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"step 6  validation loss [\d.]+ nats per token, [\d.]+ bits\n", said)
    command = ["generate", path, "--prompt", "line", "--tokens", "40"]
    assert main([*command, "--temperature", "0"]) == 0
    greedy = capsys.readouterr().out
    assert greedy.startswith("line")
    assert main([*command, "--top-k", "1", "--seed", "9"]) == 0
    assert capsys.readouterr().out == greedy


@pytest.mark.slow
def test_a_run_is_used_with_its_own_tokenizer(config_file: Path, capsys: Captured) -> None:
    words = [str(config_file), "data.tokenizer={kind: bpe, vocab: 300}", "model.vocab=300"]
    config = load_config(words[0], words[1:])
    untrained(config, folder := open_run(config))
    load_data(config).save(folder)
    # Only the number of ids is read from the config, because its text has changed since.
    words[1] = "data.tokenizer={kind: wordpiece, vocab: 300}"
    config_file.with_name("text.txt").write_text("line of another text\n" * 300, "utf-8")
    capsys.readouterr()
    assert main(["evaluate", *words]) == 0
    assert main(["generate", *words, "--prompt", "line 7: naïve", "--tokens", "5"]) == 0
    assert "line 7: naïve" in capsys.readouterr().out
    own = folder / "tokenizer.json"
    own.rename(own.with_suffix(".away"))
    assert main(["generate", *words]) == 2
    assert "tokenizer.json cannot be read: No such file" in capsys.readouterr().err
    inner = tokenizers.Tokenizer.from_file(str(own.with_suffix(".away")))
    inner.add_tokens(["one more"])
    inner.save(str(own))
    assert main(["generate", *words]) == 2
    assert "at most the 300 ids that the model has; got a token" in capsys.readouterr().err


def test_a_folder_is_the_run_in_it_wherever_it_was_moved(
    finished, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished[1].folder, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "moved"]) == 0
    assert "step 6  validation loss" in capsys.readouterr().out
    shutil.rmtree("moved/checkpoints")
    assert main(["evaluate", "moved"]) == 2
    assert "moved has no checkpoint; train it first" in capsys.readouterr().err
    assert main(["train", "moved"]) == 2
    assert "got moved, a folder; give moved/config.yaml" in capsys.readouterr().err


def test_evaluate_on_another_text(finished, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "other.txt").write_text("something else " * 100, encoding="utf-8")
    losses = []
    for words in ((), (f"data.path={tmp_path / 'other.txt'}",)):
        assert main(["evaluate", str(finished[0]), *words]) == 0
        *notes, loss = capsys.readouterr().out.splitlines()
        losses.append(loss)
    assert notes == ["this is not the data that the run was trained on; its loss differs"]
    assert losses[0] != losses[1]


# arguments after the config, and what standard error has to say
WRONG = [
    (["train", "data.path=/nowhere"], "error: data.path: /nowhere does not exist; give"),
    (["finetune"], "error: init: expected a model to tune; got none in"),
    (["train", "--processes", "2"], "error: unitscale.parallel.initialize: coordinator"),
    (["evaluate"], "error: name: no run at"),
    (["generate", "name=other"], "error: name: no run at"),
    (["generate", "--tokens", "0"], "Invalid value for '--tokens'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:30])
def test_wrong_input(
    config_file: Path, capsys: Captured, arguments: list[str], message: str
) -> None:
    command, *rest = arguments
    assert main([command, str(config_file), *rest]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "Traceback" not in output.err
    assert not output.out
    assert not (config_file.parent / "runs").exists()
    if "data.path" in message:
        with pytest.raises(RecipeError, match="does not exist"):
            main([command, str(config_file), *rest, "--traceback"])


def test_help(capsys: Captured) -> None:
    for words in ([], ["train"], ["bench"], *(["bench", name] for name in BENCHMARKS)):
        assert main([*words, "--help"]) == 0
        assert " ".join(["python -m recipes", *words]) in capsys.readouterr().out
    assert main(["bench", "nonsense"]) == 2

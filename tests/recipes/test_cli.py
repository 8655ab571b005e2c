"""The command line: output, exit codes, and tracebacks only on request."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from recipes.bench import BENCHMARKS
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.gpt.task import load_data
from recipes.registry import load_config
from recipes.run.folder import open_run

from .conftest import write_config
from .runs import untrained

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the config of a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    path = write_config(folder)
    assert main(["train", str(path), "train.steps=2", "train.eval_every=9"]) == 0
    return path


def test_train_evaluate_generate(trained: Path, capsys: Captured) -> None:
    assert main(["evaluate", str(trained)]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"step 2  validation loss [\d.]+ nats per token, [\d.]+ bits\n", said)
    command = ["generate", str(trained), "--prompt", "line", "--tokens", "40"]
    assert main([*command, "--seed", "1", "--temperature", "0.8", "--top-k", "5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("line")
    assert main([*command, "--temperature", "0"]) == 0
    greedy = capsys.readouterr().out
    assert main([*command, "--top-k", "1", "--seed", "9"]) == 0
    assert capsys.readouterr().out == greedy


def test_a_run_is_used_with_its_own_tokenizer(config_file: Path, capsys: Captured) -> None:
    words = [str(config_file), "data.tokenizer={kind: bpe, vocab: 300}", "model.vocab=300"]
    config = load_config(words[0], words[1:])
    untrained(config, folder := open_run(config))
    load_data(config).save(folder)
    # Of the config only the number of ids is read: the text that it names is another by now.
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
    trained: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,) = (path.parent for path in trained.parent.rglob("*/config.yaml"))
    shutil.copytree(kept, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "moved"]) == 0
    assert "step 2  validation loss" in capsys.readouterr().out
    shutil.rmtree("moved/checkpoints")
    assert main(["evaluate", "moved"]) == 2
    assert "moved has no checkpoint; train it first" in capsys.readouterr().err
    assert main(["train", "moved"]) == 2
    assert "got moved, a folder; give moved/config.yaml" in capsys.readouterr().err


def test_evaluate_on_another_text(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "other.txt").write_text("something else " * 100, encoding="utf-8")
    assert main(["evaluate", str(trained), f"data.path={tmp_path / 'other.txt'}"]) == 0
    other = capsys.readouterr().out
    assert main(["evaluate", str(trained)]) == 0
    assert capsys.readouterr().out not in other
    note, _ = other.splitlines()
    assert note == "this is not the data that the run was trained on; its loss differs"


# arguments after the config, and what standard error has to say
WRONG = [
    (["train", "train.stepz=3"], r"error: override 'train.stepz=3': train.stepz is not a key"),
    (["train", "data.path=/nowhere"], "error: data.path: /nowhere does not exist; give"),
    (["train", "--nonsense"], "No such option"),
    (["finetune"], "error: init: expected a pretrained model to tune; got none in"),
    (["train", "--processes", "2"], "error: processes: unitscale.parallel.initialize: coordinator"),
    (["evaluate"], "error: name: no run at"),
    (["generate", "name=other"], "error: name: no run at"),
    (["generate", "--tokens", "0"], "Invalid value for '--tokens'"),
    (["generate", "--temperature", "-1"], "Invalid value for '--temperature'"),
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


def test_a_model_that_is_not_the_runs(trained: Path, capsys: Captured) -> None:
    for command in ("evaluate", "generate"):
        assert main([command, str(trained), "model.layers=2"]) == 2
        assert "model.layers: 1 -> 2" in capsys.readouterr().err
    assert main(["generate", str(trained), "--prompt", ""]) == 2
    assert "error: --prompt: expected at least one character" in capsys.readouterr().err


def test_help(capsys: Captured) -> None:
    for words in ([], ["train"], ["bench"], *(["bench", name] for name in BENCHMARKS)):
        assert main([*words, "--help"]) == 0
        assert " ".join(["python -m recipes", *words]) in capsys.readouterr().out
    assert main(["bench", "nonsense"]) == 2


def test_module_entry_point_and_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recipes", "train", "nowhere.yaml"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: config file nowhere.yaml does not exist;")
    assert done.stdout == ""

"""Worker processes, signals, and runs in two processes that resume after one is lost."""

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from recipes import train as train_module
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.registry import load_config
from recipes.run import processes
from recipes.run.folder import read_metrics
from recipes.run.pool import each, message_of
from recipes.run.processes import StopRequest, joined, open_mesh
from tests.parallel.devices import start_two

from ..conftest import MakeConfig
from ..dying import level_of_orbax, takes_a_while
from ..runs import checksums


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_task_comes_back_with_what_its_work_returned(jobs: int) -> None:
    found = {task[0]: result for task, result in each([(0,), (1,), (2,)], jobs, level_of_orbax)}
    # Processes of their own do not show every file that Orbax touches.
    level = logging.ERROR if jobs > 1 else level_of_orbax(0)[1]
    assert found == {number: (number, level) for number in range(3)}


@pytest.mark.slow
def test_an_interruption_begins_nothing_more(tmp_path: Path) -> None:
    tasks = [(number, str(tmp_path)) for number in range(20)]

    def run() -> None:
        for _ in each(tasks, 2, takes_a_while):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert 1 <= len(list(tmp_path.iterdir())) < 10


@pytest.mark.slow
def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
from recipes.run.pool import each
from tests.recipes.dying import takes_a_while
list(each([(number, {str(tmp_path)!r}) for number in range(100)], 2, takes_a_while))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    while not list(tmp_path.iterdir()) and parent.poll() is None:
        time.sleep(0.1)
    parent.kill()
    parent.communicate(timeout=20)  # until the last process that has its output has ended
    assert len(list(tmp_path.iterdir())) < 20


def test_a_message_is_one_line() -> None:
    assert message_of(MemoryError("no room\nat all")) == "MemoryError: no room"
    assert message_of(KeyError()) == "KeyError: "


ROOT = Path(__file__).parents[3]


def test_the_first_signal_is_noted_and_the_second_acts() -> None:
    # Python's own handler of Ctrl-C, which a process that runs tests for another has not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with StopRequest() as stop:
        assert stop.signal is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_stopped_process_saves(config_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "recipes", "train", str(config_file)]
    command += ["train={steps: 1000000, log_every: 1, checkpoint_every: 1000000}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **pipes)
    assert process.stdout is not None
    for line in process.stdout:  # ends when the process does
        if line.startswith("step 3/"):
            process.send_signal(number)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert f"stopped by {number.name} after step" in out
    assert "run the same command to resume" in out
    (saved,) = (tmp_path / "runs" / "tiny" / "checkpoints").iterdir()
    assert int(saved.name) >= 3


@pytest.mark.parametrize(("saved", "said"), [(0, "nothing was trained"), (7, "step 7 is kept")])
def test_an_interruption_outside_of_the_loop_says_what_is_kept(
    config_file: Path,
    saved: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    if saved:
        (config_file.parent / f"runs/tiny/checkpoints/{saved}").mkdir(parents=True)
    monkeypatch.setattr(train_module, "recipe_of", interrupted)
    assert main(["train", str(config_file)]) == 130
    assert said in capsys.readouterr().err


TIMEOUT = 240  # seconds; a busy machine takes a while to import
STEPS = 12
SETTINGS = [
    "mesh.data=2",
    "model.dropout=0.0",  # its draws depend on where the rows of a batch lie
    f"train.steps={STEPS}",
    "train.checkpoint_every=1",
    "train.eval_every=5",
]

COMMAND = """
import sys
from recipes import cli
from tests.recipes.runs import without_plots
without_plots()
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


class Ended(NamedTuple):
    code: int
    output: str
    errors: str


Pair = list[subprocess.Popen[str]]


def end(pair: Pair, index: int) -> Ended:
    try:
        output, errors = pair[index].communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        for one in pair:  # to say where it stands
            one.send_signal(signal.SIGABRT)
        raise AssertionError([one.communicate() for one in pair]) from None
    said = [line for line in output.splitlines() if not line.startswith("[Gloo]")]
    return Ended(pair[index].returncode, "\n".join(said), errors)


def ends(pair: Pair) -> list[Ended]:
    return [end(pair, index) for index in range(2)]


@pytest.fixture
def start(config_file: Path) -> Iterator[Callable[..., Pair]]:
    """Run the same command in two processes with one device each."""
    running: Pair = []
    cache = {"JAX_COMPILATION_CACHE_DIR": str(config_file.with_name("compiled"))}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def start(*words: str) -> Pair:
        command, options = (str(config_file), *SETTINGS, *words), {"PYTHONFAULTHANDLER": "1"}
        pair = start_two(COMMAND, *command, XLA_FLAGS="", **cache, **options)
        running.extend(pair)
        return pair

    yield start
    for one in running:
        one.kill()
        one.communicate()


def losses(folder: Path) -> list[tuple]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in rows]


def saved(folder: Path) -> list[int]:
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdigit())


@pytest.mark.slow
def test_lost_processes(start: Callable[..., Pair], config_file: Path) -> None:
    """Kill one process, later suspend one, later kill the first: resumed runs end the same.

    Each process holds and saves half of every matrix.
    """
    runs = Path(load_config(config_file).train.runs_dir)
    cut = ("mesh={data: 1, fsdp: 2}", "model.width=64")
    whole = ends(start("name=whole", *cut))
    assert [one.code for one in whole] == [0, 0], whole
    assert "validation loss" in whole[0].output
    assert whole[1].output == ""  # one voice
    folder = runs / "lost"
    blows = ((3, 1, signal.SIGKILL), (6, 1, signal.SIGSTOP), (9, 0, signal.SIGKILL))
    for step, victim, blow in blows:
        pair = start("name=lost", *cut, "--heartbeat", "5")
        while all(row[0] < step for row in losses(folder)):
            assert pair[victim].poll() is None, ends(pair)
            time.sleep(0.01)
        before = saved(folder)
        pair[victim].send_signal(blow)
        left = end(pair, 1 - victim)
        assert left.code not in (0, -signal.SIGKILL)
        pair[victim].kill()
        assert end(pair, victim).code == -signal.SIGKILL
        assert saved(folder)[-1] >= before[-1] > 0
    ended = ends(start("name=lost", *cut))
    assert [one.code for one in ended] == [0, 0], ended
    assert losses(folder) == losses(runs / "whole")
    assert checksums(folder, STEPS) == checksums(runs / "whole", STEPS)
    assert saved(folder) == [STEPS - 1, STEPS]


def test_one_process() -> None:
    with joined():
        assert processes.is_first()
    processes.check_alike({"name": "tiny"})
    with (
        pytest.raises(ValueError, match=r"processes must be given too; got only"),
        joined(coordinator="localhost:1", process=0),
    ):
        pass
    stop = StopRequest()
    assert stop.agreed(logging=False) is None
    stop.signal = signal.SIGINT
    assert stop.agreed(logging=False) is signal.SIGINT


def test_two_processes(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the second process are made up."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    facts = [{"seed": 1, "data": "a"}, {"seed": 1, "data": "b"}]
    rows: list[np.ndarray] = []
    monkeypatch.setattr(processes, "gathered", lambda row: rows.append(row) or np.array(rows))
    processes.check_alike(facts[0])
    with pytest.raises(RecipeError, match=r"they differ in data; start every process"):
        processes.check_alike(facts[1])
    count = jax.device_count()
    with pytest.raises(RecipeError, match=rf"mesh: .* got null; set mesh\.data={count}"):
        open_mesh(make_config())
    # The other process was told to stop, this one was not; they agree at log lines.
    monkeypatch.setattr(processes, "gathered", lambda own: np.array([own, signal.SIGTERM]))
    assert StopRequest().agreed(logging=False) is None
    assert StopRequest().agreed(logging=True) is signal.SIGTERM

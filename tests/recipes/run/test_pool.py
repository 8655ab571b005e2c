"""Work in processes of their own: what comes back, and what an interruption leaves undone."""

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.run.pool import each, message_of

from ..dying import level_of_orbax, takes_a_while


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_task_comes_back_with_what_its_work_returned(jobs: int, tmp_path: Path) -> None:
    tasks = [(number, str(tmp_path)) for number in range(3)]
    found = {task[0]: result for task, result in each(tasks, jobs, takes_a_while)}
    assert found == {0: 0, 1: 1, 2: 2}


@pytest.mark.slow
def test_processes_do_not_show_every_file_that_orbax_touches() -> None:
    tasks = [(0,), (1,)]
    assert [level for _, level in each(tasks, 2, level_of_orbax)] == [logging.ERROR] * 2


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
def test_processes_stop_when_their_parent_is_killed(tmp_path: Path) -> None:
    code = f"""
from recipes.run.pool import each
from tests.recipes.dying import waits_for_a_stop
list(each([(number, {str(tmp_path)!r}) for number in range(6)], 2, waits_for_a_stop))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    while len(list(tmp_path.glob("begun-*"))) < 2 and parent.poll() is None:
        time.sleep(0.1)
    parent.kill()
    parent.communicate()  # until the last process that has its output has ended
    begun = {path.name.removeprefix("begun-") for path in tmp_path.glob("begun-*")}
    stopped = {path.name.removeprefix("stopped-") for path in tmp_path.glob("stopped-*")}
    assert begun == stopped == {"0", "1"}


def test_a_message_is_one_line() -> None:
    assert message_of(MemoryError("no room\nat all")) == "MemoryError: no room"
    assert message_of(KeyError()) == "KeyError: "

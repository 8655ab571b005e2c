"""Worker processes: results, interruptions, and memory that is reused."""

import logging
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.run.pool import each, message_of

from ..dying import level_of_orbax, takes_a_while


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


# Page faults of 64 MiB that are written, freed and written again, in a thread as XLA's are.
AGAIN = """
import ctypes, resource, threading
from recipes.run.pool import keep_freed_memory

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault for each page, not for 512
kept = keep_freed_memory()
faults = [0]
for _ in range(3):
    thread = threading.Thread(target=lambda: b"1" * 2**26)
    thread.start()
    thread.join()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(int(kept), (faults[-1] - faults[-2]) * resource.getpagesize() / 2**26)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of another C library")
@pytest.mark.parametrize("environment", ["JAX_PLATFORMS=cpu", "JAX_PLATFORMS=cuda"])
def test_freed_memory_is_used_again_on_a_cpu(environment: str) -> None:
    kept = environment.endswith("cpu")
    done = subprocess.run(
        [sys.executable, "-c", AGAIN],
        env={"PYTHONPATH": str(Path(__file__).parents[3]), **dict([environment.split("=")])},
        capture_output=True,
        text=True,
        check=True,
    )
    said, share = map(float, done.stdout.split())
    assert said == kept
    assert share == pytest.approx(1 - kept, abs=0.1)

"""Memory that was freed is used again, on a CPU, unless the environment says otherwise."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Page faults of 64 MiB that are written, freed and written again, in a thread as XLA's are.
AGAIN = """
import ctypes, resource, threading
from recipes.allocator import keep_freed_memory

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault for each page, not for 512
kept = keep_freed_memory()

def fill():
    b"1" * 2**26

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(kept, faults() * resource.getpagesize() / 2**26)
"""


def again(**environment: str) -> tuple[bool, float]:
    """Whether memory is kept, and the share of it that faults when it is used again."""
    done = subprocess.run(
        [sys.executable, "-c", AGAIN],
        env={"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, share = done.stdout.split()
    return kept == "True", float(share)


@pytest.mark.parametrize(
    "environment",
    [{"JAX_PLATFORMS": "cuda"}, {"JAX_PLATFORMS": "cpu", "MALLOC_TOP_PAD_": "0"}],
    ids=["GPU", "told"],
)
def test_nothing_changes_where_it_need_not(environment: dict[str, str]) -> None:
    assert not again(**environment)[0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of another C library")
def test_what_was_freed_is_used_again() -> None:
    assert again(JAX_PLATFORMS="cuda") == (False, pytest.approx(1, abs=0.1))
    assert again(JAX_PLATFORMS="cpu") == (True, pytest.approx(0, abs=0.1))

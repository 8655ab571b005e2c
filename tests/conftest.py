"""Settings of all test runs: platform, quick compilation, deterministic property tests, marks."""

import ctypes
import gc
import importlib.util
import os
import zlib

from tests.compilation import cache_folder, xla_flags

# Before jax and NumPy are imported. A value that the user has set wins:
# `JAX_PLATFORMS=cuda pytest -m gpu`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Compiled programs are kept, for all workers and for the next run; see `tests.compilation`.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Each worker has a core; more threads only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["XLA_FLAGS"] = xla_flags(os.environ.get("XLA_FLAGS", ""))

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

from tests.lowering import keep_mlir_contexts

hypothesis.settings.register_profile(
    "deterministic", derandomize=True, database=None, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("deterministic")
keep_mlir_contexts()


def _compile_quickly(quick: bool) -> None:
    jax.config.update("jax_disable_most_optimizations", quick)
    jax.config.update("jax_traceback_in_locations_limit", 0 if quick else 10)


_compile_quickly(True)  # also what modules compute when they are imported
gc.set_threshold(100_000, 50, 100)  # tracing makes many objects, few of them garbage
_MOST_MEMORY = 5 * 2**29  # bytes, of each process
_LEFT_OUT = pytest.StashKey[dict[str, int]]()
_NEEDS = {
    "gpu": "a GPU and JAX_PLATFORMS=cuda",
    "h200": "the packages jax-cuda13-plugin (of jax's version), nvidia-cuda-nvcc and nvidia-nvvm",
    "peers": 'the packages of pip install ".[peers]"',
}
_PACKAGES = {"h200": ("jax_cuda13_plugin",), "peers": ("qwix", "torch", "transformers", "peft")}


def _can_run(mark: str) -> bool:
    if mark == "gpu":
        return any(name in os.environ["JAX_PLATFORMS"] for name in ("cuda", "gpu", "rocm"))
    return all(importlib.util.find_spec(package) for package in _PACKAGES[mark])


@pytest.fixture(scope="module", autouse=True)
def compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile with optimizations and source lines only in modules that set `OPTIMIZED`."""
    _compile_quickly(not getattr(request.module, "OPTIMIZED", False))
    yield
    _compile_quickly(True)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compile the programs of one test with optimizations."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped() -> Iterator[None]:
    """Drop caches when memory is short, because a full run compiles very many programs."""
    yield
    if _memory() > _MOST_MEMORY:
        jax.clear_caches()
        gc.collect()
        _give_memory_back()


def _give_memory_back() -> None:
    """Return freed memory to the system, so that dropping caches shows in the measurement."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def _memory() -> int:
    """Return the resident bytes of this process, or infinity if unknown."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return _MOST_MEMORY + 1
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of the cases of each parametrized test run the first, and about every Nth",
    )


def _thinned(items: list[pytest.Item], every: int) -> list[pytest.Item]:
    """Keep the first and about every Nth case of each test, by a hash of its name."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    one_of_each = set(first.values())
    return [i for i in items if i in one_of_each or zlib.crc32(i.nodeid.encode()) % every == 0]


@pytest.hookimpl(tryfirst=True)  # before pytest goes by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark doctests as slow; leave out what `--every` skips, or whose hardware is missing."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.slow)
    items[:] = _thinned(items, config.getoption("every"))
    missing = [mark for mark in _NEEDS if not _can_run(mark)]
    left_out = {m: [i for i in items if i.get_closest_marker(m)] for m in missing}
    config.stash[_LEFT_OUT] = {mark: len(found) for mark, found in left_out.items() if found}
    gone = {item for found in left_out.values() for item in found}
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for mark, count in config.stash.get(_LEFT_OUT, {}).items():
        terminalreporter.write_line(f"left out {count} marked {mark}, which need {_NEEDS[mark]}")

"""Several processes over gloo on the loopback interface, and errors of `initialize`."""

from typing import Any

import jax
import pytest

from tests.parallel.devices import start_two
from tests.refusals import refuses
from unitscale.parallel import initialize

TIMEOUT = 240  # seconds; a busy machine takes a while to import

WORKER = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from unitscale.parallel import all_reduce, batch_share, initialize, make_mesh, shard_batch

assert initialize(timeout=120)
processes, index = jax.process_count(), jax.process_index()
assert len(jax.devices()) == 4
mesh = make_mesh({"data": 4})
rows = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
assert batch_share(mesh) == (index, processes)
local = shard_batch(np.split(rows, processes)[index], mesh)
assert local.shape == rows.shape
f = jax.shard_map(
    lambda g: all_reduce(g[0], "data", small=0), mesh=mesh, in_specs=P("data"), out_specs=P()
)
mean = np.asarray(jax.jit(f)(local).addressable_data(0))
exact = rows.mean(0)

# The shares of a batch make one batch, whatever the processes hold of it.
for axes in ({"data": 2, "tensor": 2}, {"data": 2, "fsdp": 2}, {"tensor": 4}, {"fsdp": 4}):
    mesh = make_mesh(axes)
    share, shares = batch_share(mesh)
    batch = shard_batch(np.split(rows, shares)[share], mesh)
    same = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, P()))
    got = np.asarray(same(batch).addressable_data(0))
    assert sorted(map(tuple, got)) == sorted(map(tuple, rows)), (axes, share, shares)
    assert shares == min(processes, 4 // axes.get("tensor", 1))
print("error", np.linalg.norm(mean - exact) / np.linalg.norm(exact), mean.tobytes().hex()[:64])
"""


@pytest.mark.slow
def test_two_processes() -> None:
    workers = start_two(WORKER, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    try:
        outputs = [worker.communicate(timeout=TIMEOUT) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert not any(worker.returncode for worker in workers), outputs
    lines = [[s for s in out.splitlines() if s.startswith("error")] for out, _ in outputs]
    assert all(own == lines[0] for own in lines)  # the same bits on all
    assert 0 < float(lines[0][0].split()[1]) < 0.04


def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not initialize()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert not initialize(process=0)


WRONG: list[tuple[tuple[Any, ...], str]] = [
    (("localhost:1", 2, None), "process must"),
    (("localhost:1", 2, 2), "processes must be positive"),
    (("localhost:1", 0, 0), "processes must be positive"),
    ((None, 2, 0), "coordinator must"),
    (("localhost", 2, 0), "coordinator must"),
    (("localhost:1", "two", 0), "processes must"),
]
test_refusals = refuses([(ValueError, lambda a=a: initialize(*a), name) for a, name in WRONG])


def test_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX detects what is not given, or reports that it cannot."""
    asked: list[tuple] = []

    def ask(*where: object, **settings: object) -> None:
        asked.append((where, settings))
        if where[1] is None:
            raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", ask)
    with pytest.raises(ValueError, match="detect"):
        initialize(detect=True)
    assert not initialize(processes=2, detect=True, timeout=7, heartbeat=8)  # of this process, one
    settings = {"initialization_timeout": 7, "heartbeat_timeout_seconds": 8}
    assert asked[1] == ((None, 2, None), settings)
    with pytest.raises(ValueError, match="got process -1"):
        initialize(process=-1, detect=True)

"""Two processes over gloo on the loopback interface, and what `initialize` refuses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unitscale.parallel import initialize

ROOT = Path(__file__).parents[2]
TIMEOUT = 240  # seconds; a busy machine takes a while to import

WORKER = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from unitscale.parallel import all_reduce, initialize, make_mesh, shard_batch

assert initialize(timeout=120)
assert jax.process_count() == 2 and len(jax.devices()) == 4
mesh = make_mesh({"data": 4})
rows = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
index = jax.process_index()
local = shard_batch(rows[2 * index : 2 * index + 2], mesh)
assert local.shape == rows.shape
f = jax.shard_map(
    lambda g: all_reduce(g[0], "data", small=0), mesh=mesh, in_specs=P("data"), out_specs=P()
)
mean = np.asarray(jax.jit(f)(local).addressable_data(0))
exact = rows.mean(0)
print("error", np.linalg.norm(mean - exact) / np.linalg.norm(exact), mean.tobytes().hex()[:64])
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes() -> None:
    base = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    base |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "PYTHONPATH": str(ROOT),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=base | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=TIMEOUT) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [w.returncode for w in workers] == [0, 0], outputs[0][1] + outputs[1][1]
    lines = [[s for s in out.splitlines() if s.startswith("error")] for out, _ in outputs]
    assert lines[0] == lines[1]  # the same bits on both
    assert 0 < float(lines[0][0].split()[1]) < 0.04


def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not initialize()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert not initialize(process=0)


WRONG = [
    (("localhost:1", 2, None), "process must be given too; got only coordinator localhost:1, proc"),
    ((None, 2, 0), "coordinator must be given too; got only .*JAX_COORDINATOR_ADDRESS"),
    (("localhost:1", 2, 2), "process must be from 0 to processes - 1; got process 2 of 2"),
    (("localhost:1", 0, 0), "process must be from 0"),
    (("localhost", 2, 0), "coordinator must be 'host:port' of process 0; got 'localhost'"),
    (("localhost:1", "two", 0), "processes must be a whole number; got 'two'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: str(x)[:24])
def test_refusals(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=rf"unitscale\.parallel\.initialize: {message}"):
        initialize(*arguments)

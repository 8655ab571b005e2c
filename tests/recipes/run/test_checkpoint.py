"""Checkpoints are exact, and survive damage and full disks."""

import gc
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.errors import RecipeError
from recipes.run.checkpoint import Checkpoints, Restored
from unitscale.parallel import make_mesh, param_shardings


def make_state(seed: int) -> dict[str, Any]:
    key = jax.random.key(seed)
    return {
        "weights": [jax.random.normal(key, (300, 50)), jnp.arange(4, dtype=jnp.bfloat16)],
        "fp8": jax.random.normal(key, (8,)).astype(jnp.float8_e4m3fn),
        "fp4": jax.random.normal(key, (8,)).astype(jnp.float4_e2m1fn),
        "mask": jnp.array([True, False]),
        "step": jnp.int32(seed),
        "key": key,
        "not a number": jnp.array([jnp.nan, -0.0, jnp.inf]),
    }


def write(checkpoints: Checkpoints, step: int, state: Any, **position: int) -> None:
    checkpoints.save(step, state, position, {})
    checkpoints.wait()


def restore(folder: Path, like: Any, **options: Any) -> Restored:
    restored = Checkpoints(folder, **options).restore(like, lambda _: None)
    assert restored is not None
    return restored


def assert_same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def array_file(folder: Path, step: int) -> Path:
    """Return the file with the data of arrays."""
    files = [path for path in (folder / f"checkpoints/{step}/state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_the_newest_complete_ones_are_kept_and_read_exactly(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", read_only=True).restore(make_state(0)) is None
    assert not list(tmp_path.iterdir())
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(make_state(0)) is None
    for step in (1, 2, 3):
        for _ in range(2):  # the second time there is nothing to do
            checkpoints.save(step, make_state(step), {"next": step}, {"seed": step})
    checkpoints.wait()
    (tmp_path / "checkpoints/4.orbax-checkpoint-tmp-0").mkdir()  # half written
    restored = restore(tmp_path, lambda facts: make_state(facts["seed"] + 1))
    assert (restored.step, restored.position, restored.facts) == (3, {"next": 3}, {"seed": 3})
    assert_same_bits(restored.state, make_state(3))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_onto_another_mesh(tmp_path: Path) -> None:
    state = {"w": jnp.arange(64 * 32.0).reshape(64, 32), "fp8": make_state(3)["fp8"]}
    axes = {"data": 4}, {"fsdp": 2, "tensor": 2}
    meshes = [make_mesh(each, devices=jax.devices()[:4]) for each in axes]
    first, second = (jax.device_put(state, param_shardings(state, mesh)) for mesh in meshes)
    write(Checkpoints(tmp_path), 1, first)
    for like in (second, state):
        restored = restore(tmp_path, jax.tree.map(jnp.zeros_like, like))
        assert_same_bits(restored.state, state)
        assert restored.state["w"].sharding == like["w"].sharding


# Orbax abandons the other reads when it meets the damage, and asyncio warns about them later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        write(checkpoints, step, make_state(step), at=step)
    if damage == "missing":
        shutil.rmtree(tmp_path / "checkpoints/2/state")
    else:
        content = bytearray((file := array_file(tmp_path, 2)).read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert restore(tmp_path, make_state(0), read_only=True).step == 1
    assert sorted(tmp_path.rglob("*")) == before
    said: list[str] = []
    restored = checkpoints.restore(make_state(0), said.append)
    assert restored is not None
    assert (restored.step, restored.position) == (1, {"at": 1})
    assert_same_bits(restored.state, make_state(1))
    (line,) = said
    assert re.match(r"checkpoint of step 2 is damaged: files in .*/checkpoints/2 are missing", line)
    assert "<" not in line  # no handles of Orbax's C++
    assert len(list((tmp_path / "damaged-checkpoints").glob("2-*"))) == 1  # set aside, not deleted
    array_file(tmp_path, 1).write_bytes(b"")
    with pytest.raises(RecipeError, match=r"was damaged \(steps \[1\]\)"):
        restore(tmp_path, make_state(0))
    gc.collect()  # asyncio logs what Orbax left unread, while that is captured still


def test_another_model_is_not_damage(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path), 1, make_state(1))
    other = make_state(0)
    other["weights"][0] = jnp.zeros((300, 60))
    with pytest.raises(RecipeError, match=r"for weights\.0 expected .*300, 60.*got .*300, 50"):
        restore(tmp_path, other)

    def full(facts: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        restore(tmp_path, full)
    del other["fp8"]
    with pytest.raises(RecipeError, match=r"for fp8 expected nothing; got \['float8"):
        restore(tmp_path, other)
    assert (tmp_path / "checkpoints/1").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"cannot use .*file/checkpoints"):
        Checkpoints(tmp_path / "file")


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    """A limit on file size simulates a full disk: writes fail halfway."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1, {"w": jnp.zeros(4)})
    noise = jnp.asarray(np.random.default_rng(0).normal(size=100_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (2, 3):
        message = f"cannot write the checkpoint of step {step}.*of step 1 is untouched; free space"
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with pytest.raises(RecipeError, match=message) as caught:  # noqa: PT012
                checkpoints.save(step, {"w": noise}, {}, {})
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.exit_code == 1
    assert restore(tmp_path, {"w": jnp.ones(4)}).step == 1

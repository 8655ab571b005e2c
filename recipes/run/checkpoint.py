"""Save and restore checkpoints: exact, written completely or not at all, verified by checksums."""

import contextlib
import copy
import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax

from ..errors import RecipeError, Say, refused
from .folder import saved_steps

Facts = dict[str, Any]


class Restored(NamedTuple):
    """The contents of a checkpoint."""

    step: int
    state: Any
    position: Facts
    facts: Facts


class Checkpoints:
    """Manages the newest `keep` checkpoints of a run; `read_only` leaves the disk unchanged."""

    def __init__(self, folder: Path, *, keep: int = 2, read_only: bool = False):
        self._run = folder.absolute()
        self._folder = self._run / "checkpoints"
        self._read_only = read_only
        self._writing: int | None = None  # the step of a write that may not have finished
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=not read_only, read_only=read_only
        )
        with refused(f"train.runs_dir: cannot use {self._folder}", "change its permissions"):
            if not read_only:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    @property
    def what_is_safe(self) -> str:
        """Text for error messages that names the newest complete checkpoint."""
        with contextlib.suppress(RecipeError):  # report the first failure only
            self.wait()
        # Read from disk: Orbax lists a step as soon as its write begins.
        *_, step = 0, *saved_steps(self._run)
        return f"the checkpoint of step {step} is untouched" if step else "there is no checkpoint"

    def save(self, step: int, state: Any, position: Facts, facts: Facts) -> None:
        """Write a checkpoint in the background, unless the step has one."""
        self.wait()
        if step in saved_steps(self._run):
            return
        arrays = _named_arrays(state)
        sums = _checksums(arrays)
        described = {name: [*_shape(array), sums[name]] for name, array in arrays.items()}
        facts = copy.deepcopy({**facts, "arrays": described})
        facts["checksum"] = _text_checksum(position, facts)
        self._writing = step
        with self._failing(step):
            # In the background this is safe: JAX keeps the memory of arrays that Orbax still reads.
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    position=ocp.args.JsonSave(copy.deepcopy(position)),
                    facts=ocp.args.JsonSave(facts),
                ),
            )

    def wait(self) -> None:
        """Wait until the last checkpoint is complete on disk; raise an error if it failed."""
        step, self._writing = self._writing, None
        if step is not None:
            with self._failing(step):
                self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore report a full disk in several ways
            self._writing = None
            reason, *_ = (str(error).strip() or type(error).__name__).splitlines()
            raise RecipeError(
                f"cannot write the checkpoint of step {step} to {self._folder}: {reason[:200]}; "
                f"{self.what_is_safe}; free space or change permissions, then run it again",
                exit_code=1,
            ) from error

    def restore(self, like: Any, say: Say = print) -> Restored | None:
        """Read the newest undamaged checkpoint, structured as `like` or `like(facts)`."""
        self.wait()
        steps = saved_steps(self._run)[::-1]
        for step in steps:
            try:
                return self._read(step, like)
            except (RecipeError, MemoryError, PermissionError, jax.errors.JaxRuntimeError):
                raise  # not damage: the memory of the host or device, or permissions
            except Exception as error:  # Orbax raises errors of many types for damaged files
                place, kind = self._folder / str(step), type(error).__name__
                damage = f"checkpoint of step {step} is damaged: files in {place} are missing, "
                damage += f"cut short or changed ({kind})"
                if jax.process_count() > 1:  # the other processes may not have seen the damage
                    todo = f"remove {place}, then start all processes again"
                    raise RecipeError(f"{damage}; {todo}", exit_code=1) from error
                if not self._read_only:
                    aside = self._run / "damaged-checkpoints" / f"{step}-{time.time_ns()}"
                    aside.parent.mkdir(exist_ok=True)
                    place.rename(aside)
                    self._manager.reload()
                    damage += f"; moved it to {aside}"
                say(f"{damage}; trying the one before")
        if not steps:
            return None
        what = f"every checkpoint in {self._folder} was damaged (steps {steps})"
        raise RecipeError(f"{what}; restore a backup, or train with --fresh", exit_code=1)

    def close(self) -> None:
        with contextlib.suppress(RecipeError):
            self.wait()
        self._manager.close()

    def _read(self, step: int, like: Any) -> Restored:
        folder = self._folder / str(step)
        texts = [(folder / name / "metadata").read_text("utf-8") for name in ("facts", "position")]
        facts, position = map(json.loads, texts)
        checksum = facts.pop("checksum", None)
        known = {name: entry[-1] for name, entry in facts["arrays"].items()}
        is_old = all(isinstance(sum_, int) for sum_ in known.values())  # of version 0.1: unchecked
        if not is_old and checksum != _text_checksum(position, facts):
            raise ValueError("the checksum of position and facts differs")
        shapes = {name: entry[:2] for name, entry in facts.pop("arrays").items()}
        like = like(facts) if callable(like) else like
        wanted = _named_arrays(like)
        for name in sorted(wanted.keys() | shapes.keys()):
            expected = _shape(wanted[name]) if name in wanted else "nothing"
            if (found := shapes.get(name, "nothing")) != expected:
                what = f"the checkpoint of step {step} in {self._folder} is of another model"
                todo = "use the config and the version that wrote it, or --fresh"
                raise RecipeError(f"{what}: for {name} expected {expected}; got {found}; {todo}")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        with ocp.StandardCheckpointer() as reader:
            arrays = reader.restore(folder / "state", abstract)
        if not is_old and known != _checksums(arrays):
            raise ValueError("checksums of its arrays differ")
        leaves, structure = jax.tree.flatten(like)
        found = [arrays[name] for name in wanted]
        for index, leaf in enumerate(leaves):
            if _is_key(leaf):
                impl = jax.random.key_impl(leaf)
                found[index] = jax.random.wrap_key_data(found[index], impl=impl)
        return Restored(step, jax.tree.unflatten(structure, found), position, facts)


def _named_arrays(tree: Any) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            jax.random.key_data(leaf) if _is_key(leaf) else leaf
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shape(array: jax.Array) -> list[Any]:
    return [str(array.dtype), list(array.shape)]


def _text_checksum(*values: Any) -> int:
    return zlib.crc32(json.dumps(values).encode())


def _checksums(arrays: dict[str, jax.Array]) -> dict[str, str]:
    # One at a time: concurrent sums over sharded arrays can deadlock on CPU devices.
    return {name: f"{int(_checksum(array)):08x}" for name, array in arrays.items()}


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Sum MurmurHash3's hashes of all words; changing a single word always changes the sum."""
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    array = array.astype(jnp.float8_e4m3fn) if array.dtype == jnp.float4_e2m1fn else array
    bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{min(8 * array.dtype.itemsize, 32)}"))
    place = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        place = place * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    word = bits.astype(jnp.uint32) ^ place * np.uint32(0x9E3779B1)
    word = (word ^ word >> 16) * np.uint32(0x85EBCA6B)
    word = (word ^ word >> 13) * np.uint32(0xC2B2AE35)
    return jnp.sum(word ^ word >> 16, dtype=jnp.uint32)

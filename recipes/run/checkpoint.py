"""Save and restore checkpoints: bit for bit, complete or absent, and verified by checksums.

A checkpoint holds the array leaves of a pytree under readable names, the position of the data
iterator, and facts about the run. Orbax writes it in the background, each process its own shards,
under a temporary name that it changes at the end. TensorStore does not detect all damage to arrays,
so checksums do, which are computed on the devices. Arrays are restored onto any mesh.
"""

import contextlib
import copy
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax

from ..errors import RecipeError, refused
from .processes import all_texts, is_first, is_lost, whole


class Restored(NamedTuple):
    """A checkpoint that was read."""

    step: int
    state: Any
    position: dict[str, Any]
    facts: dict[str, Any]


class Checkpoints:
    """The newest `keep` checkpoints of a run, in `checkpoints/` of its folder.

    With `read_only` nothing on disk changes, so that a run in training can be read.
    """

    def __init__(self, folder: Path, *, keep: int = 2, read_only: bool = False):
        self._folder = folder.absolute() / "checkpoints"
        self._read_only = read_only
        self._writing: int | None = None  # the step of a write that may be under way
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=not read_only, read_only=read_only
        )
        todo = "free space or change permissions"
        with refused(f"train.runs_dir: cannot use {self._folder}", todo):
            if not read_only:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    @property
    def newest(self) -> int | None:
        """The step of the newest complete checkpoint, damaged or not."""
        return max(self._steps(), default=None)

    def _steps(self) -> list[int]:
        # Read from the disk: Orbax counts a step as soon as its write begins.
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        return [int(name) for name in names if name.isdigit()]

    @property
    def what_is_safe(self) -> str:
        """The checkpoint that is left after a failure, for its message."""
        with contextlib.suppress(RecipeError):  # the failure that the message is about comes first
            self.wait()
        return self.what_is_complete

    @property
    def what_is_complete(self) -> str:
        """The same without waiting for a write under way."""
        step = self.newest
        return (
            f"the checkpoint of step {step} is untouched" if step else "no checkpoint was written"
        )

    def save(
        self,
        step: int,
        state: Any,
        position: dict[str, Any],
        facts: dict[str, Any],
        *,
        wait: bool = True,
    ) -> None:
        """Write a checkpoint of the state, unless the step has one.

        Without `wait` it is written in the background: the state may be changed or donated
        meanwhile, and the next `wait`, `save` or `restore` reports an error. `position` and `facts`
        are JSON values. On errors, such as a full disk, complete checkpoints stay untouched.
        """
        self.wait()
        if step == self.newest:
            return
        arrays = _named_arrays(state)
        sums = _checksums(arrays)
        described = {name: [*_shape(array), sums[name]] for name, array in arrays.items()}
        facts = copy.deepcopy({**facts, "arrays": described})
        facts["checksum"] = _text_checksum(position, facts)
        self._writing = step
        with self._failing(step):
            # JAX does not reuse the memory of an array that Orbax still reads.
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    position=ocp.args.JsonSave(copy.deepcopy(position)),
                    facts=ocp.args.JsonSave(facts),
                ),
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete on the disk, or raise why it is not."""
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
            if is_lost(error):
                raise
            raise RecipeError(
                f"cannot write the checkpoint of step {step} to {self._folder}: "
                f"{_first_line(error)}; {self.what_is_safe}; free space or change permissions, "
                "then run the same command again to resume",
                exit_code=1,
            ) from error

    def restore(self, like: Any, say: Callable[[str], None] = print) -> Restored | None:
        """Read the newest undamaged checkpoint; None if none has been written yet.

        `like` is a pytree of arrays with the structure, shapes, dtypes and shardings to restore, or
        a function from a checkpoint's facts to it. A damaged checkpoint is moved to
        `damaged-checkpoints/`, and `say` is called with a line about it. If all are damaged, or the
        checkpoint is of another model, a RecipeError is raised.
        """
        self.wait()
        steps = sorted(self._steps(), reverse=True)
        for step in steps:
            try:
                return self._read(step, like)
            except RecipeError:
                raise
            except Exception as error:  # a damaged file makes Orbax raise many kinds
                moved = "" if self._read_only else f"moved it to {self._set_aside(step)}; "
                say(
                    f"checkpoint of step {step} is damaged ({_first_line(error)}); {moved}"
                    "trying the one before"
                )
        if steps:
            raise RecipeError(
                f"every checkpoint in {self._folder} was damaged (steps {steps}); start again with "
                "--fresh",
                exit_code=1,
            )
        return None

    def close(self) -> None:
        """Wait for a write under way, whose errors `wait` would have reported."""
        with contextlib.suppress(RecipeError):
            self.wait()
        self._manager.close()

    def _read(self, step: int, like: Any) -> Restored:
        """Read a checkpoint; if one process finds damage, all raise."""
        found: Any = None
        problem: Exception | None = None
        try:
            found = self._read_own(step, like)
        except Exception as error:  # reported to the other processes first
            problem = error
        reasons = all_texts("" if problem is None else _first_line(problem))
        if any(reasons):
            raise problem or ValueError(next(filter(None, reasons)))
        like, arrays, sums_of, known, position, facts = found
        for name, own in sums_of(arrays).items():
            if own != known[name]:
                raise ValueError(f"the checksum of {name} differs")
        return Restored(step, _rebuild(like, arrays), position, facts)

    def _read_own(self, step: int, like: Any) -> tuple[Any, ...]:
        """Read this process's part of a checkpoint, without waiting for the other processes."""
        folder = self._folder / str(step)
        texts = [(folder / name / "metadata").read_text("utf-8") for name in ("facts", "position")]
        facts, position = map(json.loads, texts)
        checksum = facts.pop("checksum", None)  # version 0.1 wrote none
        if checksum is not None and checksum != _text_checksum(position, facts):
            raise ValueError("the checksum of position and facts differs")
        described = facts.pop("arrays")
        like = like(facts) if callable(like) else like
        wanted = _named_arrays(like)
        for name in sorted(wanted.keys() | described.keys()):
            expected = _shape(wanted[name]) if name in wanted else "nothing"
            found = described[name][:2] if name in described else "nothing"
            if found != expected:
                raise RecipeError(
                    f"the checkpoint of step {step} in {self._folder} is of another model: for "
                    f"{name} expected {expected}; got {found}; use the config and the version "
                    "that wrote it, or --fresh"
                )
        process = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"{process}"
        )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        with ocp.StandardCheckpointer(multiprocessing_options=alone) as reader:
            arrays = reader.restore(folder / "state", abstract)
        known = {name: entry[-1] for name, entry in described.items()}
        return like, arrays, _crc32s if checksum is None else _checksums, known, position, facts

    def _set_aside(self, step: int) -> Path:
        place = self._folder.parent / "damaged-checkpoints" / str(step)
        if is_first():
            while place.exists():
                place = place.with_name(place.name + "-again")
            place.parent.mkdir(exist_ok=True)
            (self._folder / str(step)).rename(place)
        all_texts("moved")  # no process looks at the folder before
        self._manager.reload()
        return place


def _named_arrays(tree: Any) -> dict[str, jax.Array]:
    """Array leaves by path; PRNG keys as integers."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            jax.random.key_data(leaf) if _is_key(leaf) else leaf
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _rebuild(like: Any, arrays: dict[str, jax.Array]) -> Any:
    leaves, structure = jax.tree.flatten(like)
    restored = [
        jax.random.wrap_key_data(arrays[name], impl=jax.random.key_impl(leaf))
        if _is_key(leaf)
        else arrays[name]
        for leaf, name in zip(leaves, _named_arrays(like), strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shape(array: jax.Array) -> list[Any]:
    return [str(array.dtype), list(array.shape)]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _text_checksum(*values: Any) -> int:
    return zlib.crc32(json.dumps(values).encode())


def _checksums(arrays: dict[str, jax.Array]) -> dict[str, str]:
    # One after another: devices that share a processor may wait for each other in different sums.
    return {name: f"{int(_checksum(array)):08x}" for name, array in arrays.items()}


def _crc32s(arrays: dict[str, jax.Array]) -> dict[str, int]:
    """The checksums of version 0.1, of whole arrays on the host."""
    return {name: zlib.crc32(np.asarray(whole(x)).tobytes()) for name, x in arrays.items()}


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Sum the hashes of all words of 8, 16 or 32 bits.

    Changing one word always changes the sum: its hash, with its index, is a bijection (the
    finalizer of MurmurHash3). Of other changes one in 2^32 goes unnoticed.
    """
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{min(8 * array.dtype.itemsize, 32)}"))
    place = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        place = place * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    word = bits.astype(jnp.uint32) ^ place * np.uint32(0x9E3779B1)
    word = (word ^ word >> 16) * np.uint32(0x85EBCA6B)
    word = (word ^ word >> 13) * np.uint32(0xC2B2AE35)
    return jnp.sum(word ^ word >> 16, dtype=jnp.uint32)

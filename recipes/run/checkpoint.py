"""Checkpoints that a run resumes from bit for bit, and that outlive a crash while one is written.

A checkpoint is the array leaves of a pytree under readable names, the position of the data
iterator, and facts about the run. Orbax writes it while training goes on, every process its shards,
under another name, and renames it when complete. TensorStore does not notice all damage to array
data, so that checksums, computed where the arrays lie, tell a damaged checkpoint apart. Arrays are
read back onto any mesh, as they are asked for.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from ..errors import RecipeError, refused
from .checksums import checksums, crc32s, text_checksum
from .processes import all_texts, is_first, is_lost

Tree = TypeVar("Tree")


class Restored(NamedTuple):
    """What `Checkpoints.restore` gives back."""

    step: int
    state: Any
    position: dict[str, Any]
    facts: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
      folder: The run's folder; checkpoints go to `checkpoints/` in it.
      keep: How many of the newest to keep.
      read_only: Changes nothing on disk, so that a run that is still training can be read.

    Raises:
      RecipeError: The folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int = 2, read_only: bool = False):
        self._folder = folder.absolute() / "checkpoints"
        self._keep = keep
        self._read_only = read_only
        self._writing: int | None = None  # the step of a write that may be under way
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=not self._read_only,
            read_only=self._read_only,
        )
        todo = "free space or change permissions"
        with refused(f"train.runs_dir: cannot use {self._folder}", todo):
            if not self._read_only:
                self._folder.mkdir(parents=True, exist_ok=True)
            return ocp.CheckpointManager(self._folder, options=options)

    @property
    def newest(self) -> int | None:
        """The step of the newest complete checkpoint, damaged or not."""
        if not self._folder.is_dir():
            return None
        # Read from the disk: Orbax counts a step as soon as its write begins.
        names = (path.name for path in self._folder.iterdir())
        return max((int(name) for name in names if name.isdigit()), default=None)

    @property
    def what_is_safe(self) -> str:
        """For a message about a failure: the checkpoint that it left alone."""
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
        """Writes a checkpoint of the state as it is now.

        Args:
          step: Steps done; a step already saved is not written again.
          state: A pytree of arrays, PRNG keys included.
          position: The data iterator's state, plain JSON values.
          facts: More plain JSON values, given back by `restore`.
          wait: Returns when it is complete. Otherwise it is written behind the caller's back, who
            may change or donate the state meanwhile, and `wait` tells how that ended. One is
            written at a time: this waits for the one before.

        Raises:
          RecipeError: The disk is full or cannot be written, now or for the checkpoint before.
            Complete checkpoints are untouched.
        """
        self.wait()
        if step == self.newest:
            return
        arrays = _named_arrays(state)
        sums = checksums(arrays)
        described = {name: [*_shape(array), sums[name]] for name, array in arrays.items()}
        facts = copy.deepcopy({**facts, "arrays": described})
        facts["checksum"] = text_checksum(position, facts)
        self._writing = step
        with self._failing(step):
            # JAX does not reuse the memory of an array that Orbax has on the host still.
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
        """Returns when what was saved is complete on the disk.

        Raises:
          RecipeError: It could not be written. Earlier checkpoints are untouched.
        """
        step, self._writing = self._writing, None
        if step is None:
            return
        with self._failing(step):
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Turns what a write raises into a message."""
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
        """Reads the newest checkpoint that is whole.

        A damaged one is moved to `damaged-checkpoints/` in the run's folder, with a word about it,
        and the one before is read.

        Args:
          like: A pytree of arrays with the structure, shapes and dtypes of the saved state, which
            lie where the restored ones shall; or a function from a checkpoint's facts to it.
          say: Called with a line for each damaged checkpoint.

        Returns:
          The checkpoint, or None when none has been written yet.

        Raises:
          RecipeError: Every checkpoint is damaged, or was written by a different model.
        """
        self.wait()
        damaged = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return self._read(step, like)
            except RecipeError:
                raise
            except Exception as error:  # whatever a cut or altered file makes Orbax raise
                damaged.append(step)
                moved = "" if self._read_only else f"moved it to {self._set_aside(step)}; "
                say(
                    f"checkpoint of step {step} is damaged ({_first_line(error)}); {moved}"
                    "trying the one before"
                )
        if damaged:
            raise RecipeError(
                f"every checkpoint in {self._folder} was damaged (steps {damaged}); "
                "start again with --fresh",
                exit_code=1,
            )
        return None

    def close(self) -> None:
        """Waits for a write under way; whether it failed, `wait` tells before."""
        with contextlib.suppress(RecipeError):
            self.wait()
        self._manager.close()

    def _read(self, step: int, like: Any) -> Restored:
        """The checkpoint of a step; where one process finds damage, all raise."""
        found: Any = None
        problem: Exception | None = None
        try:
            found = self._read_own(step, like)
        except Exception as error:  # whatever a cut or altered file makes Orbax raise
            problem = error
        reasons = all_texts("" if problem is None else _first_line(problem))
        if any(reasons):
            raise problem or ValueError(next(filter(None, reasons)))
        like, arrays, sums_of, known, position, facts = found
        for name, found in sums_of(arrays).items():
            if found != known[name]:
                raise ValueError(f"the checksum of {name} differs")
        return Restored(step, _rebuild(like, arrays), position, facts)

    def _read_own(self, step: int, like: Any) -> tuple[Any, ...]:
        """What this process reads of a checkpoint, without waiting for the others."""
        process = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"{process}"
        )
        options = ocp.CheckpointManagerOptions(read_only=True, multiprocessing_options=alone)
        with ocp.CheckpointManager(self._folder, options=options) as manager:

            def item(**args: Any) -> Any:
                (name,) = args
                return manager.restore(step, args=ocp.args.Composite(**args))[name]

            facts = item(facts=ocp.args.JsonRestore())
            position = item(position=ocp.args.JsonRestore())
            checksum = facts.pop("checksum", None)  # version 0.1 wrote none
            if checksum is not None and checksum != text_checksum(position, facts):
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
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
            arrays = item(state=ocp.args.StandardRestore(abstract))
            known = {name: told[-1] for name, told in described.items()}
            sums_of = crc32s if checksum is None else checksums
            return like, arrays, sums_of, known, position, facts

    def _set_aside(self, step: int) -> Path:
        place = self._folder.parent / "damaged-checkpoints" / str(step)
        if is_first():
            while place.exists():
                place = place.with_name(place.name + "-again")
            place.parent.mkdir(exist_ok=True)
            (self._folder / str(step)).rename(place)
        all_texts("moved")  # none looks at the folder before
        self._manager.close()
        self._manager = self._open()
        return place


def _named_arrays(tree: Any) -> dict[str, jax.Array]:
    """Array leaves by path; PRNG keys as the integers they are made of."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    return {name: _plain(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


def _rebuild(like: Tree, arrays: dict[str, jax.Array]) -> Tree:
    leaves, structure = jax.tree.flatten(like)
    restored = [
        jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array
        for leaf, array in zip(leaves, (arrays[name] for name in _named_arrays(like)), strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def _plain(leaf: Any) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shape(array: jax.Array) -> list[Any]:
    return [str(array.dtype), list(array.shape)]


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]

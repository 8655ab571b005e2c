"""Count what a reader of the project meets: code that runs, public names, keys of configs, lines.

    pip install -e ".[test]"
    python .ci/count.py

Counts files and functions of `unitscale/` that run, imports aside, in an FP8 `nn.Dense` forward and
backward, in `scalify` of a product and a matmul, and in a step of a scaled Adam.
"""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from recipes.config.run import section_of, valid_keys
from recipes.registry import RECIPES
from unitscale import nn, optim, scalify

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "unitscale")
X = jnp.ones((4, 8))


LAYER = nn.Dense(8, 8, policy="fp8", rngs=nnx.Rngs(0))
ADAM = optim.scaled(optax.adam(1e-3))
PARAMS = ADAM.scale_params({"w": X})
STATE = ADAM.init(PARAMS)
CALLS: dict[str, Callable[[], Any]] = {
    "nn.Dense": lambda: nnx.grad(lambda layer, x: layer(x).value.sum())(LAYER, X),
    "scalify": lambda: scalify(lambda a, b: (a * 2.5 * a) @ b)(X, X.T),
    "optim.scaled": lambda: ADAM.step(PARAMS, STATE, {"w": X}),
}


def run_by(function: Callable[[], Any]) -> tuple[int, int]:
    """Return the number of the library's files and functions that run in a call."""
    met = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            met.add((code.co_filename, code.co_qualname))

    jax.clear_caches()
    sys.setprofile(note)
    function()
    sys.setprofile(None)
    return len({file for file, _ in met}), len(met)


def public_names() -> set[tuple[str, str]]:
    """Return the packages' names for users: imported before "For the other packages"."""
    found = set()
    for path in sorted(Path(PACKAGE).rglob("__init__.py")):
        text, _, _ = path.read_text("utf-8").partition("# For the other packages")
        for node in ast.parse(text).body:
            names = [n.asname or "_" for n in getattr(node, "names", ())]
            found |= {(path.parent.name, name) for name in names if name[0] != "_"}
    return found


for name, call in CALLS.items():
    call()  # import what is imported when first used
    print(name, "runs {} files, {} functions".format(*run_by(call)))
names = public_names()
tops, inner = ({n for p, n in names if (p == "unitscale") is top} for top in (True, False))
print(f"{len(names) - len(tops & inner)} public names; the top level repeats {len(tops & inner)}")
keys = {k for r in RECIPES.values() for k, f in valid_keys(r) if section_of(f) is None}
print(f"{len(keys)} keys of configs")
for top in ("unitscale", "recipes", "tests"):
    files = list((ROOT / top).rglob("*.py"))
    lines = sum(len(p.read_text("utf-8").splitlines()) for p in files)
    print(f"{top}: {lines:,} lines, {len(files)} files")

"""The rules of the house hold in this repository, and each of them can fail.

Every check of `tests/architecture.py` runs on this repository, where it must find nothing, and on a
small sound repository into which one mistake is planted, where it must find that mistake.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import unitscale
from tests import architecture
from tests.architecture import CHECKS, LIBRARY, ROOT, Tree

Check = Callable[[Tree], Iterator[str]]


@pytest.fixture(scope="module")
def repository() -> Tree:
    return Tree(ROOT)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_repository(check: Check, repository: Tree) -> None:
    complaints = list(check(repository))
    assert not complaints, "\n" + "\n".join(complaints)


def test_every_package_of_the_graph_is_parsed(repository: Tree) -> None:
    """The checks above saw the code: an empty tree has no complaints either."""
    packages = {p.parent.name for p in (ROOT / LIBRARY).glob("*/__init__.py")}
    assert {m.layer for m in repository.library} == packages | {""}
    assert sum(1 for m in repository.library for _ in m.edges()) > 2 * len(repository.library)


def test_help_answers_for_every_public_function_and_class() -> None:
    """The docstring that a parser sees is the one that `help` shows."""
    names = [f"{LIBRARY}.{p.parent.name}" for p in (ROOT / LIBRARY).glob("*/__init__.py")]
    for package in map(importlib.import_module, [LIBRARY, *names]):
        for name, value in vars(package).items():
            if not name.startswith("_") and (inspect.isclass(value) or inspect.isroutine(value)):
                assert inspect.getdoc(value), f"{package.__name__}.{name} has no docstring"


def test_version_is_that_of_the_package() -> None:
    assert (
        unitscale.__version__
        == tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    )


SOUND = {
    "unitscale/__init__.py": """
        'The library.'
        from .core import double as double
        __version__ = "0"
    """,
    "unitscale/core/__init__.py": """
        'Core.'
        from ._double import LIMIT as LIMIT, double as double
    """,
    "unitscale/core/_double.py": """
        LIMIT = 2
        'The most.'
        def double(x):
            'Return x + x.'
            return x**0.5 + x**-1
    """,
    "unitscale/core/_compat.py": """
        from jax._src import core as core
    """,
    "unitscale/rules/__init__.py": """
        'Rules.'
        from ._factor import factor as factor
    """,
    "unitscale/rules/_factor.py": """
        def factor(n):
            'Return the factor.'
            return n**-0.5
    """,
    "unitscale/nn/__init__.py": """
        'Layers.'
        from . import init as init
        from ._dense import Dense as Dense
    """,
    "unitscale/nn/init.py": """
        'Initializers.'
        import math
        def one():
            return math.sqrt(1)
    """,
    "unitscale/nn/_dense.py": """
        from flax import nnx
        from ..core import double
        class Dense(nnx.Module):
            'A layer.'
            assert double, "double is a function"
    """,
    "unitscale/optim/__init__.py": """
        'Optimizers.'
        import optax
    """,
    "recipes/__init__.py": "",
    "recipes/train.py": """
        import optax
        import unitscale.nn
        from flax import nnx
        from unitscale import __version__, core
        from ._loop import loop
        x = core.double(unitscale.nn.Dense)._private
    """,
    "recipes/_loop.py": """
        def loop():
            import jax
    """,
    "tests/core/test_double.py": "",
    "tests/core/test_compat.py": "",
    "tests/rules/test_factor.py": "",
    "tests/nn/test_init.py": "",
    "tests/nn/test_dense.py": "",
}
SOUND = {name: textwrap.dedent(text).lstrip() for name, text in SOUND.items()}
INIT, DOUBLE, TRAIN = "unitscale/core/__init__.py", "unitscale/core/_double.py", "recipes/train.py"
# check, file, what is added at its end (None: the file is removed), and the complaint.
MISTAKES = [
    (
        "upward_edge",
        DOUBLE,
        "from ..rules import factor",
        r"_double.py:\d+: 'core' may not import unitscale.rules.factor",
    ),
    ("upward_edge", DOUBLE, "from .. import nn", "'core' may not import unitscale.nn"),
    (
        "upward_edge",
        DOUBLE,
        "import unitscale.nn._dense as d",
        "may not import unitscale.nn._dense",
    ),
    (
        "upward_edge",
        DOUBLE,
        "if TYPE_CHECKING:\n    from ..nn import Dense",
        "may not import unitscale.nn.Dense",
    ),
    ("upward_edge", DOUBLE, "import recipes.train", "may not import recipes.train"),
    ("upward_edge", DOUBLE, "from ._gone import x", "may not import unitscale.core._gone.x"),
    ("upward_edge", "unitscale/rules/_factor.py", "import unitscale", "may not import unitscale$"),
    (
        "upward_edge",
        "unitscale/rules/_factor.py",
        "from .. import double",
        "may not import unitscale.double",
    ),
    (
        "upward_edge",
        "unitscale/optim/__init__.py",
        "from ..nn import Dense",
        "'optim' may not import",
    ),
    (
        "upward_edge",
        "unitscale/__init__.py",
        "from .nn import Dense",
        "'' may not import unitscale.nn.Dense",
    ),
    ("upward_edge", "unitscale/extra/__init__.py", "", "package 'extra' is not in the table"),
    (
        "cycle",
        DOUBLE,
        "from . import LIMIT as L",
        r"unitscale.core -> unitscale.core._double -> unitscale.core$",
    ),
    (
        "cycle",
        DOUBLE,
        "from ..nn import Dense",
        "in a circle: .*-> unitscale.nn -> unitscale.nn._dense -> unitscale.core$",
    ),
    (
        "cycle",
        "recipes/_loop.py",
        "from . import train",
        "recipes._loop -> recipes.train -> recipes._loop",
    ),
    (
        "deferred_import",
        "unitscale/rules/_factor.py",
        "def f():\n    from ..core import double",
        "inside a function",
    ),
    (
        "deferred_import",
        "unitscale/rules/_factor.py",
        "async def f():\n    import unitscale.core",
        "inside a function",
    ),
    (
        "deferred_import",
        DOUBLE,
        "importlib.import_module('unitscale.nn')",
        "unitscale.nn is imported inside",
    ),
    (
        "deferred_import",
        DOUBLE,
        "import_module('.nn', 'unitscale')",
        "unitscale.nn is imported inside",
    ),
    (
        "absolute_import",
        "unitscale/rules/_factor.py",
        "from unitscale.core import double",
        "unitscale.core.double relatively",
    ),
    ("misplaced_dependency", DOUBLE, "import flax.nnx", "flax.nnx belongs in unitscale.nn or"),
    (
        "misplaced_dependency",
        DOUBLE,
        "def f():\n    from flax import nnx",
        "flax.nnx belongs in unitscale.nn or",
    ),
    (
        "misplaced_dependency",
        "unitscale/nn/_dense.py",
        "import optax",
        "optax belongs in unitscale.optim",
    ),
    (
        "misplaced_dependency",
        DOUBLE,
        "from jax._src import core",
        "jax._src.core belongs in unitscale.core._compat",
    ),
    (
        "misplaced_dependency",
        DOUBLE,
        "from jax import _src",
        "jax._src belongs in unitscale.core._compat",
    ),
    (
        "misplaced_dependency",
        TRAIN,
        "import jax\njax._src.core",
        "jax._src belongs in unitscale.core._compat",
    ),
    (
        "private_name_in_recipes",
        TRAIN,
        "from unitscale.core._double import double",
        "_double.double is not a public",
    ),
    (
        "private_name_in_recipes",
        TRAIN,
        "from unitscale.nn import _dense",
        "unitscale.nn._dense is not a public",
    ),
    (
        "private_name_in_recipes",
        TRAIN,
        "import unitscale.nn._dense",
        "unitscale.nn._dense is not a public",
    ),
    (
        "private_name_in_recipes",
        TRAIN,
        "unitscale.nn._dense.Dense",
        "unitscale.nn._dense is not a public",
    ),
    ("private_name_in_recipes", TRAIN, "core._double.double(1)", "core._double is not a public"),
    (
        "undocumented_name",
        DOUBLE,
        "def double(x):\n    return x",
        "unitscale.core.double has no docstring",
    ),
    ("undocumented_name", DOUBLE, "LIMIT = 3", "unitscale.core.LIMIT has no docstring"),
    (
        "undocumented_name",
        DOUBLE,
        "LIMIT: int = 3\nprint(1)",
        "unitscale.core.LIMIT has no docstring",
    ),
    ("undocumented_name", DOUBLE, "class double:\n    x = 1", "unitscale.double has no docstring"),
    (
        "undocumented_name",
        INIT,
        "from ._double import triple as triple",
        "unitscale.core.triple has no docstring",
    ),
    ("undocumented_name", INIT, "def f(): ...", "unitscale.core.f has no docstring"),
    (
        "undocumented_name",
        INIT,
        "from . import _compat as compat",
        "unitscale.core.compat has no docstring",
    ),
    ("undocumented_name", "unitscale/extra/__init__.py", "", "unitscale.extra has no docstring"),
    (
        "untested_module",
        "tests/core/test_double.py",
        None,
        "expected its test in tests/core/test_double.py",
    ),
    ("untested_module", "unitscale/_new.py", "", "expected its test in tests/test_new.py"),
    ("scaling_rule_outside_rules", DOUBLE, "y = x ** -0.5", r"x \*\* \(-0.5\) is a scaling rule"),
    ("scaling_rule_outside_rules", DOUBLE, "y = x ** (-1 / 2)", "is a scaling rule"),
    ("scaling_rule_outside_rules", DOUBLE, "y = x ** -(1 / 2)", "is a scaling rule"),
    ("scaling_rule_outside_rules", DOUBLE, "y = 1 / x ** 0.5", "is a scaling rule"),
    ("scaling_rule_outside_rules", DOUBLE, "y = math.pow(x, -0.5)", "is a scaling rule"),
    ("scaling_rule_outside_rules", DOUBLE, "y = pow(x, -0.5)", "is a scaling rule"),
    ("long_file", DOUBLE, "x = 1\n" * 396, "_double.py: 401 lines; past 400"),
    ("long_file", "tests/core/test_double.py", "x = 1\n" * 401, "test_double.py: 401 lines"),
    ("bare_assert", DOUBLE, "assert LIMIT", "states the invariant"),
]


def plant(root: Path, mistake: tuple[str, str | None] | None = None) -> Tree:
    """Write the sound repository with text added to one file, or with that file removed."""
    files: dict[str, str | None] = dict(SOUND)
    if mistake:
        name, added = mistake
        files[name] = None if added is None else (SOUND.get(name, "") + added)
    for name, text in files.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
    return Tree(root)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_sound_repository_has_no_complaints(check: Check, tmp_path: Path) -> None:
    assert list(check(plant(tmp_path))) == []


@pytest.mark.parametrize(("name", "file", "added", "complaint"), MISTAKES)
def test_a_mistake_is_found(
    name: str, file: str, added: str | None, complaint: str, tmp_path: Path
) -> None:
    complaints = list(getattr(architecture, name)(plant(tmp_path, (file, added))))
    assert any(re.search(complaint, c) for c in complaints), complaints


def test_every_check_has_a_mistake_that_it_finds() -> None:
    assert {check.__name__ for check in CHECKS} == {name for name, *_ in MISTAKES}


def test_an_exemption_for_a_module_that_is_gone_is_found(
    monkeypatch: pytest.MonkeyPatch, repository: Tree
) -> None:
    monkeypatch.setitem(architecture.UNTESTED, "unitscale/core/_gone.py", "for this test")
    complaints = list(architecture.untested_module(repository))
    assert "unitscale/core/_gone.py: exempted from a test, but is not there" in complaints

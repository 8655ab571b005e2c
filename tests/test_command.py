"""The console command finds the recipes, or says what they need."""

import importlib
import sys
import types

import pytest

from unitscale import command


def test_the_recipes_of_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recipes.cli", types.SimpleNamespace(main=lambda: 7))
    assert command.main() == 7


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name, name="typer")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert command.main() == 2
    assert 'need typer, which is not installed; pip install "unitscale[recipes]"' in (
        capsys.readouterr().err
    )

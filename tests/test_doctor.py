"""Reports of `python -m unitscale.doctor` about working and broken machines."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Spec

from recipes.bench.aot import compile_h200
from unitscale import doctor
from unitscale.doctor import EXTRAS, SHAPES, Finding, fp8_matmul, report
from unitscale.quant import Fp8Report, check_fp8

ROOT = Path(__file__).parents[1]


def has(monkeypatch: pytest.MonkeyPatch, requires: list[str], **versions: str) -> None:
    """Pretend that unitscale requires packages, and that these versions are installed."""
    installed = [SimpleNamespace(name=n, version=v) for n, v in versions.items()]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)


@pytest.mark.slow
def test_a_machine_in_order() -> None:
    """Run it in a process without Flax and optax, which only unitscale.nn and optim need."""
    hidden = "sys.modules['flax'] = sys.modules['optax'] = None"
    code = f"import sys; {hidden}; import unitscale.doctor; sys.exit(unitscale.doctor.main())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    for words in (f"jax {jax.__version__}", "correct, in wider arithmetic", "All checks passed."):
        assert words in ran.stdout


def _raise() -> None:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("matmul", "says"),
    [
        (lambda x, w: x @ w * 1.01, "wrong: relative error"),
        (lambda x, w: x @ w * jnp.nan, "wrong: relative error nan"),
        (lambda x, w: jax.pure_callback(_raise, Spec((128, 128), x.dtype)), "failed: "),
        (None, "not an FP8 kernel"),
    ],
    ids=["wrong", "nan", "raises", "a GPU without its kernels"],
)
def test_a_wrong_matmul(matmul: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jax.local_devices()[:1]
    empty = Fp8Report(matmuls=(), amax_reductions=0, casts=0, transposes=0)
    monkeypatch.setattr(jax, "local_devices", lambda: first)
    if matmul is None:
        monkeypatch.setattr(doctor, "_has_kernels", lambda device: True)
        monkeypatch.setattr(doctor, "check_fp8", lambda program: empty)
    else:
        monkeypatch.setattr(doctor, "fp8_matmul", matmul)
    _, finding = doctor._devices()
    assert finding.failed
    assert finding.todo
    assert says in finding.text


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", _raise)
    (finding,) = doctor._devices()
    assert finding.failed
    assert "no such kernel" in finding.text
    assert "JAX_PLATFORMS" in finding.todo


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["jax>=0.10.2", "flax>=0.12.8", "optax>=0.2.8", "ml_dtypes>=0.5.4"]
    has(monkeypatch, requires, unitscale="1", jax="0.9.9", optax="0.10.dev1", ml_dtypes="0.5.4.1")
    found = {f.text: f for f in doctor._versions()}
    old = found["jax 0.9.9 is older than 0.10.2, which unitscale needs"]
    assert (old.failed, old.todo) == (True, 'pip install -U "jax>=0.10.2"')
    missing = found["flax is missing"]
    assert (missing.failed, missing.todo) == (False, "pip install flax")
    assert not found["optax 0.10.dev1"].failed
    assert not found["ml_dtypes 0.5.4.1"].failed


def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["typer>=0.16; extra == 'recipes'", "datasets>=3; extra == 'hf'", "jax>=0.10.2"]
    lines += ['pyarrow>=18; extra == "hf"']
    has(monkeypatch, lines, unitscale="1", typer="1.0", pyarrow="18.1")
    recipes, hf, *_ = doctor._extras()
    assert recipes == Finding("extras", "recipes: installed")
    assert (hf.text, hf.failed) == ("hf: datasets not installed", False)
    assert 'pip install -e ".[hf]"' in hf.todo
    has(monkeypatch, [])
    assert {f.text for f in doctor._extras()} == {f"{extra}: unknown" for extra in EXTRAS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(EXTRAS) <= project["optional-dependencies"].keys()


def test_a_report_ends_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        Finding("a", "fine"),
        Finding("a", "bad", True, "repair it"),
        Finding("b", "so", todo="repair it"),
    ]
    last = report(findings).splitlines()[-4:]
    assert last == ["what to do", "  repair it", "", "1 of the checks failed."]
    monkeypatch.setattr(doctor, "_devices", lambda: findings[1:2])
    assert doctor.main() == 1
    assert "1 of the checks failed." in capsys.readouterr().out


@pytest.mark.h200
def test_the_matmul_is_an_fp8_kernel_of_an_h200() -> None:
    x, w = (Spec(shape, jnp.float32) for shape in SHAPES)
    assert check_fp8(compile_h200(fp8_matmul, x, w))


@pytest.mark.gpu
def test_a_gpu_is_in_order() -> None:
    assert doctor.main() == 0

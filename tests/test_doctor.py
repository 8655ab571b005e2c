"""`python -m unitscale.doctor`: what it says of machines, well and unwell."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Spec

from recipes.bench.aot import compile_h200
from unitscale import doctor
from unitscale.doctor import EXTRAS, SHAPES, Finding, diagnose, fp8_product, kernels_of, report
from unitscale.quant import Fp8Report, check_fp8

ROOT = Path(__file__).parents[1]
FOR_DEVELOPERS = {"all", "test", "peers", "mutation", "dev"}


def section(name: str) -> list[Finding]:
    return [finding for finding in diagnose() if finding.section == name]


def versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    """Makes packages have other versions, or none."""
    true = importlib.metadata.version

    def version(name: str) -> str:
        found = changed[name] if name in changed else true(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def requires(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(lines))


@pytest.fixture
def few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    first = jax.local_devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda: first)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the driver of an NVIDIA GPU shows."""
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path)
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    yield
    jax.config.update("jax_platforms", before)


def test_a_machine_that_is_well() -> None:
    """In a process of its own, without Flax and optax: only unitscale.nn and optim need them."""
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
    for words in (f"jax {jax.__version__}", "multiplied in wider arithmetic", "All checks passed."):
        assert words in ran.stdout


@pytest.mark.parametrize(
    ("kind", "capability", "says"),
    [
        ("cpu", 0.0, "multiplied in wider arithmetic"),
        ("tpu", 0.0, "not known"),
        ("cuda", 8.0, r"no FP8 kernels: compute capability 8.0 < 8.9"),
        ("cuda", 8.9, r"^FP8 kernels; block scales \(mxfp8\) are emulated"),
        ("cuda", 9.0, r"^FP8 kernels; block scales \(mxfp8\) are emulated"),
        ("cuda", 10.0, r"^FP8 kernels, with block scales \(mxfp8\) too"),
        ("cuda", 12.0, r"^FP8 kernels, with block scales \(mxfp8\) too"),
    ],
)
def test_kernels_by_compute_capability(kind: str, capability: float, says: str) -> None:
    assert re.search(says, kernels_of(kind, capability))


@pytest.mark.usefixtures("few_devices")
def test_the_product_of_a_device() -> None:
    (finding,) = section("FP8 product")
    assert not finding.failed
    assert finding.text.startswith(str(jax.local_devices()[0]))


@pytest.mark.usefixtures("few_devices")
@pytest.mark.parametrize(
    ("product", "says"),
    [
        (lambda x, w: x @ w * 1.01, r"FP8 kernels may err by 0.001"),
        (lambda x, w: x @ w * jnp.nan, r"nan from float64"),
        (lambda x, w: jax.pure_callback(_raise, Spec((128, 128), x.dtype)), r"failed: "),
    ],
    ids=["wrong", "nan", "raises"],
)
def test_a_product_that_is_wrong(
    product: Callable[..., Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "fp8_product", product)
    (finding,) = section("FP8 product")
    assert finding.failed
    assert finding.todo
    assert re.search(says, finding.text)


@pytest.mark.usefixtures("few_devices")
def test_a_gpu_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that should have FP8 kernels and cuDNN attention, and gets neither."""
    empty = Fp8Report(matmuls=(), amax_reductions=0, casts=0, transposes=0)
    monkeypatch.setattr(doctor, "_capability", lambda device: 9.0)
    monkeypatch.setattr(doctor, "check_fp8", lambda program: empty)
    found = {f.section: f for f in diagnose()}
    assert found["FP8 product"].failed
    assert "right, but not an FP8 kernel" in found["FP8 product"].text
    assert not found["cuDNN attention"].failed
    assert "jax[cuda13]" in found["cuDNN attention"].todo


def _raise() -> None:
    raise RuntimeError("no such kernel")


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

    monkeypatch.setattr(jax, "local_devices", none)
    found = diagnose()
    (finding,) = (f for f in found if f.section == "devices")
    assert finding.failed
    assert finding.text == "JAX finds no device: Unable to initialize backend 'cuda'"
    assert "JAX_PLATFORMS" in finding.todo
    assert not any(f.section == "cuDNN attention" for f in found)


@pytest.mark.usefixtures("few_devices", "driver")
@pytest.mark.parametrize(("asked", "failed"), [("cpu", False), (None, True)])
def test_a_gpu_that_is_not_used(asked: str | None, failed: bool) -> None:
    """Where the user asked for the CPU, it is no failure."""
    jax.config.update("jax_platforms", asked)
    finding = section("devices")[-1]
    assert finding.text.startswith("there is an NVIDIA GPU that JAX does not use")
    assert finding.failed == failed
    assert ("unset JAX_PLATFORMS" if asked else "jax[cuda13]") in finding.todo


@pytest.mark.usefixtures("few_devices")
def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    requires(monkeypatch, "jax>=0.10.2", "flax>=0.12.8", "optax>=0.2.8", "chex>=0.1.92")
    versions(monkeypatch, jax="0.9.9", flax=None, optax="0.10.dev1", chex="0.1.92.post1")
    found = {f.text: f for f in section("versions")}
    old = found["jax 0.9.9 is older than 0.10.2, which unitscale needs"]
    assert (old.failed, old.todo) == (True, 'pip install -U "jax>=0.10.2"')
    missing = found["flax is missing; unitscale.nn and the recipes need it"]
    assert (missing.failed, missing.todo) == (False, "pip install flax")
    assert not found["optax 0.10.dev1"].failed
    assert not found["chex 0.1.92.post1"].failed


@pytest.mark.usefixtures("few_devices")
@pytest.mark.parametrize(
    ("name", "version", "failed"),
    [
        ("jax-cuda13-plugin", "0.7.0", False),
        ("jax_cuda12_plugin", "0.7.0.post1", False),
        ("jax-cuda13-plugin", "0.6.9", True),
        ("jax-cuda13-plugin", "0.7.0.1", True),
        ("jax-rocm7-plugin", "0.6.9", False),
    ],
)
def test_a_plugin(name: str, version: str, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [SimpleNamespace(name=name), SimpleNamespace(name="jax-cuda13-pjrt")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    versions(monkeypatch, jaxlib="0.7.0", **{name: version})
    requires(monkeypatch)
    finding = section("versions")[-1]
    assert finding.text.startswith(f"{name} {version}")
    assert finding.failed == failed
    assert finding.todo == (f'pip install "{name}==0.7.0"' if failed else "")


@pytest.mark.usefixtures("few_devices")
def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("typer>=0.16; extra == 'recipes'", "datasets>=3; extra == 'hf'", "jax>=0.10.2")
    requires(monkeypatch, *lines, 'pyarrow>=18; extra == "hf"')
    versions(monkeypatch, typer="1.0", datasets=None, pyarrow="18.1")
    recipes, hf = section("extras")
    assert recipes.text == f"recipes ({EXTRAS['recipes']}): installed"
    assert hf.text == f"hf ({EXTRAS['hf']}): datasets not installed"
    assert 'pip install -e ".[hf]"' in hf.todo
    assert not hf.failed


@pytest.mark.usefixtures("few_devices")
def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    (finding,) = section("extras")
    assert "not installed" in finding.text
    assert not finding.failed


def test_every_extra_for_users_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys() - FOR_DEVELOPERS


def test_a_report_ends_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [
        Finding("a", "fine"),
        Finding("a", "bad", True, "mend it"),
        Finding("b", "so", todo="mend it"),
    ]
    text = report(findings)
    assert text.splitlines()[2:] == [
        *("a", "  fine", "  FAILED: bad", "", "b", "  so", ""),
        *("what to do", "  mend it", "", "1 of the checks failed."),
    ]
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    assert doctor.main() == 1
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.h200
def test_the_product_is_an_fp8_kernel_of_an_h200() -> None:
    x, w = (Spec(shape, jnp.float32) for shape in SHAPES)
    assert check_fp8(compile_h200(fp8_product, x, w))


@pytest.mark.gpu
def test_a_gpu_is_well() -> None:
    assert not any(finding.failed for finding in diagnose())

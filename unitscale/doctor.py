"""`python -m unitscale.doctor`: report versions, devices, FP8 matmuls and installed extras."""

import importlib.metadata as metadata
import platform
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import __version__
from .quant import Dynamic, MatmulConfig, check_fp8, dot_general

EXTRAS = ("recipes", "hf", "libraries", "notebooks")
SHAPES = ((128, 256), (256, 128))  # operands of the FP8 matmul


class Finding(NamedTuple):
    """One line of the report: section, text, whether the check failed, and how to fix it."""

    section: str
    text: str
    failed: bool = False
    todo: str = ""


def _requirements(extra: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield name, installed version ("" if none) and minimum version of each requirement."""
    found = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions()}
    for line in (metadata.requires("unitscale") or []) if "unitscale" in found else []:
        pattern = r"([\w.-]+)(?:.*?>=\s*([\d.]+))?(?:.*extra == ['\"]([\w-]+))?"
        name, least, of = re.findall(pattern, line)[0]
        if of == extra:
            yield name, found.get(name.lower().replace("_", "-"), ""), least


def _versions() -> Iterator[Finding]:
    yield Finding("versions", f"python {platform.python_version()}, jax {jax.__version__}")
    for name, version, least in _requirements():
        numbers, needed = ([int(n) for n in re.findall(r"\d+", v)] for v in (version, least))
        if not version:  # only unitscale.nn needs Flax, and only unitscale.optim needs optax
            yield Finding("versions", f"{name} is missing", todo=f"pip install {name}")
        elif numbers < needed:
            text = f"{name} {version} is older than {least}, which unitscale needs"
            yield Finding("versions", text, True, f'pip install -U "{name}>={least}"')
        else:
            yield Finding("versions", f"{name} {version}")


def _devices() -> Iterator[Finding]:
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        text = f"JAX finds no device: {str(error).splitlines()[0]}"
        yield Finding("devices", text, True, "set JAX_PLATFORMS to a platform of this machine")
        return
    for name, same in groupby(devices, lambda d: f"{d.device_kind} ({d.platform})"):
        yield Finding("devices", f"{len(list(same))} x {name}")
    for device in devices:
        text, todo = _check_matmul(device)
        yield Finding("FP8 matmul", f"{device}: {text}", bool(todo), todo)


def fp8_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply float32 matrices in E4M3, with dynamic scales."""
    return dot_general(MatmulConfig(strategy=Dynamic()))(x, w, (((1,), (0,)), ((), ())))


def _has_kernels(device: Any) -> bool:
    """Return whether a device is an NVIDIA GPU that has FP8 kernels."""
    return "cuda" in device.client.platform_version and float(device.compute_capability) >= 8.9


def _check_matmul(device: Any) -> tuple[str, str]:
    """Compare an FP8 matmul with float64, on inputs that E4M3 represents exactly."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(jnp.float8_e4m3fn).astype(float) for shape in SHAPES)
    try:
        operands = [jax.device_put(a.astype(np.float32), device) for a in (2**12 * x, w / 2**12)]
        program = jax.jit(fp8_matmul).lower(*operands).compile()
        found = np.asarray(program(*operands), np.float64)
    except RuntimeError as error:
        return f"failed: {str(error).splitlines()[0]}", "check the device, its driver and versions"
    worst = float(np.max(np.abs(found - x @ w) / (np.abs(x) @ np.abs(w))))
    allowed = SHAPES[0][1] / 32 * 2.0**-13  # FP8 kernels may sum 32 terms at a time with 13 bits
    if not worst <= allowed:
        text = f"wrong: relative error {worst:.1g}, expected at most {allowed:.1g}"
        return text, "do not train on this device; check its driver and versions"
    if not _has_kernels(device):
        return "correct, in wider arithmetic: no FP8 kernels are known for this device", ""
    if fp8 := check_fp8(program):
        return "correct, in an FP8 kernel", ""
    why = "; ".join(map(str, fp8.matmuls))
    return f"correct, but not an FP8 kernel: {why}", 'pip install -U "jax[cuda13]"'


def _extras() -> Iterator[Finding]:
    for extra in EXTRAS:
        packages = list(_requirements(extra))
        missing = ", ".join(name for name, version, _ in packages if not version)
        state = f"{missing} not installed" if missing else "installed" if packages else "unknown"
        todo = f'pip install -e ".[{extra}]", if you need it' if missing else ""
        yield Finding("extras", f"{extra}: {state}", todo=todo)


def report(findings: list[Finding]) -> str:
    """Return the findings as text, followed by what to do about failures."""
    lines = [f"unitscale {__version__}"]
    for section, group in groupby(findings, lambda f: f.section):
        lines += ["", section, *(f"  {'FAILED: ' * f.failed}{f.text}" for f in group)]
    if todo := dict.fromkeys(f.todo for f in findings if f.todo):
        lines += ["", "what to do", *(f"  {line}" for line in todo)]
    failed = sum(f.failed for f in findings)
    verdict = f"{failed} of the checks failed." if failed else "All checks passed."
    return "\n".join([*lines, "", verdict])


def main() -> int:
    """Print the report for this machine; return 1 if a check failed, else 0."""
    findings = [*_versions(), *_devices(), *_extras()]
    sys.stdout.write(report(findings) + "\n")
    return int(any(f.failed for f in findings))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m unitscale.doctor`: what this machine has for training in 8 and 16 bits.

It prints versions, devices and their FP8 kernels, executes an FP8 product on each device, and ends
with what to do. The exit status is 1 if a check failed, else 0.
"""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import __version__
from .ops import attention_path
from .quant import BLOCK_SCALES_SINCE, FP8_SINCE, Dynamic, MatmulConfig, check_fp8, dot_general

EXTRAS = {
    "recipes": "training from YAML files, and plots",
    "hf": "Parquet files and Hugging Face datasets as text",
    "libraries": "the models of Equinox and Haiku that the documentation shows",
    "notebooks": "the notebooks, in JupyterLab",
    "docs": "building the documentation site",
}
"""What each optional extra is for, as `diagnose` says."""
SHAPES = ((128, 256), (256, 128))
"""Of the operands of the product that `diagnose` executes."""

_GIVES = {"flax": "unitscale.nn and the recipes", "optax": "unitscale.optim and the recipes"}
_DRIVER = Path("/proc/driver/nvidia/gpus")
_INSTALL_CUDA = 'pip install -U "jax[cuda13]"'


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        section: the heading that it stands under.
        text: what was found.
        failed: whether it is a check that failed.
        todo: what to do about it; "" for nothing.

    Example:
        >>> Finding("versions", "jax 0.10.2").failed
        False
    """

    section: str
    text: str
    failed: bool = False
    todo: str = ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with: (0, 10, 2) of "0.10.2.dev3"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _requirements() -> list[tuple[str, str, str]]:
    """Package, least version and extra of each requirement of the installed unitscale."""
    try:
        lines = importlib.metadata.requires("unitscale") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        name, least, extra = (
            re.search(pattern, line)
            for pattern in (r"^[\w.-]+", r">=\s*([\d.]+)", r"extra == ['\"]([\w-]+)")
        )
        if name:
            found.append((name[0], least[1] if least else "", extra[1] if extra else ""))
    return found


def _versions() -> Iterator[Finding]:
    yield Finding("versions", f"python {platform.python_version()}")
    needed = {name: least for name, least, extra in _requirements() if not extra}
    for name in dict.fromkeys(("jax", "jaxlib", "flax", "optax", *needed)):
        version, least = _version(name), needed.get(name, "")
        if version is None:
            gives = f"; {_GIVES[name]} need it" if name in _GIVES else ""
            yield Finding("versions", f"{name} is missing{gives}", todo=f"pip install {name}")
        elif _numbers(version) < _numbers(least):
            text = f"{name} {version} is older than {least}, which unitscale needs"
            yield Finding("versions", text, True, f'pip install -U "{name}>={least}"')
        else:
            yield Finding("versions", f"{name} {version}")
    for name in sorted({d.name for d in importlib.metadata.distributions()} - {None}):
        if re.fullmatch(r"jax[-_](cuda|rocm)\d+[-_]plugin", name):
            yield _plugin(name, _version(name) or "", _version("jaxlib") or "")


def _plugin(name: str, version: str, jaxlib: str) -> Finding:
    """JAX does not use a CUDA plugin of another version than jaxlib's, and only warns of it."""
    if "rocm" in name or _numbers(version) == _numbers(jaxlib):
        return Finding("versions", f"{name} {version}")
    text = f"{name} {version} is not of jaxlib's version {jaxlib}"
    return Finding("versions", text, True, f'pip install "{name}=={jaxlib}"')


def _kind(device: Any) -> str:
    """The platform, by the name that JAX's plugins have: "cuda", "rocm", "cpu", "tpu"."""
    version = device.client.platform_version
    return "cuda" if "cuda" in version else "rocm" if "rocm" in version else device.platform


def kernels_of(kind: str, capability: float = 0.0) -> str:
    """Which FP8 matrix products a device computes in FP8 kernels, in words.

    Args:
        kind: "cuda", "cpu" or another platform.
        capability: the compute capability of an NVIDIA GPU.

    Returns:
        One line for people.

    Example:
        >>> kernels_of("cuda", 9.0)
        'FP8 kernels; block scales (mxfp8) are emulated, their kernels exist from sm_100'
    """
    if kind == "cpu":
        return "no FP8 kernels: FP8 numbers, multiplied in wider arithmetic"
    if kind != "cuda":
        return "FP8 kernels not known: only those of NVIDIA GPUs are checked"
    if capability >= BLOCK_SCALES_SINCE:
        return "FP8 kernels, with block scales (mxfp8) too"
    if capability >= FP8_SINCE:
        return "FP8 kernels; block scales (mxfp8) are emulated, their kernels exist from sm_100"
    return (
        f"no FP8 kernels: compute capability {capability} < {FP8_SINCE}; FP8 numbers, multiplied "
        "in 16 bits"
    )


def _capability(device: Any) -> float:
    """The compute capability of an NVIDIA GPU, 0 of what is none."""
    return float(device.compute_capability) if _kind(device) == "cuda" else 0.0


def _devices() -> Iterator[Finding]:
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        text = f"JAX finds no device: {str(error).splitlines()[0]}"
        todo = "set JAX_PLATFORMS to what this machine has, such as cpu, or unset it"
        yield Finding("devices", text, True, todo)
        return
    for (platform_, name), same in groupby(devices, lambda d: (d.platform, d.device_kind)):
        group = list(same)
        words = kernels_of(_kind(group[0]), _capability(group[0]))
        yield Finding("devices", f"{len(group)} x {name} ({platform_}): {words}")
    if _DRIVER.exists() and any(_DRIVER.iterdir()) and all(d.platform == "cpu" for d in devices):
        asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        why = f": JAX_PLATFORMS is {asked}" if asked else ""
        text = f"there is an NVIDIA GPU that JAX does not use{why}"
        todo = "unset JAX_PLATFORMS, to use the GPU" if asked else _INSTALL_CUDA
        yield Finding("devices", text, not asked, todo)
    for device in devices:
        yield _product(device)


def fp8_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """The product that is executed: E4M3 operands, whose scales are found at run time.

    Args:
        x: (rows, inner), float32.
        w: (inner, columns), float32.

    Returns:
        (rows, columns), float32.

    Example:
        >>> float(fp8_product(jnp.full((1, 2), 1024.0), jnp.full((2, 1), 2.0**-12))[0, 0])
        0.5
    """
    multiply = dot_general(MatmulConfig(strategy=Dynamic()))
    return multiply(x, w, (((1,), (0,)), ((), ())))


def _product(device: Any) -> Finding:
    """Compares the product of numbers that E4M3 holds, but for their scales, with float64."""
    rng = np.random.default_rng(0)
    x, w = (
        rng.normal(size=shape).astype(jnp.float8_e4m3fn).astype(np.float32) * scale
        for shape, scale in ((SHAPES[0], 2.0**12), (SHAPES[1], 2.0**-12))
    )
    operands = [jax.device_put(a, device) for a in (x, w)]
    try:
        program = jax.jit(fp8_product).lower(*operands).compile()
        found = np.asarray(program(*operands), np.float64)
    except RuntimeError as error:
        text = f"{device}: failed: {str(error).splitlines()[0]}"
        return Finding("FP8 product", text, True, "check the device, its driver and the versions")
    exact = x.astype(np.float64) @ w.astype(np.float64)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)
    allowed = SHAPES[0][1] / 32 * 2.0**-13  # FP8 kernels may add 32 terms at a time with 13 bits
    worst = float(np.max(np.abs(found - exact) / magnitude))
    text = f"{device}: {worst:.1g} from float64, relative to the sum of magnitudes"
    if not worst <= allowed:
        text += f"; FP8 kernels may err by {allowed:.1g}"
        todo = "do not train on it: its products are wrong; check its driver and the versions"
        return Finding("FP8 product", text, True, todo)
    if _capability(device) >= FP8_SINCE and not (report := check_fp8(program)):
        text = f"{device}: right, but not an FP8 kernel: {'; '.join(map(str, report.matmuls))}"
        return Finding("FP8 product", text, True, _INSTALL_CUDA)
    return Finding("FP8 product", text)


def _attention() -> Iterator[Finding]:
    shape = (8, 1024, 12, 64)
    path = attention_path(shape, shape, jnp.bfloat16, is_causal=True)
    text = f"causal attention over 1,024 tokens in bfloat16 is {path.implementation}: {path.reason}"
    outdated = path.implementation != "cudnn" and _capability(jax.local_devices()[0]) >= 8
    yield Finding("cuDNN attention", text, todo=_INSTALL_CUDA if outdated else "")


def _extras() -> Iterator[Finding]:
    requirements = _requirements()
    if not requirements:
        text = "not known: unitscale is not installed, so its extras are not listed"
        yield Finding("extras", text, todo='pip install "unitscale[recipes]"')
    for extra, gives in EXTRAS.items():
        names = [name for name, _, of in requirements if of == extra]
        missing = [name for name in names if _version(name) is None]
        if missing:
            text = f"{extra} ({gives}): {', '.join(missing)} not installed"
            yield Finding("extras", text, todo=f'pip install -e ".[{extra}]", for {gives}')
        elif names:
            yield Finding("extras", f"{extra} ({gives}): installed")


def diagnose() -> list[Finding]:
    """Looks at this machine, and executes a small FP8 product on each of its devices.

    Returns:
        The findings, by section.

    Example:
        >>> findings = diagnose()
        >>> [f.section for f in findings][0], any(f.failed for f in findings)
        ('versions', False)
    """
    findings = [*_versions(), *_devices()]
    if all(f.section != "devices" or not f.failed for f in findings):
        findings += _attention()
    return [*findings, *_extras()]


def report(findings: list[Finding]) -> str:
    """The findings as text, and what to do.

    Args:
        findings: from `diagnose`.

    Returns:
        Lines, the last of which says whether all is well.

    Example:
        >>> print(report([Finding("devices", "no FP8 kernels")]))
        unitscale ...
        <BLANKLINE>
        devices
          no FP8 kernels
        <BLANKLINE>
        All checks passed.
    """
    lines = [f"unitscale {__version__}"]
    for section, group in groupby(findings, lambda f: f.section):
        lines += ["", section, *(f"  {'FAILED: ' * f.failed}{f.text}" for f in group)]
    if todo := dict.fromkeys(f.todo for f in findings if f.todo):
        lines += ["", "what to do", *(f"  {line}" for line in todo)]
    failed = sum(f.failed for f in findings)
    lines += ["", f"{failed} of the checks failed." if failed else "All checks passed."]
    return "\n".join(lines)


def main() -> int:
    """Prints the report of this machine; returns the exit status, 1 if a check failed.

    Example:
        >>> main()  # doctest: +ELLIPSIS
        unitscale ...
        All checks passed.
        0
    """
    findings = diagnose()
    sys.stdout.write(report(findings) + "\n")
    return int(any(finding.failed for finding in findings))


if __name__ == "__main__":
    sys.exit(main())

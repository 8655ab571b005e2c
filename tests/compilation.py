"""How programs in tests are compiled and cached."""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

# XLA stops at a flag that it does not know: in a version of jaxlib that these were not tried with,
# tests only take longer.
_QUICKER_EMITTER = version("jaxlib").startswith("0.10.")
_ONE_MODULE = version("jaxlib").startswith(("0.10.", "0.12."))
# The quicker emitter casts NaN to some formats of 8 bits wrongly, and rounds to 4 bits wrongly:
# `jax.jit(..., compiler_options=USUAL_EMITTER)` for casts to be checked bit by bit.
USUAL_EMITTER = {"xla_cpu_use_fusion_emitters": True} if _QUICKER_EMITTER else {}


def xla_flags(given: str) -> str:
    """Add flags for eight CPU devices and quick compilation, unless the given flags set them.

    XLA's older emitter compiles a small kernel in a third of the time. A single LLVM module per
    program is as much faster again if no core is idle.
    """
    flags = ["--xla_force_host_platform_device_count=8"]
    if _QUICKER_EMITTER:
        flags += ["--xla_cpu_use_fusion_emitters=false"]
    if _ONE_MODULE:
        flags += ["--xla_cpu_parallel_codegen_split_count=1"]
    return " ".join([given, *(f for f in flags if f.split("=")[0] not in given)]).strip()


def cache_folder() -> Path:
    """Return a folder in the user's cache that depends on the kind of processor.

    JAX's cache keys contain the program, its options and versions, but not the processor for which
    the machine code is.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "unitscale" / "compiled" / _processor()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    facts = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:12]

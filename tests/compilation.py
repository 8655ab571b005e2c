"""How programs of the tests are compiled, and where they are kept between runs."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path


def with_flags(given: str) -> str:
    """The options of XLA, where they do not say otherwise: eight devices, compiled quickly."""
    flags = {"--xla_force_host_platform_device_count": "8"}
    # Later releases may not know these options, and an unknown one ends the process.
    if version("jaxlib") == "0.10.2":
        # The older emitters, and one LLVM module, need a third of the time.
        flags["--xla_cpu_use_fusion_emitters"] = "false"
        flags["--xla_cpu_parallel_codegen_split_count"] = "1"
    more = [f"{flag}={value}" for flag, value in flags.items() if flag not in given]
    return " ".join([given, *more]).strip()


def cache_folder() -> Path:
    """A folder of the user's cache, one for each kind of processor.

    JAX's key has the program, its options and the versions, but not the processor that the machine
    code is for.
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

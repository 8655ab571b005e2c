"""Where compiled programs of the tests are kept between runs."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


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

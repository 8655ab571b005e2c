"""What every process of the recipes does before it computes."""

import logging

from .allocator import keep_freed_memory


def start_process() -> None:
    """Sets up memory and logging; it must come before JAX starts its threads."""
    keep_freed_memory()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it touches

"""Dependencies that only tables and plots need."""

import importlib
from typing import Any


def extra(where: str, module: str) -> Any:
    """Imports a module of the extra ``recipes``.

    Raises:
        ImportError: if it is not installed, saying how to.

    Example:
        >>> extra("plot_snr", "matplotlib.figure").__name__
        'matplotlib.figure'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(
            f"unitscale.analysis.{where}: needs {package}, which is not installed; run "
            'pip install "unitscale[recipes]"'
        ) from error

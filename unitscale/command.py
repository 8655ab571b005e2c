"""The console command `unitscale`: that of the recipes, of the same wheel or clone."""

import importlib
import importlib.util
import sys


def main() -> int:
    """Runs the command line of the recipes.

    Returns:
        The exit code: 2 where their packages are not installed, or what a user asked is wrong.

    Example:
        >>> callable(main)
        True
    """
    wheel = importlib.util.find_spec(f"{__package__}.recipes")
    try:
        cli = importlib.import_module(f"{__package__}.recipes.cli" if wheel else "recipes.cli")
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"unitscale: the recipes need {error.name}, which is not installed; "
            'pip install "unitscale[recipes]"\n'
        )
        return 2
    return cli.main()

"""Entry point of `python -m recipes`."""

import sys

if __name__ == "__main__":
    try:
        from .cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())

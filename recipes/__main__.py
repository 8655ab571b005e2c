"""Entry point of `python -m recipes`."""

import sys

try:
    from .cli import main
except KeyboardInterrupt:  # importing takes seconds
    print("stopped before training started", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())

"""`python -m recipes`."""

import sys

try:
    from .cli import main
except KeyboardInterrupt:  # in the seconds that imports take
    print("stopped before anything was done", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())

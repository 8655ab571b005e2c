"""`python -m unitscale.transforms`: prints the page of `coverage`."""

import sys

from ._coverage import coverage_page

if __name__ == "__main__":
    sys.stdout.write(coverage_page())

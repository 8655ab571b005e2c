"""`python -m unitscale.rules`: prints the page of `table`."""

import sys

from ._table import table_page

if __name__ == "__main__":
    sys.stdout.write(table_page())

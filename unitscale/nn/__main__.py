"""`python -m unitscale.nn`: prints the page that sets constructors beside those of `flax.nnx`."""

import sys

from ._flax_table import flax_page

if __name__ == "__main__":
    sys.stdout.write(flax_page())

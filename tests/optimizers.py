"""`optim.scaled` as tests use it: their arrays are small, and all are stored."""

import functools

from unitscale import optim

scaled = functools.partial(optim.scaled, min_size=0)

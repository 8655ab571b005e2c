"""Unit-scaled, low-precision training in JAX."""

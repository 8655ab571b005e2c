"""Training recipes: `python -m recipes train|evaluate|generate|bench CONFIG [key=value ...]`.

In an installed wheel they are `unitscale.recipes`, and the command is `unitscale`.
"""

MODULE = __name__
"""What `python -m` runs."""

PROGRAM: str = "python -m recipes" if MODULE == "recipes" else "unitscale"
"""What a user types."""

"""Training recipes: `python -m recipes train|evaluate|generate|bench CONFIG [key=value ...]`."""

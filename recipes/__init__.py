"""Training recipes: `python -m recipes train CONFIG [key=value ...]`, and other commands."""

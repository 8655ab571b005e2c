"""Lists of numbers on the command line: a comma between two."""

from typing import TypeVar

from ..errors import RecipeError

Number = TypeVar("Number", int, float)


def numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    """The numbers above 0 of a list, each once, in order.

    Raises:
      RecipeError: There is none, or another word.
    """
    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(number > 0 for number in found):
        what, example = ("integers", "4,8") if kind is int else ("numbers", "0.002,0.004")
        raise RecipeError(
            f"{option}: expected {what} above 0, a comma between two; got {text!r}; give such as "
            f"{example}"
        )
    return found

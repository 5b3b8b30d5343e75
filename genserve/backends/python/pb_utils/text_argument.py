"""Text argument: a name or message of a model: a str, or bytes in UTF-8, as a tensor has them."""

from __future__ import annotations

__all__ = ["text_argument"]


def text_argument(given: str | bytes | bytearray, what: str) -> str:
    """Return it as a str; what is no UTF-8 becomes U+FFFD.

    Triton takes both wherever it takes a text, and its own BLS example hands an element of a string tensor on
    as the model's name.

    Args:
        given: the text.
        what: what the message calls it, such as "a model name".

    Raises:
        TypeError: it is neither.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, (bytes, bytearray)):
        return given.decode(errors="replace")
    raise TypeError(f"{what} is a str or bytes, got {type(given)}")

"""Content parts: what becomes of the parts of a message that are not text, which the models here cannot read.

In the result of a tool a placeholder takes the place of such a part. A client keeps its conversation, so a
rejected picture would be rejected in each later request, too. In a message of the user it is an error: the
user asks about it.
"""

from __future__ import annotations

from collections.abc import Iterable

from genserve.errors import InvalidRequest

# The words for parts of several types, which contain one of the keys.
_WORDS = {
    "image": "image",
    "screenshot": "image",
    "audio": "audio",
    "video": "video",
    "file": "file",
    "document": "file",
}
_MAX_KIND = 64      # characters of a type that the client chose


def placeholder(kind: str) -> str:
    """Return the text that stands for a part of a type, such as `input_image`, in the result of a tool."""
    return f"[{_word(kind)} left out: this model reads text only]"


def result_text(parts: Iterable[tuple[str, str | None]]) -> str:
    """Return the text of a tool's result from the type and the text of each part; None: it is not text."""
    given = [*parts]
    texts = (placeholder(kind) if text is None else text for kind, text in given)
    return ("" if all(text is not None for _, text in given) else "\n").join(texts)


def unreadable_part(kind: str, *, field: str) -> InvalidRequest:
    """Return the error for a part of a type in a message that must be text; `field` is the part's place."""
    return InvalidRequest(
        f"{field}: the type {kind[:_MAX_KIND]!r} is not supported, since this model reads text only",
        field=field,
        remedy=f"leave the {_word(kind)} out, or describe it in words",
    )


def _word(kind: str) -> str:
    return next((word for part, word in _WORDS.items() if part in kind), kind[:_MAX_KIND])

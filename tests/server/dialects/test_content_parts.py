"""Parts of messages that are not text."""

from __future__ import annotations

import pytest

from genserve.server.dialects.content_parts import placeholder, unreadable_part


@pytest.mark.parametrize(
    ("kinds", "word"),
    [
        (("image", "image_url", "input_image", "computer_screenshot"), "image"),
        (("audio", "input_audio"), "audio"),
        (("file", "input_file", "document"), "file"),
        (("video_url",), "video"),
        (("hologram",), "hologram"),
    ],
)
def test_a_placeholder_names_what_is_left_out(kinds, word):
    for kind in kinds:
        assert placeholder(kind) == f"[{word} left out: this model reads text only]"
        error = unreadable_part(kind, field="messages[0].content[1]")
        assert error.field == "messages[0].content[1]"
        assert word in error.remedy

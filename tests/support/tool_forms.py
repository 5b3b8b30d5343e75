"""The tool-call formats as parameters of a test: three in `make test`, all in the extended tests."""

from __future__ import annotations

from genserve.text.tool_formats import TOOL_FORMATS
from tests.support.representatives import with_extended

# Formats whose arguments differ in kind: JSON, texts between marks, and literals.
SOME = ("hermes", "qwen3_coder", "lfm2")
FORMS = with_extended(TOOL_FORMATS, always=SOME)

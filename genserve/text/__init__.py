"""Text: text and chats to token ids, and token ids to text."""

from __future__ import annotations

from genserve.text.chat_template import ChatTemplate
from genserve.text.detokenizer import Detokenizer
from genserve.text.stop_strings import StopStrings
from genserve.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer"]

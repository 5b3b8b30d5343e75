"""A chat server whose model answers with the last message, so that a test decides what an answer is."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tests.support.thinking_model import copy_with_tags
from tests.support.tiny_llama import CHAT_TEMPLATE

__all__ = ["echo_repository"]

DECODER = """
IM_START, IM_END, LINE_END, ASSISTANT = {im_start}, {im_end}, {line_end}, {assistant}


class TritonPythonModel:
    async def decode(self, sequence):
        turns, turn = [], []
        for token_id in sequence.token_ids[:sequence.num_prompt_tokens]:
            if token_id == IM_START:
                turns.append(turn := [])
            else:
                turn.append(token_id)
        *asked, answer = turns
        asked = [turn for turn in asked if turn[:len(ASSISTANT)] != ASSISTANT]
        said = asked[-1][asked[-1].index(LINE_END) + 1:asked[-1].index(IM_END)]
        begun = answer[answer.index(LINE_END) + 1:]
        for token_id in said[len(begun):]:
            await sequence.sample()     # for its log-probabilities
            sequence.append(token_id)
            if sequence.finished:
                return
        sequence.finish("stop")
"""


def echo_repository(tiny_repository: Path, root: Path) -> Path:
    """Copy the tiny model, with tags of a thought and a decoding loop that repeats the last message."""
    copy_with_tags(tiny_repository, root)
    tokenizer = Tokenizer.from_file(str(root / "tiny_tokenizer" / "1" / "tokenizer.json"))
    names = {"im_start": "<|im_start|>", "im_end": "<|im_end|>", "line_end": "Ċ"}
    ids = {name: tokenizer.token_to_id(token) for name, token in names.items()}
    code = DECODER.format(**ids, assistant=tokenizer.encode("assistant").ids)
    (root / "tiny_decoder" / "1" / "model.py").write_text(code)
    # The format of tool calls, without the tools: their texts would fill the context.
    tools = "{% if tools %}{# <tool_call> #}{% endif %}"
    (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(CHAT_TEMPLATE + tools)
    return root

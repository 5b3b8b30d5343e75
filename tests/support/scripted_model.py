"""The tiny model with the tags of a thought and a decoder stage that writes given answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from genserve.text.tokenizer import Tokenizer
from tests.support.thinking_model import copy_with_tags

# An answer fails where it has this text.
FAILS = "#!"
# Scripts: text, reasoning, a failure, a long answer, and two calls.
SCRIPTS = {
    "#1": "ok: 12",
    "#2": "<think>\n?!\n</think>\n\n12",
    "#3": "12" + FAILS,
    "#4": "1" * 400,
    "#5": '12<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
}
_DECODER = """
SCRIPTS = {scripts}     # by the token ids of a key, those of an answer; None: it fails

class TritonPythonModel:
    async def decode(self, sequence):
        prompt = [*sequence.token_ids[: sequence.num_prompt_tokens]]
        for at, token_id in enumerate(self.script(prompt)):
            if at % {tokens_per_step} == 0:
                await sequence.logits()
            if token_id is None:
                raise ValueError("the script says so")
            sequence.append(token_id)
            if sequence.finished:
                return
        sequence.finish("stop")

    def script(self, prompt):
        for end in range(len(prompt), 0, -1):
            for key, answer in SCRIPTS:
                if prompt[max(0, end - len(key)) : end] == key:
                    return answer
        raise ValueError("no key of a script is in the prompt")
"""


def scripted_repository(
    tiny_repository: Path,
    root: Path,
    scripts: Mapping[str, str],
    *,
    template: str = "",
    tokens_per_step: int = 1,
) -> Path:
    """Copy the repository; it answers a prompt by the script whose key comes last in it.

    Keys consist of digits and punctuation, which are tokens of one character in every context.
    """
    copy_with_tags(tiny_repository, root)
    encode = Tokenizer.from_folder(root / "tiny_tokenizer" / "1").encode
    written = [
        (encode(key), encode(answer.removesuffix(FAILS)) + [None] * answer.endswith(FAILS))
        for key, answer in scripts.items()
    ]
    code = _DECODER.replace("{scripts}", repr(written)).replace("{tokens_per_step}", str(tokens_per_step))
    (root / "tiny_decoder" / "1" / "model.py").write_text(code)
    # Drafts would make deltas of several tokens, now and then.
    with (root / "tiny_logits" / "config.pbtxt").open("a") as config:
        config.write('parameters [ { key: "speculation" value: { string_value: "none" } } ]\n')
    if template:
        (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(template)
    return root

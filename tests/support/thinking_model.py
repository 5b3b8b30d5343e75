"""The tiny model with the tags of a thought, the last two tokens of its vocabulary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

__all__ = ["END", "START", "copy_with_tags"]

START, END = 318, 319


def copy_with_tags(tiny_repository: Path, root: Path) -> Path:
    """Copy the repository; its tokenizer has the tags, as tokens that are not special."""
    shutil.copytree(tiny_repository, root)
    path = root / "tiny_tokenizer" / "1" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-2]
    vocab = {token: i for token, i in tokenizer["model"]["vocab"].items() if i < START}
    tokenizer["model"]["vocab"] = vocab
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": i, "content": tag, "special": False}
        for i, tag in ((START, "<think>"), (END, "</think>"))
    ]
    path.write_text(json.dumps(tokenizer))
    return root

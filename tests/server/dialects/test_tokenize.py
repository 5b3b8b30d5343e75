"""Text to token ids and back, compared with the library whose tokenizer files these are."""

from __future__ import annotations

import pytest
import transformers

from genserve.version import __version__
from tests.support.tiny_llama import CHAT_TEMPLATE, SPECIAL_TOKENS

TEXTS = ("hello there", "", "a<|im_end|>b", "größer 🙂")
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def reference(tiny_checkpoint):
    return transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)


def tokenize(http, **body):
    response = http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_becomes_the_ids_of_transformers_and_text_again(http, reference, text):
    ids = reference.encode(text)
    names = reference.convert_ids_to_tokens(ids)
    answer = tokenize(http, model="tiny", prompt=text, return_token_strs=True)
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": names}
    back = http.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": text, "content": text}


def test_a_chat_becomes_the_ids_of_its_template(http, reference):
    ids = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert tokenize(http, messages=MESSAGES)["tokens"] == ids
    plain = reference.apply_chat_template(MESSAGES, return_dict=False)
    assert tokenize(http, messages=MESSAGES, add_generation_prompt=False)["tokens"] == plain
    counted = http.post("/v1/messages/count_tokens", json={"messages": MESSAGES}).json()
    assert counted == {"input_tokens": len(ids)}


def test_llama_cpps_form_has_ids_or_pieces(http, reference):
    text = "größer<|im_end|>🙂"
    ids = reference.encode(text)
    assert tokenize(http, content=text) == {"tokens": ids}
    pieces = tokenize(http, content=text, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    spelled = (one["piece"] for one in pieces)
    joined = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in spelled)
    assert joined.decode() == text
    assert pieces[2]["piece"] == [0xC3], "a part of a character has its bytes"
    as_text = tokenize(http, content="<|im_end|>", parse_special=False)["tokens"]
    assert SPECIAL_TOKENS.index("<|im_end|>") not in as_text
    assert reference.decode(as_text) == "<|im_end|>"


def test_tgis_form_has_the_places_of_the_tokens(http, reference):
    text = "größer there"
    tokens = tokenize(http, inputs=text)
    assert [token["id"] for token in tokens] == reference.encode(text)
    for token in tokens:
        assert token["text"] == text[token["start"] : token["stop"]]
    # A token within a character covers it, as in transformers.
    assert [(t["start"], t["stop"]) for t in tokens] == reference(text, return_offsets_mapping=True)[
        "offset_mapping"
    ]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "content": "a"}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("detokenize", {"tokens": [320]}, "tokens[0]"),
        ("detokenize", {"tokens": [0, -1]}, "tokens[1]"),
        ("detokenize", {}, "tokens"),
    ],
)
def test_invalid_bodies_are_rejected(http, path, body, field):
    response = http.post(f"/{path}", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_the_tokenizer_is_described_without_paths(http):
    info = http.get("/tokenizer_info").json()
    assert info["chat_template"] == CHAT_TEMPLATE
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {name for name in info if name.endswith(("_file", "_path"))}
    missing = http.get("/tokenizer_info", params={"model": "no"})
    assert missing.status_code == 404


def test_pings_and_the_version_are_answered(http):
    for method in ("GET", "POST", "HEAD"):
        assert http.request(method, "/ping").status_code == 200
    assert http.get("/version").json() == {"version": __version__}

"""outlines: its backends for OpenAI's API, vLLM and TGI."""

import json
from typing import Literal

import outlines
from huggingface_hub import InferenceClient
from openai import OpenAI
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field
from rows import MODEL, URL, expect, main, row


class City(BaseModel):
    name: str = Field(max_length=30)
    country: str = Field(max_length=30)


client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
openai = outlines.from_openai(client, MODEL)
vllm = outlines.from_vllm(client, MODEL)
tgi = outlines.from_tgi(InferenceClient(URL))
ASK = "Describe the city Paris."


@row("openai: text, streamed")
def openai_text():
    expect(openai("Say hello to Ada.", max_tokens=16), "the text is empty")
    expect("".join(openai.stream("Say hello to Ada.", max_tokens=16)), "the stream is empty")


@row("openai: JSON schema")
def openai_json():
    return str(City.model_validate_json(openai(ASK, City, max_tokens=256)))


@row("vllm: JSON schema")
def vllm_json():
    return str(City.model_validate_json(vllm(ASK, City, max_tokens=256)))


@row("vllm: choice")
def vllm_choice():
    expect(vllm("Is Paris in France?", Literal["yes", "no"], max_tokens=8) in ("yes", "no"), "another answer")


@row("vllm: regex")
def vllm_regex():
    text = vllm("A year:", Regex("[12][0-9]{3}"), max_tokens=16)
    expect(len(text) == 4 and text.isdigit(), text)


@row("vllm: grammar")
def vllm_grammar():
    grammar = CFG('?start: "yes" | "no"')
    expect(vllm("Is Paris in France?", grammar, max_tokens=8) in ("yes", "no"), "another answer")


@row("tgi: JSON schema")
def tgi_json():
    return str(json.loads(tgi(ASK, City, max_new_tokens=256)))


@row("tgi: regex")
def tgi_regex():
    text = tgi("A year:", Regex("[12][0-9]{3}"), max_new_tokens=16)
    expect(len(text) == 4 and text.isdigit(), text)


main()

"""Decoder stage of the scripted model: writes a fitting answer, whatever the logits are.

What it answers depends on the last message, on the tools and on the required structure:

- a JSON schema: an instance of it, `example`;
- tools and no result of one yet: a call, with arguments that are an instance of the tool's schema, unless
  the message says hello; several calls if it names several cities;
- a result of a tool: a text that quotes it, or a call of the tool that reports the final result, if any;
- otherwise: a text that quotes the message, behind a thought if the message says "think".

Each token costs a forward of the small random graph, so that answers stream as those of any model.
"""

import json
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

CITIES = ("Paris", "Rome", "Tokyo")
# Values of properties by their names; others get one of their type.
VALUES = {"country": "France", "population": 2_100_000, "name": "Ada", "age": 36, "unit": "celsius"}
BY_TYPE = {"string": "text", "integer": 7, "number": 1.5, "boolean": True, "null": None}


class Conversation:
    """A prompt, read back from the chat template's text."""

    def __init__(self, prompt):
        self.turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
        listed = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
        tools = map(json.loads, listed[1].splitlines()) if listed else ()
        self.tools = [tool.get("function", tool) for tool in tools]
        questions = [text for role, text in self.turns if self._asks(role, text)]
        self.question = " ".join(questions[-1].split()) if questions else ""
        asked = max((i for i, (role, text) in enumerate(self.turns) if self._asks(role, text)), default=0)
        since = "".join(text for _, text in self.turns[asked:])
        self.results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", since, re.DOTALL)
        self.cities = [city for city in CITIES if city in self.question] or [CITIES[0]]
        self.numbers = [int(digits) for digits in re.findall(r"\d+", self.question)]

    @staticmethod
    def _asks(role, text):
        return role == "user" and "<tool_response>" not in text

    def answer(self, *, must_call=False):
        """The text of an answer without a required structure, except that it may have to call a tool."""
        calls = self._calls(must_call=must_call)
        if calls:
            return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
        thought = "<think>\nThe answer is easy.\n</think>\n\n" if "think" in self.question else ""
        if self.results:
            return f"{thought}The tool says: {'; '.join(self.results)}"
        return f"{thought}You said: {self.question[:200]}"

    def _calls(self, *, must_call):
        # Tools for the final result are named by agents: final_answer, final_result, or a Python class.
        final = [tool for tool in self.tools if tool["name"].startswith("final") or tool["name"][0].isupper()]
        others = [tool for tool in self.tools if tool not in final]
        if "hello" in self.question.lower() and not must_call:
            return []
        if self.results or not others:
            called = final[:1] or (others[:1] if must_call else [])
            return [self._call(tool, self.cities[0]) for tool in called]
        tool = next((tool for tool in others if tool["name"] in self.question), others[0])
        several = self.cities if "city" in json.dumps(tool) else self.cities[:1]
        return [self._call(tool, city) for city in several]

    def _call(self, tool, city):
        schema = tool.get("parameters") or {"type": "object"}
        return {"name": tool["name"], "arguments": self.example(schema, city=city)}

    def example(self, schema, *, city=None):
        """Return an instance of a JSON schema."""
        return _Example(self, schema, city=city or self.cities[0]).value(schema)


class _Example:
    """Makes one instance."""

    def __init__(self, conversation, root, *, city):
        self.root = root
        self.numbers = iter(conversation.numbers)
        self.results = "; ".join(conversation.results)
        self.city = city

    def value(self, schema, name=""):
        if not isinstance(schema, dict) or not schema:
            return self.results or "text"
        if "$ref" in schema:
            found = self.root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            return self.value(found, name)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                some = [part for part in schema[several] if part.get("type") != "null"]
                return self.value(some[0], name)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        kind = next(k for k in kind if k != "null") if isinstance(kind, list) else kind
        if kind == "object":
            return {key: self.value(part, key) for key, part in schema.get("properties", {}).items()}
        if kind == "array":
            number = max(1, schema.get("minItems", 1))
            return [self.value(schema.get("items", {}), name) for _ in range(number)]
        return self._scalar(kind, name, schema)

    def _scalar(self, kind, name, schema):
        if kind in ("integer", "number"):
            least = schema.get("minimum", 0)
            return max(least, next(self.numbers, VALUES.get(name, BY_TYPE[kind])))
        if kind == "string":
            if name in ("city", "location"):
                return self.city
            known = VALUES.get(name)
            return known if isinstance(known, str) else self.results or BY_TYPE[kind]
        return BY_TYPE.get(kind, "text")


class TritonPythonModel:
    def __init__(self):
        model, repository = Path(__file__).parents[1], Path(__file__).parents[2]
        name = model.name.removesuffix("_decoder")
        self.tokenizer = Tokenizer.from_file(str(repository / f"{name}_tokenizer" / "1" / "tokenizer.json"))
        self.eos = self.tokenizer.token_to_id("<|im_end|>")

    async def decode(self, sequence):
        script, grammar = self.script(sequence), sequence.sampling.grammar
        whole = iter(self.tokenizer.encode(script or "", add_special_tokens=False).ids)
        while not sequence.finished:
            token_id = await sequence.sample()  # one forward per token, as of any model
            if grammar is None:
                token_id = next(whole, self.eos)
            elif script is not None:
                token_id, script = self.next_allowed(script, grammar, sampled=token_id)
            sequence.append(token_id)

    def script(self, sequence):
        prompt_ids = sequence.token_ids[: sequence.num_prompt_tokens]
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        conversation = Conversation(prompt)
        outputs = sequence.params.structured_outputs
        match outputs and outputs.form:
            case "json":
                return json.dumps(conversation.example(json.loads(outputs.text)))
            case "json_object":
                return json.dumps({"city": conversation.cities[0], **VALUES})
            case "choice":
                choices = json.loads(outputs.text)
                return next((choice for choice in choices if choice in conversation.question), choices[0])
            case "regex" | "grammar":
                return None
        if not conversation.turns:
            return " and so on"
        grammar, text = sequence.sampling.grammar, conversation.answer()
        if grammar is not None and not self._allowed(grammar)[self._first_id(text)]:
            return conversation.answer(must_call=True)
        return text

    def _first_id(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids[0]

    def _allowed(self, grammar):
        """Whether each token may follow."""
        mask = np.zeros(-(-self.tokenizer.get_vocab_size() // 32), dtype=np.int32)
        grammar.fill(mask)
        return np.unpackbits(mask.view(np.uint8), bitorder="little")

    def next_allowed(self, script, grammar, *, sampled):
        """Return the next token of a script, and the rest of the script; `sampled` if the script has none.

        A grammar may disagree with the script about whitespace, which is then left out or sampled.
        """
        allowed = self._allowed(grammar)
        if not script:
            return (self.eos if allowed[self.eos] else sampled), ""
        for text in (script, script.lstrip()):
            first = self.tokenizer.encode(text, add_special_tokens=False).offsets[0][1] if text else 0
            for end in range(first, 0, -1):
                ids = self.tokenizer.encode(text[:end], add_special_tokens=False).ids
                if len(ids) == 1 and allowed[ids[0]]:
                    return ids[0], text[end:]
        return sampled, script

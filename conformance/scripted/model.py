"""Decoder stage of the scripted model: writes a fitting answer, whatever the logits are.

The answer depends on the last message, on the tools and on the required structure:

- a JSON schema: an instance of it, `example`;
- a task that names calls, as those for coding agents do: the next of these calls, see `Task`;
- tools, but no result of a tool yet: a call, with arguments that are an instance of the tool's schema, unless
  the message says hello; several calls if it names several cities;
- a result of a tool: a text that quotes it, or a call of the tool that reports the final result, if any;
- otherwise: a text that quotes the message, after a thought if the message says "think".

Each token costs a forward of the small random graph, so that answers stream like any model's.
"""

import json
import re
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

CITIES = ("Paris", "Rome", "Tokyo")
# Values of properties by name; other properties get a value of their type.
VALUES = {"country": "France", "population": 2_100_000, "name": "Ada", "age": 36, "unit": "celsius"}
BY_TYPE = {"string": "text", "integer": 7, "number": 1.5, "boolean": True, "null": None}
MAX_QUOTED_CHARS = 300


class Task:
    """A task of a coding agent, which names its calls: use the tool write({"path": "hello.txt"}).

    The model makes one call per turn, and then says what the last tool said. An agent that runs out of
    context asks for a summary: the model repeats the task, and goes on with it afterwards. A mark `(3 calls
    are done)` in a summary, or in the result of a tool, counts calls that are no longer in the prompt.
    """

    _CALL = re.compile(r"use the tool ([\w.-]+)\((?=\{.*?\}\))")
    _DONE = re.compile(r"\((\d+) calls are done\)")
    _FOUND = re.compile(r"The tool ([\w-]+) can be called now")
    _WAIT = re.compile(r"wait (\d+) seconds")

    def __init__(self, turns):
        texts = ["" if role == "system" or "<tool_response>" in text else text for role, text in turns]
        place = max((i for i, text in enumerate(texts) if self._read(text)), default=None)
        self.calls, self.wait_s = [], 0
        if place is None:
            return
        self.calls = self._read(texts[place])
        since = "".join(text for _, text in turns[place:])
        self.results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", since, re.DOTALL)
        marks = [int(mark) for role, text in turns if role != "system" for mark in self._DONE.findall(text)]
        self.num_done = max([len(self.results), *marks])
        if (found := self._WAIT.search(texts[place])) and not self.num_done:
            self.wait_s = int(found[1])
        last = max(i for i, (role, _) in enumerate(turns) if role != "system")
        self.is_summary = last > place and "summar" in texts[last].lower()

    def _read(self, text):
        """The calls that a text names."""
        text = text.replace('\\"', '"')     # opencode quotes the task
        calls = []
        for found in self._CALL.finditer(text):
            try:
                arguments, _ = json.JSONDecoder().raw_decode(text, found.end())
            except ValueError:
                continue
            call = {"name": found[1], "arguments": arguments}
            if call not in calls:   # Copilot's summaries have the task and the summary before
                calls.append(call)
        return calls

    def answer(self, tools):
        """The text of the next turn."""
        if self.num_done >= len(self.calls) and not self.is_summary:
            return f"The tool says: {' '.join(self.results[-1:])[:MAX_QUOTED_CHARS]}"
        call = self.calls[min(self.num_done, len(self.calls) - 1)]
        # A tool that was found by a search is not among those of the system prompt.
        offered = {*(tool["name"] for tool in tools), *self._FOUND.findall(" ".join(self.results))}
        if not self.is_summary and call["name"] in offered:
            # The grammar of a call has the properties in the order of the schema.
            schemas = (tool.get("parameters") or {} for tool in tools if tool["name"] == call["name"])
            order = [*next(schemas, {}).get("properties", {}), *call["arguments"]]
            arguments = {name: call["arguments"][name] for name in order if name in call["arguments"]}
            return f"<tool_call>\n{json.dumps(call | {'arguments': arguments})}\n</tool_call>"
        calls = (f"use the tool {call['name']}({json.dumps(call['arguments'])})" for call in self.calls)
        # The number comes first, since a long summary may be cut.
        text = f"({self.num_done} calls are done) The task: {', '.join(calls)}"
        return f"<summary>\n{text}\n</summary>" if self.is_summary else text


class Conversation:
    """A prompt, read back from the chat template's text."""

    def __init__(self, prompt):
        self.turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
        # The system prompt of an agent may have tags of the same name.
        listed = re.search(r"<tools>\n(\{.*?)\n</tools>", prompt, re.DOTALL)
        tools = map(json.loads, listed[1].splitlines()) if listed else ()
        self.tools = [tool.get("function", tool) for tool in tools]
        self.task = Task(self.turns)
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
        if self.task.calls:
            return self.task.answer(self.tools)
        calls = self._calls(must_call=must_call)
        if calls:
            return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
        thought = "<think>\nThe answer is easy.\n</think>\n\n" if "think" in self.question else ""
        if self.results:
            return f"{thought}The tool says: {'; '.join(self.results)}"
        return f"{thought}You said: {self.question[:200]}"

    def _calls(self, *, must_call):
        # Agents name the tool for the final result final_answer, final_result, or like a Python class.
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
    """Makes an instance of a JSON schema."""

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
        prompt_ids = sequence.token_ids[: sequence.num_prompt_tokens]
        conversation = Conversation(self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
        script, grammar = self.script(sequence, conversation), sequence.sampling.grammar
        self.wait(conversation.task.wait_s)
        whole = iter(self.tokenizer.encode(script or "", add_special_tokens=False).ids)
        while not sequence.finished:
            token_id = await sequence.sample()  # one forward per token, as for any model
            if grammar is None:
                token_id = next(whole, self.eos)
            elif script is not None:
                token_id, script = self.next_allowed(script, grammar, sampled=token_id)
            sequence.append(token_id)

    def wait(self, wait_s):
        """Hold the engine's thread, as the step of a large model does."""
        time.sleep(wait_s)

    def script(self, sequence, conversation):
        """The text to write; None: what a regular expression or a grammar allows."""
        outputs = sequence.params.structured_outputs
        match outputs and outputs.kind:
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

        A grammar may not allow the script's whitespace, which is then left out or sampled.
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

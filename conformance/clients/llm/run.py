"""simonw's llm: the command, with a model of extra-openai-models.yaml, and its Python interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rows import MODEL, URL, expect, expect_text, main, row

home = Path.cwd() / "llm"
home.mkdir(exist_ok=True)
os.environ["LLM_USER_PATH"] = str(home)
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: genserve\n  model_name: {MODEL}\n  api_base: {URL}/v1\n"
    "  supports_tools: true\n  supports_schema: true\n"
    f"- model_id: genserve-completion\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  completion: true\n",
    encoding="utf-8",
)

import llm  # noqa: E402  it reads the variable

FUNCTIONS = '''
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"
'''
SHORT = ("-o", "max_tokens", "32")


def command(*arguments):
    program = Path(sys.executable).with_name("llm")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    expect(done.returncode == 0, f"exit status {done.returncode}: {done.stderr}")
    return done.stdout + done.stderr


@row("prompt, streamed")
def prompt():
    expect(command("-m", "genserve", "Say hello to Ada.", *SHORT).strip(), "the text is empty")


@row("prompt, whole, system")
def prompt_whole():
    text = command("-m", "genserve", "--no-stream", "-s", "Be kind.", "Say hello to Ada.", *SHORT)
    expect(text.strip(), "the text is empty")


@row("continued conversation")
def continued():
    command("-m", "genserve", "My name is Ada.", *SHORT)
    expect(command("-c", "Say hello to me.", *SHORT).strip(), "the text is empty")


@row("completion model")
def completion():
    expect(command("-m", "genserve-completion", "The sea is", *SHORT).strip(), "the text is empty")


@row("tools")
def tools():
    text = command(
        "-m", "genserve", "--functions", FUNCTIONS, "What is the weather in Paris?", "--td",
        "--chain-limit", "3", "-o", "max_tokens", "128",
    )  # fmt: skip
    expect_text("Tool call: get_weather" in text, f"no call: {text}")
    expect_text("18 degrees in Paris" in text, text)


@row("tools, whole, in Python")
def tools_python():
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"18 degrees in {city}"

    conversation = llm.get_model("genserve").conversation(tools=[get_weather], chain_limit=3)
    chain = conversation.chain("What is the weather in Paris?", stream=False, options={"max_tokens": 128})
    try:
        text = chain.text()
    except ValueError as error:
        expect_text("chain limit" not in str(error).lower(), str(error))
        raise
    expect_text("18 degrees" in text, text)


@row("schema")
def schema():
    text = command(
        "-m", "genserve", "--schema", "name, country", "Describe the city Paris.", "-o", "max_tokens", "256"
    )
    expect_text(text.rstrip().endswith("}"), f"cut off: {text}")
    expect(json.loads(text).keys() == {"name", "country"}, text)
    return text


main()

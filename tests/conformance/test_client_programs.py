"""The runner of `make conformance`: the rows of programs, and the answers of the scripted model."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import sys
from pathlib import Path

import jsonschema
import pytest

import conformance
from conformance.client_programs import ClientProgram, Row, client_programs, run_program
from conformance.environments import Environment
from conformance.result_table import as_json, as_markdown, as_summary, from_json, results


def run(tmp_path: Path, source: str, *, timeout_s: float = 60) -> list[Row]:
    program = ClientProgram(folder=tmp_path / "client", title="a client", timeout_s=timeout_s)
    environment = Environment(command=(sys.executable, "-c", source), version="1")
    server = {"url": "http://127.0.0.1:1", "model": "m", "encoder": "e", "tokenizer": tmp_path}
    return run_program(program, environment, **server, log=tmp_path / "log")


def test_a_program_reports_rows_through_the_shared_module(tmp_path):
    rows = run(
        tmp_path,
        """
from rows import MODEL, URL, expect, expect_text, main, row
print("something of the client")
row("works")(lambda: f"{URL} {MODEL}")
row("wire")(lambda: expect(False, "no id"))
row("text")(lambda: expect_text(False, "no call"))
row("its error", text_errors=(KeyError,))(lambda: {}["a"])
main()
""",
    )
    assert [(row.name, row.outcome, row.detail) for row in rows] == [
        ("works", "ok", "http://127.0.0.1:1 m"),
        ("wire", "failed", "no id"),
        ("text", "text", "no call"),
        ("its error", "text", "KeyError: 'a'"),
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_module", "exit status 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("pass", "it printed no row: "),
        ("import time; time.sleep(60)", "stopped after 0.2 s: "),
    ],
)
def test_a_program_that_ends_badly_is_a_row_that_fails(tmp_path, source, problem):
    [row] = run(tmp_path, source, timeout_s=0.2 if "sleep" in source else 60)
    assert (row.outcome, row.detail) == ("failed", problem)


WITH_CHILD = '''
import sys
from agents import run_command
from rows import main, row
child = """
import fcntl, time
lock = open('lock', 'w')
fcntl.flock(lock, fcntl.LOCK_EX)
print('begun', flush=True)
time.sleep(600)
"""
run = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
@row("hangs")
def _():
    run_command([sys.executable, "-c", run], cwd=".", variables={}, timeout_s=TIMEOUT)
main()
'''


@pytest.mark.parametrize(("of_row", "of_program"), [(1, 60), (60, 1)])
def test_an_agent_that_hangs_ends_with_all_that_it_runs(tmp_path, of_row, of_program):
    [row] = run(tmp_path, WITH_CHILD.replace("TIMEOUT", str(of_row)), timeout_s=of_program)
    assert row.outcome == "failed"
    assert (tmp_path / "log").read_text().splitlines().count("begun") == 1
    with (tmp_path / "home" / "client" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)    # which the child would hold for ten minutes


@pytest.mark.parametrize(
    ("default", "scripted", "works"),
    [
        ("ok", "ok", True),
        ("text", "ok", True),
        ("ok", "text", False),
        ("failed", "ok", False),
        ("ok", "failed", False),
        ("ok", None, True),
        ("text", None, False),
        (None, "ok", True),
    ],
)
def test_a_row_works_if_it_fails_with_neither_model_and_works_with_the_scripted_one(default, scripted, works):
    outcomes = {"default": default, "scripted": scripted}
    rows = {model: [Row(name="a", outcome=outcome)] for model, outcome in outcomes.items() if outcome}
    [result] = results("client", "1.0", rows)
    assert result.works is works


def test_a_row_that_one_model_lacks_fails():
    rows = {"default": [Row(name="a", outcome="ok"), Row(name="b", outcome="ok")], "scripted": []}
    assert [result.works for result in results("client", "1.0", rows)] == [False, False]


def test_the_table_is_read_back():
    table = results("client", "1.0", {"default": [Row(name="a", outcome="text", detail="no call")]})
    assert from_json(as_json(table, genserve="0.1.0")) == table


def test_the_table_in_markdown_shows_problems_as_code():
    row = Row(name="a", outcome="failed", detail="x|`y`", seconds=0.25)
    [result] = results("client", "1.0", {"default": [row]})
    assert as_markdown([result]).splitlines()[-1] == "| client 1.0 | a | FAILS | - | 0.2 | `x/ y ` |"
    assert as_summary([result]).splitlines()[-1] == "| client 1.0 | 1 | 0 | 0 |  | a: `x/ y ` |"


def test_every_client_has_a_program_and_pins_its_packages():
    programs = client_programs([])
    assert len(programs) > 10
    for program in programs:
        if (requirements := program.folder / "requirements.txt").exists():
            lines = requirements.read_text(encoding="utf-8").split()
            assert all("==" in line for line in lines), program.name
        else:
            assert (program.folder / "package-lock.json").exists(), program.name


@pytest.fixture(scope="module")
def script():
    path = Path(conformance.__file__).parent / "scripted" / "model.py"
    spec = importlib.util.spec_from_file_location("scripted_decoder_stage", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def conversation(script, *turns: str, tools=()):
    system = f"<tools>\n{chr(10).join(map(json.dumps, tools))}\n</tools>" if tools else "Be brief."
    texts = [("system", system), *zip(("user", "assistant") * 4, turns, strict=False)]
    return script.Conversation("".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in texts))


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_the_scripted_model_calls_a_tool_for_each_city_and_quotes_the_results(script):
    asked = conversation(script, "The weather in Rome and Paris?", tools=[WEATHER]).answer()
    assert asked.count("<tool_call>") == 2
    assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in asked
    turns = ("Weather?", "<tool_call>...</tool_call>", "<tool_response>\n18 degrees\n</tool_response>")
    assert conversation(script, *turns, tools=[WEATHER]).answer() == "The tool says: 18 degrees"
    assert conversation(script, "Say hello.", tools=[WEATHER]).answer() == "You said: Say hello."


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 9}, "b": {"type": "boolean"}}},
        {"$ref": "#/$defs/City", "$defs": {"City": {"properties": {"name": {"type": "string"}}}}},
        {"anyOf": [{"type": "null"}, {"enum": ["x", "y"]}]},
        {"type": ["null", "number"]},
        {"type": "array", "minItems": 2, "items": {"const": 3}},
    ],
)
def test_the_scripted_model_writes_an_instance_of_a_schema(script, schema):
    jsonschema.validate(conversation(script, "Anything.").example(schema), schema)


WRITE = {"name": "write", "parameters": {"properties": {"path": {}, "text": {}}}}
TASK = 'use the tool write({"text": "a", "path": "1"}), then use the tool write({"text": "b", "path": "2"}).'
CALL = "<tool_call>...</tool_call>"


def result(text):
    return f"<tool_response>\n{text}\n</tool_response>"


def called(answer):
    return json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]


def test_the_scripted_model_makes_the_calls_of_a_task_one_per_turn(script):
    first = conversation(script, TASK, tools=[WRITE]).answer()
    # In the order of the schema, since the grammar of a call wants that.
    assert list(called(first).items()) == [("path", "1"), ("text", "a")]
    second = conversation(script, TASK, CALL, result("done 1"), tools=[WRITE]).answer()
    assert called(second) == {"path": "2", "text": "b"}
    last = conversation(script, TASK, CALL, result("done 1"), CALL, result("done 2"), tools=[WRITE])
    assert last.answer() == "The tool says: done 2"


def test_the_scripted_model_calls_a_deferred_tool_only_when_a_search_has_found_it(script):
    task = 'use the tool search({"query": "write"}), then use the tool write({"path": "1"}).'
    search = {"name": "search", "parameters": {}}
    missing = conversation(script, task, CALL, result("nothing"), tools=[search]).answer()
    assert "<tool_call>" not in missing
    found = conversation(script, task, CALL, result("The tool write can be called now"), tools=[search])
    assert called(found.answer()) == {"path": "1"}


def test_the_scripted_model_goes_on_with_a_task_after_a_summary(script):
    asks = "Summarize the conversation."
    summary = conversation(script, TASK, CALL, result("done 1"), CALL, asks, tools=[WRITE]).answer()
    assert summary.startswith("<summary>")
    assert called(conversation(script, summary, tools=[WRITE]).answer()) == {"path": "2", "text": "b"}
    # A summary may come with the task, and may be cut.
    both = conversation(script, f"{TASK} {summary[:-30]}", tools=[WRITE])
    assert called(both.answer()) == {"path": "2", "text": "b"}
    assert len(both.task.calls) == 2
    # The result of a call whose predecessors are no longer in the prompt says how many there were.
    marked = conversation(script, TASK, CALL, result("(2 calls are done)"), tools=[WRITE])
    assert "<tool_call>" not in marked.answer()


def test_the_scripted_model_waits_before_the_first_call_of_a_task_only(script):
    task = f"wait 25 seconds, then {TASK}"
    assert conversation(script, task, tools=[WRITE]).task.wait_s == 25
    assert conversation(script, task, CALL, result("done 1"), tools=[WRITE]).task.wait_s == 0
    assert conversation(script, "wait 25 seconds", tools=[WRITE]).task.wait_s == 0

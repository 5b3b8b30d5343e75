"""The chat page in a real browser, over a server whose model repeats the last message."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.echo_chat import echo_repository
from tests.support.live_server import LiveServer, slow_down, wait_until
from tests.support.step_gate import StepGate

pytestmark = pytest.mark.extended

KEY = "sesame"
FORGET = """
async (key) => {
  localStorage.clear();
  sessionStorage.clear();
  localStorage.setItem("genserve.key", JSON.stringify(key));
  const opened = indexedDB.open("genserve");
  await new Promise((done) => { opened.onsuccess = done; });
  const writes = opened.result.transaction(["conversations", "summaries"], "readwrite");
  for (const name of writes.objectStoreNames) writes.objectStore(name).clear();
  await new Promise((done) => { writes.oncomplete = done; });
  opened.result.close();
}
"""


@pytest.fixture(scope="module")
def echo(tiny_repository, tmp_path_factory) -> Iterator[LiveServer]:
    root = echo_repository(tiny_repository, tmp_path_factory.mktemp("echo") / "repository")
    loads = {"model_control_mode": "explicit", "load_model": ("*",)}
    with LiveServer(root, api_key=KEY, override_generation_config='{"top_p": 0.75}', **loads) as server:
        yield server


class ChatPage:
    """The page in a browser context of its own, with what went wrong and what it requested."""

    def __init__(self, browser: Browser, server: LiveServer, **options) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 700}, **options})
        self.context.add_init_script(f"""localStorage["genserve.key"] ??= '"{KEY}"'""")
        self._begin(server.url)

    def _begin(self, url: str) -> None:
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.faults: list[str] = []
        self.urls: list[str] = []
        self.bodies: list[dict] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda line: self.faults.append(line.text) if line.type == "error" else None)
        self.page.on("request", self._on_request)
        self.url = url

    def _on_request(self, request) -> None:
        self.urls.append(request.url)
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(request.post_data_json)

    def open(self, *, key: str = KEY) -> ChatPage:
        """Open the page as a browser that was never here, but has the key."""
        self._load()
        self.page.evaluate(FORGET, key)
        self._load()
        return self

    def _load(self) -> None:
        self.page.goto(self.url)
        self.page.locator(".composer").wait_for()
        self.page.locator(".welcome, dialog, .message").first.wait_for()    # the server has answered

    @contextmanager
    def other_tab(self) -> Iterator[ChatPage]:
        """Another tab of the same browser."""
        other = copy(self)
        other._begin(self.url)
        other._load()
        yield other
        assert other.faults == []
        other.page.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While the user looks at another tab; headless, all are visible."""
        hide = "Object.defineProperty(document, 'hidden', {get: () => true, configurable: true})"
        self.page.evaluate(hide)
        yield
        self.page.evaluate("delete document.hidden")
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def close(self, server: LiveServer) -> None:
        """Assert that nothing failed and no other address was called."""
        urls, faults = self.urls[:], self.faults[:]
        for record in (self.urls, self.faults, self.bodies):
            record.clear()
        assert faults == []
        assert [url for url in urls if not url.startswith((server.url, "blob:"))] == []

    def send(self, text: str) -> None:
        self.composer.fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> None:
        """Send a message, and wait for the end of the answer."""
        self.send(text)
        self.wait_for_answer()

    def wait_for_answer(self) -> None:
        expect(self.answer).to_have_attribute("aria-busy", "false", timeout=20_000)
        expect(self.answer.locator(".speed")).to_be_visible()

    def shows(self, *texts: str) -> None:
        """Assert that these are the messages."""
        expect(self.page.locator(".thread").locator(".bubble, .markdown")).to_have_text(texts)

    @property
    def composer(self):
        return self.page.get_by_label("Message", exact=True)

    @property
    def answer(self):
        return self.page.locator(".message.assistant").last

    def button(self, name: str):
        return self.page.get_by_role("button", name=name, exact=True)


@pytest.fixture(scope="module")
def tab(browser, echo) -> Iterator[ChatPage]:
    """The page that most tests share, since a new one takes as long as a test."""
    page = ChatPage(browser, echo)
    yield page
    page.context.close()


@pytest.fixture
def chat(tab, echo) -> Iterator[ChatPage]:
    yield tab.open()
    tab.close(echo)


@pytest.fixture
def phone(browser, echo) -> Iterator[ChatPage]:
    size = {"width": 360, "height": 640}
    page = ChatPage(browser, echo, viewport=size, color_scheme="dark", has_touch=True)
    yield page.open()
    page.close(echo)
    page.context.close()


def test_the_page_is_served_without_a_key_and_with_a_strict_policy(echo):
    with httpx2.Client(base_url=echo.url) as http:
        page = http.get("/")
        policy = page.headers["content-security-policy"]
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        loaded = re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)
        assert sorted(loaded) == ["page/chat.js", "page/icon.svg", "page/style.css"]
        for path in ("", *loaded):
            file = http.get(f"/{path}")
            assert file.headers["content-security-policy"] == policy
            assert http.head(f"/{path}").headers["etag"] == file.headers["etag"]
            again = http.get(f"/{path}", headers={"If-None-Match": file.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert http.get("/page/missing.js").status_code == 404
        assert http.get("/page/..%2fapp.py").status_code == 404
        assert http.post("/", json={"inputs": "hi"}).status_code == 401
        assert http.post("/page/chat.js").status_code == 405


def test_an_answer_is_shown_as_markdown_and_never_as_html(chat):
    html = "<img src=//evil.example/x onerror=alert(1)>"
    chat.ask(f"**b** {html}\n```python\nif 1: pass\n```\n[l](javascript:a)")
    answer = chat.answer.locator(".markdown")
    expect(answer.locator("strong")).to_have_text("b")
    expect(answer.locator(".hljs-keyword").first).to_have_text("if")
    expect(answer).to_contain_text(html)
    assert answer.locator("img").count() == answer.locator("a").count() == 0
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert chat.page.evaluate("navigator.clipboard.readText()") == "if 1: pass"
    expect(chat.answer.locator(".speed")).to_contain_text("tokens/s")


def test_reasoning_is_folded(chat):
    chat.ask("<think>hm</think>ok")
    expect(chat.answer.locator("> .markdown")).to_have_text("ok")
    expect(chat.answer.locator(".reasoning .markdown")).not_to_be_visible()
    chat.answer.locator(".reasoning summary").click()
    expect(chat.answer.locator(".reasoning .markdown")).to_have_text("hm")


def test_the_reasoning_of_an_answer_is_ended(chat, echo, monkeypatch):
    with monkeypatch.context() as patch:
        slow_down(echo, patch, step_s=0.1)
        chat.send("<think>" + "0123456789" * 7)
        with chat.page.expect_response("**/v1/chat/completions/control") as controlled:
            chat.button("Answer now").click()
        assert controlled.value.json() == {"success": True}
    chat.page.keyboard.press("Escape")
    expect(chat.button("Answer now")).to_have_count(0)


def test_an_answer_is_stopped_and_continued(chat, echo, monkeypatch):
    with monkeypatch.context() as patch:
        slow_down(echo, patch, step_s=0.1)     # a browser on a busy machine is slow, too
        chat.send("0123456789" * 7)
        expect(chat.answer.locator(".markdown")).to_contain_text("0123")
        chat.page.keyboard.press("Escape")
        expect(chat.button("Send")).to_be_visible()
    stopped = chat.answer.locator(".markdown").inner_text()
    assert 4 <= len(stopped) < 70
    num_tokens = round((70 + len(stopped)) / 4)
    expect(chat.page.locator(".context")).to_contain_text(f"{num_tokens} of 256 tokens")
    chat.button("Continue").click()
    chat.wait_for_answer()
    expect(chat.answer.locator(".markdown")).to_have_text("0123456789" * 7)
    assert chat.bodies[-1]["messages"][-1] == {"role": "assistant", "content": stopped}
    assert chat.bodies[-1]["continue_final_message"] is True


@pytest.mark.slow
def test_a_stopped_scroll_stays_where_the_reader_is(chat, echo, monkeypatch):
    chat.page.set_viewport_size({"width": 1200, "height": 300})
    thread = "document.querySelector('.thread')"
    distance = f"(box => box.scrollHeight - box.scrollTop - box.clientHeight)({thread})"
    slow_down(echo, monkeypatch)
    chat.send("a\n\n" * 40)
    expect(chat.answer.locator("p").nth(8)).to_be_visible()
    assert chat.page.evaluate(distance) <= 2
    chat.page.locator(".thread").hover()
    chat.page.mouse.wheel(0, -200)
    wait_until(lambda: chat.page.evaluate(distance) > 100)
    chat.wait_for_answer()
    assert chat.page.evaluate(distance) > 100
    chat.button("Scroll to the end").click()
    wait_until(lambda: chat.page.evaluate(distance) <= 2)


def test_branches_by_regeneration_and_editing(chat):
    chat.ask("one")
    chat.button("Regenerate").click()
    branches = chat.answer.get_by_role("group", name="Branches")
    expect(branches).to_have_text("2/2")
    chat.wait_for_answer()
    chat.button("Previous branch").click()
    expect(branches).to_have_text("1/2")
    chat.page.locator(".message.user").hover()
    chat.page.locator(".message.user").get_by_role("button", name="Edit").click()
    chat.page.get_by_label("Edit the message").fill("two")
    chat.page.locator(".editing").get_by_role("button", name="Send").click()
    expect(chat.answer.locator(".markdown")).to_have_text("two")
    chat.wait_for_answer()
    expect(chat.page.locator(".message.user .branches")).to_have_text("2/2")
    chat.page.locator(".message.user").get_by_role("button", name="Previous branch").click()
    expect(chat.answer.locator(".markdown")).to_have_text("one")
    expect(branches).to_have_text("1/2")


def test_an_answer_is_continued_from_an_alternative_token(chat):
    chat.ask("abcdef")
    chat.page.keyboard.press("Alt+p")
    tokens = chat.answer.locator(".token")
    assert "".join(tokens.all_inner_texts()) == "abcdef"
    tokens.first.focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        chat.page.keyboard.press(key)
    before = "".join(tokens.all_inner_texts()[:2])
    choice = chat.page.locator(".alternatives button:not(:disabled)", has_text=re.compile("^[!-;=-~]")).first
    name = choice.locator("code").inner_text()
    choice.click()
    expect(chat.answer.locator(".branches")).to_have_text("2/2")
    chat.wait_for_answer()
    body = chat.bodies[-1]
    assert body["messages"] == [
        {"role": "user", "content": "abcdef"},
        {"role": "assistant", "content": before + name},
    ]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert "".join(tokens.all_inner_texts()).startswith(before + name)
    expect(chat.answer.locator(".token.chosen")).to_have_text(name)
    chat.page.keyboard.press("Alt+p")
    expect(chat.answer.locator(".markdown")).to_contain_text(before + name)


def test_an_answer_is_ended_at_a_token_and_the_end_is_deleted_and_restored(chat):
    chat.page.keyboard.press("Alt+s")
    chat.page.locator(".settings summary", has_text="more fields").click()
    chat.page.get_by_label("logit_bias", exact=True).fill('{"2": 50}')      # the end is an alternative
    chat.page.get_by_label("logprobs_mode", exact=True).select_option("processed")
    chat.ask("abcdef")
    chat.page.keyboard.press("Alt+p")
    num_requests = len(chat.bodies)
    chat.answer.locator(".token").nth(2).click()
    before = "".join(chat.answer.locator(".token").all_inner_texts()[:2])
    chat.page.locator(".alternatives button", has_text="end of answer").click()
    expect(chat.answer.locator(".branches")).to_have_text("2/2")
    assert "".join(chat.answer.locator(".token").all_inner_texts()) == f"{before}end"
    assert len(chat.bodies) == num_requests
    chat.button("Delete this branch").last.click()
    expect(chat.answer.locator(".branches")).to_have_count(0)
    chat.button("Undo").click()
    expect(chat.answer.locator(".branches")).to_have_text("2/2")


@pytest.mark.slow
def test_the_answer_of_a_continued_thought_is_split_again(chat):
    chat.ask("<think>a b</think>c")
    chat.page.keyboard.press("Alt+p")
    tokens = chat.answer.locator(".token")
    tokens.filter(has_text="b").click()
    choice = chat.page.locator(".alternatives button:not(:disabled)", has_text=re.compile("^[!-;=-~]")).first
    name = choice.locator("code").inner_text()
    choice.click()
    expect(chat.answer.locator(".branches")).to_have_text("2/2")
    chat.wait_for_answer()
    chat.page.keyboard.press("Alt+p")
    expect(chat.answer.locator(".reasoning .markdown")).to_contain_text(f"a {name}")
    expect(chat.answer.locator("> .markdown")).to_have_text("c")


def test_a_tool_call_is_shown_and_answered(chat):
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": city}}
    chat.page.keyboard.press("Alt+s")
    chat.page.get_by_label("Tools", exact=True).fill(json.dumps([tool]))
    question = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    chat.ask(question)
    expect(chat.answer.locator(".tool-name")).to_have_text("Calls get_weather")
    expect(chat.answer.locator(".tool-card pre")).to_have_text('{\n  "city": "Rome"\n}')
    assert (chat.bodies[-1]["tools"], chat.bodies[-1]["tool_choice"]) == ([tool], "auto")
    chat.page.get_by_label("Result of get_weather").fill("sunny")
    chat.button("Send result").click()
    expect(chat.page.locator(".message")).to_have_count(4)
    chat.wait_for_answer()
    expect(chat.answer.locator(".markdown")).to_have_text("sunny")
    asked, called, result = chat.bodies[-1]["messages"]
    [call] = called.pop("tool_calls")
    assert asked == {"role": "user", "content": question}
    assert called == {"role": "assistant", "content": None}
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}


def test_a_missing_and_a_wrong_key_are_asked_for(chat):
    chat.open(key="")
    dialog = chat.page.get_by_role("dialog", name="API key")
    expect(dialog.get_by_label("API key")).to_be_focused()
    chat.page.keyboard.press("Escape")
    expect(chat.page.get_by_role("alert")).to_have_text("This server needs an API key.Enter the key")
    chat.button("Enter the key").click()
    for key in ("wrong", KEY):
        dialog.get_by_label("API key").fill(key)
        dialog.get_by_role("button", name="Use the key").click()
        if key == "wrong":
            expect(dialog).to_contain_text("rejected")
    expect(chat.page.get_by_label("Model")).to_have_value("tiny")
    expect(chat.page.get_by_label("Message", exact=True)).to_be_focused()
    chat.ask("hi")
    expect(chat.answer.locator(".markdown")).to_have_text("hi")
    assert all("401" in fault for fault in chat.faults), "the browser itself reports these"
    chat.faults.clear()


def test_an_error_of_the_server_is_shown_and_tried_again(chat):
    chat.page.keyboard.press("Alt+s")
    chat.page.get_by_label("max_tokens", exact=True).fill("0")
    chat.send("hi")
    expect(chat.answer.get_by_role("alert")).to_contain_text("max_tokens")
    chat.page.get_by_role("button", name="Reset max_tokens").click()
    chat.button("Try again").click()
    chat.wait_for_answer()
    expect(chat.answer.locator(".markdown")).to_have_text("hi")
    assert all("400" in fault for fault in chat.faults), "the browser itself reports these"
    chat.faults.clear()


def test_advice_that_the_message_ends_with_is_shown_once(chat):
    advice = "set `max_tokens`"
    ends = (f" ({advice})", f"; {advice}", f". {advice.capitalize()}.")
    bodies = iter({"error": {"message": f"value 3 is wrong{end}", "remedy": advice}} for end in ends)
    chat.page.route("**/completions", lambda route: route.fulfill(status=400, json=next(bodies)))
    for number in (1, 2, 3):
        chat.send("hi")
        expect(chat.page.locator(".error")).to_have_count(number)
        expect(chat.button("Send")).to_be_visible()
    expect(chat.page.locator(".error p")).to_have_text(["Value 3 is wrong.\nSet max_tokens."] * 3)
    chat.page.unroute("**/completions")
    chat.faults.clear()


def test_a_full_context_says_what_a_reader_can_do(chat):
    chat.send("0123456789" * 40)
    expect(chat.answer.get_by_role("alert")).to_contain_text("Start a new chat, or edit an earlier message")
    expect(chat.answer).not_to_contain_text("config.pbtxt")
    chat.button("New chat").last.click()
    expect(chat.page.get_by_role("heading", name="Chat with tiny")).to_be_visible()
    chat.faults.clear()


def test_the_page_shows_how_much_of_a_long_prompt_was_read(chat, echo, monkeypatch):
    monkeypatch.setattr(echo.model.engine._engine._scheduler, "max_num_batched_tokens", 32)
    gate = StepGate(echo.model)
    gate.shut()
    try:
        chat.send("abcdefghij" * 7)
        gate.allow(1)
        expect(chat.answer.get_by_role("status")).to_contain_text(re.compile(r"reading the prompt \d\d %"))
    finally:
        gate.remove()
    chat.wait_for_answer()
    chat.shows("abcdefghij" * 7, "abcdefghij" * 7)


def test_an_answer_that_breaks_off_says_so_and_the_page_waits_for_the_server(chat, echo, monkeypatch):
    with monkeypatch.context() as patch:
        slow_down(echo, patch, step_s=0.1)
        chat.send("0123456789" * 7)
        # The page keeps what it has some times per second: a reload loses the text of the last moment.
        expect(chat.answer.locator(".markdown")).to_contain_text("0123456789" * 2)
        chat.page.reload()
    expect(chat.answer.locator(".speed")).to_contain_text("not finished")
    chat.button("Continue").click()
    chat.wait_for_answer()
    chat.shows("0123456789" * 7, "0123456789" * 7)
    expect(chat.answer.locator(".speed")).not_to_contain_text("not finished")
    failing = "new ReadableStream({pull(stream) { stream.error(new TypeError('network error')); }})"
    broken = f"(fetch = real, new Response({failing}))"
    chat.page.evaluate(f"() => {{ const real = fetch; window.fetch = () => {broken}; }}")
    chat.send("one")
    expect(chat.answer.get_by_role("alert")).to_contain_text("The connection to the server broke before")
    chat.page.context.set_offline(True)
    chat.button("Try again").click()
    expect(chat.page.locator(".banner")).to_contain_text("does not answer. This page tries again")
    chat.page.context.set_offline(False)
    expect(chat.page.locator(".banner")).to_have_count(0)
    chat.button("Try again").click()
    chat.wait_for_answer()
    assert all("DISCONNECTED" in fault for fault in chat.faults), "the browser itself reports these"
    chat.faults.clear()


def test_the_page_waits_for_a_model_that_was_unloaded(chat, echo):
    def control(action: str) -> None:
        url = f"{echo.url}/v2/repository/models/tiny/{action}"
        httpx2.post(url, json={}, headers={"Authorization": f"Bearer {KEY}"}).raise_for_status()

    chat.ask("one")
    control("unload")
    try:
        chat.button("Regenerate").click()
        expect(chat.answer.get_by_role("alert")).to_contain_text("Try again once it is loaded")
        expect(chat.page.locator(".banner")).to_contain_text("No text model is loaded on this server.")
        expect(chat.page.get_by_label("Model")).to_be_disabled()
    finally:
        control("load")
    expect(chat.page.locator(".banner")).to_have_count(0)
    chat.button("Try again").click()
    chat.wait_for_answer()
    assert all("503" in fault for fault in chat.faults), "the browser itself reports these"
    chat.faults.clear()


def test_a_message_is_not_sent_with_tools_that_are_not_valid(chat):
    chat.page.keyboard.press("Alt+s")
    tools = chat.page.get_by_label("Tools", exact=True)
    tools.fill('[{"a": ')
    chat.send("hi")
    expect(chat.page.get_by_role("alert")).to_contain_text("Nothing was sent: the tools")
    expect(chat.composer).to_have_value("hi")
    expect(chat.page.locator(".message")).to_have_count(0)
    chat.button("Edit the tools").click()
    expect(tools).to_be_focused()
    tools.fill("[1]")
    expect(chat.page.locator(".problem")).to_have_text("The tools are not a list of functions.")
    tools.fill("")
    expect(chat.page.get_by_role("alert")).to_have_count(0)
    chat.button("Send").click()
    chat.wait_for_answer()
    chat.shows("hi", "hi")


def test_a_value_that_the_server_will_reject_is_marked(chat):
    chat.page.keyboard.press("Alt+s")
    field = chat.page.locator(".field", has=chat.page.get_by_label("temperature", exact=True))
    expect(field.locator(".range")).to_have_text("0 to 2, at most 100")
    for value, is_invalid in (("-3", "true"), ("101", "true"), ("0", "false"), ("100", "false")):
        field.get_by_label("temperature", exact=True).fill(value)
        expect(field.get_by_label("temperature", exact=True)).to_have_attribute("aria-invalid", is_invalid)
        expect(field.locator(".problem")).to_have_count(1 if is_invalid == "true" else 0)
    chat.page.get_by_label("top_p", exact=True).fill("2")
    expect(chat.page.locator(".problem")).to_have_text("Outside the server's range: 0 to 1.")


def test_settings_stay_in_their_chat_unless_they_are_kept_for_new_ones(chat):
    chat.page.keyboard.press("Alt+s")
    system = chat.page.get_by_label("System prompt")
    system.fill("Be a pirate.")
    chat.page.reload()
    chat.button("Settings").click()
    expect(system).to_have_value("Be a pirate.")
    chat.ask("hi")
    chat.page.keyboard.press("Alt+n")
    expect(system).to_have_value("")
    chat.page.locator(".conversations .title").click()
    expect(system).to_have_value("Be a pirate.")
    chat.button("Begin new chats with these").click()
    chat.page.keyboard.press("Alt+n")
    expect(system).to_have_value("Be a pirate.")
    chat.button("Begin new chats with the defaults").click()
    chat.page.keyboard.press("Alt+n")
    expect(system).to_have_value("")


def test_a_draft_stays_in_its_chat_and_survives_a_reload(chat):
    chat.button("What is the capital of Japan?").click()
    chat.wait_for_answer()
    expect(chat.composer).to_be_focused()
    chat.composer.fill("of the first chat")
    chat.page.keyboard.press("Alt+n")
    expect(chat.composer).to_have_value("")
    chat.composer.fill("of the new chat")
    chat.page.reload()
    expect(chat.composer).to_have_value("of the new chat")
    chat.page.locator(".conversations .title").click()
    expect(chat.composer).to_have_value("of the first chat")


def test_the_button_to_the_end_goes_where_all_is_in_sight(chat):
    chat.page.set_viewport_size({"width": 1200, "height": 400})
    chat.ask("a\n\n" * 30)
    chat.page.locator(".message.user").hover()
    chat.page.locator(".message.user").get_by_role("button", name="Edit").click()
    chat.page.get_by_label("Edit the message").fill("b")
    chat.page.locator(".editing").get_by_role("button", name="Send").click()
    expect(chat.answer.locator(".markdown")).to_have_text("b")
    chat.wait_for_answer()
    chat.page.locator(".message.user").get_by_role("button", name="Previous branch").click()
    chat.page.locator(".thread").evaluate("box => box.scrollTop = 0")
    expect(chat.button("Scroll to the end")).to_be_visible()
    chat.page.locator(".message.user").get_by_role("button", name="Next branch").click()
    expect(chat.button("Scroll to the end")).to_have_count(0)
    chat.page.set_viewport_size({"width": 1200, "height": 700})


def test_settings_come_from_the_schema_and_go_into_the_request(chat, echo):
    chat.page.keyboard.press("Alt+s")
    chat.page.get_by_label("System prompt").fill("Be brief.")
    expect(chat.page.get_by_label("temperature", exact=True)).to_have_attribute("placeholder", "1")
    expect(chat.page.get_by_label("top_p", exact=True)).to_have_attribute("placeholder", "0.75")
    expect(chat.page.locator(".field", has_text="top_p").first).to_contain_text("model's 0.75")
    chat.page.get_by_label("temperature", exact=True).fill("0.5")
    chat.page.get_by_label("stop", exact=True).fill("x\\ny\nz")
    chat.page.locator(".settings summary", has_text="more fields").click()
    chat.page.get_by_label("ignore_eos", exact=True).select_option("false")
    chat.page.get_by_label("logit_bias", exact=True).fill('{"5": 1}')
    chat.ask("hi")
    expected = {"temperature": 0.5, "stop": ["x\ny", "z"], "ignore_eos": False, "logit_bias": {"5": 1}}
    assert expected.items() <= chat.bodies[-1].items()
    assert chat.bodies[-1]["repetition_detection"]["min_count"] > 1, "a default of chats"
    assert chat.bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    schema = httpx2.get(f"{echo.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    fields = schema["components"]["schemas"]["ChatBody"]["properties"]
    shown = chat.page.locator(".field-head label").all_inner_texts()
    assert set(shown) <= set(fields)
    assert {"top_p", "min_p", "dry_multiplier", "structured_outputs"} <= set(shown)


def test_the_request_is_shown_as_curl_and_python(chat):
    chat.ask("it's")
    chat.button("Request as curl and Python").last.click()
    dialog = chat.page.get_by_role("dialog", name="Request")
    expect(dialog).to_contain_text(f"curl -N {chat.url}/v1/chat/completions")
    expect(dialog).to_contain_text("it'\\''s")
    dialog.get_by_role("button", name="Python").click()
    source = dialog.locator("pre").inner_text()
    compile(source, "request.py", "exec")
    assert f'base_url="{chat.url}/v1"' in source
    assert KEY not in source


def test_the_request_of_the_menu_is_the_one_that_was_sent(chat):
    chat.page.keyboard.press("Alt+s")
    chat.page.get_by_label("temperature", exact=True).fill("0.5")
    chat.ask("one")
    chat.ask("two")
    chat.page.get_by_label("temperature", exact=True).fill("0.7")
    chat.button("More").click()
    chat.page.locator("#more").get_by_role("button", name="Request as curl and Python").click()
    dialog = chat.page.get_by_role("dialog", name="Request")
    expect(dialog).to_contain_text("As it was sent for this answer.")
    shown = dialog.locator("pre").inner_text()
    of_page = {"return_progress", "return_cache_match"}
    sent = {name: value for name, value in chat.bodies[-1].items() if name not in of_page}
    assert json.loads(shown[shown.index("{") : shown.rindex("}") + 1]) == sent


def test_conversations_survive_a_reload_and_can_be_renamed_exported_and_deleted(chat, tmp_path):
    chat.ask("keep me")
    chat.page.reload()
    expect(chat.answer.locator(".markdown")).to_have_text("keep me")
    listed = chat.page.locator(".conversations .title")
    chat.page.get_by_role("button", name="Rename keep me").click()
    chat.page.get_by_label("Title", exact=True).fill("renamed")
    chat.page.keyboard.press("Enter")
    expect(listed).to_have_text("renamed")
    with chat.page.expect_download() as download:
        chat.button("Export").click()
    file = tmp_path / "exported.json"
    download.value.save_as(file)
    chat.page.get_by_role("button", name="Delete renamed").click()
    chat.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(listed).to_have_count(0)
    expect(chat.page.get_by_role("heading", name="Chat with tiny")).to_be_visible()
    chat.page.get_by_label("File with conversations").set_input_files(file)
    expect(listed).to_have_text("renamed")
    expect(chat.answer.locator(".markdown")).to_have_text("keep me")


def test_a_conversation_of_the_chat_in_the_terminal_is_imported(chat, tmp_path):
    turns = (("system", "Be brief."), ("user", "one"), ("assistant", "ONE"))
    file = tmp_path / "saved.json"
    file.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    chat.page.get_by_label("File with conversations").set_input_files(file)
    expect(chat.page.locator(".conversations .title")).to_have_text("one")
    expect(chat.answer.locator(".markdown")).to_have_text("ONE")
    chat.ask("two")
    contents = [message["content"] for message in chat.bodies[-1]["messages"]]
    assert contents == ["Be brief.", "one", "ONE", "two"]
    file.write_text('[{"role": "tool", "content": "x"}]')
    chat.page.get_by_label("File with conversations").set_input_files(file)
    expect(chat.page.get_by_text("neither conversations of this page nor a list of messages")).to_be_visible()


def test_two_tabs_with_one_conversation_show_each_others_messages(chat):
    chat.ask("one")
    with chat.other_tab() as other:
        other.shows("one", "one")
        other.ask("two")
        chat.shows("one", "one", "two", "two")
        chat.ask("three")
        other.shows("one", "one", "two", "two", "three", "three")
        other.page.get_by_role("button", name="Rename one").click()
        other.page.get_by_label("Title", exact=True).fill("renamed")
        other.page.keyboard.press("Enter")
        expect(chat.page.locator(".conversations .title")).to_have_text("renamed")


def test_tabs_that_have_not_seen_each_others_messages_keep_both(chat):
    chat.ask("one")
    with chat.other_tab() as other:
        with other.hidden():
            chat.ask("two")
            other.ask("three")
            other.shows("one", "one", "three", "three")
        branches = other.page.locator(".message.user .branches")
        expect(branches).to_have_text("2/2")
        other.shows("one", "one", "three", "three")
        chat.shows("one", "one", "two", "two")
        for tab in (chat, other):
            tab.page.reload()
        expect(branches).to_have_text("2/2")
        expect(chat.page.locator(".message.user .branches")).to_have_text("2/2")


def test_what_one_tab_deletes_stays_deleted_unless_the_other_has_written_behind_it(chat):
    chat.ask("one")
    chat.ask("two")
    delete = "Delete this branch"
    with chat.other_tab() as other:
        with other.hidden():
            chat.page.locator(".message.user").last.hover()
            chat.button(delete).nth(2).click()
            chat.shows("one", "one")
            other.ask("three")
        every = ("one", "one", "two", "two", "three", "three")
        chat.shows(*every)
        other.shows(*every)
        with other.hidden():
            chat.page.locator(".message.user").last.hover()
            chat.button(delete).nth(4).click()
            other.page.keyboard.press("Alt+s")
            other.page.get_by_label("System prompt").fill("Be brief.")
        other.shows(*every[:4])
        chat.page.keyboard.press("Alt+s")
        expect(chat.page.get_by_label("System prompt")).to_have_value("Be brief.")
        chat.button("Undo").click()
        other.shows(*every)
        other.page.reload()
        other.shows(*every)


def test_a_conversation_that_another_tab_deletes_does_not_come_back(chat, echo, monkeypatch):
    chat.ask("one")
    with chat.other_tab() as other:
        with monkeypatch.context() as patch:
            slow_down(echo, patch, step_s=0.1)
            other.send("0123456789" * 7)
            expect(other.answer.locator(".markdown")).to_contain_text("0123")
            chat.page.get_by_role("button", name="Delete one").click()
            chat.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
            expect(other.page.get_by_role("heading", name="Chat with tiny")).to_be_visible()
            expect(other.page.locator(".notice")).to_contain_text("deleted in another tab")
        other.page.reload()
        for tab in (chat, other):
            expect(tab.page.get_by_role("heading", name="Chat with tiny")).to_be_visible()
            expect(tab.page.locator(".conversations .title")).to_have_count(0)


def test_formulas_are_typeset_and_prices_are_none(chat):
    chat.ask("$5 or $6, \\(a^2\\)\n\n$$\\frac{1}{x}$$\n\n`$y$`\n\n\\[z\\] $\\href{javascript:a}{b}$")
    answer = chat.answer.locator(".markdown")
    expect(answer.locator(".katex")).to_have_count(4)
    expect(answer.locator(".katex-display")).to_have_count(2)
    expect(answer).to_contain_text("$5 or $6, ")
    expect(answer.locator("code")).to_have_text("$y$")
    assert answer.locator("a").count() == 0
    chat.page.evaluate("document.fonts.ready")
    assert any(url.endswith(".woff2") for url in chat.urls)


def test_text_files_and_long_pasted_texts_are_attached(chat):
    code = {"name": "a.py", "mimeType": "text/x-python", "buffer": b"print('```')\n"}
    picture = {"name": "b.png", "mimeType": "image/png", "buffer": b"\x89PNG\xff"}
    chat.page.get_by_label("Text files", exact=True).set_input_files([code, picture])
    expect(chat.page.locator(".notice")).to_contain_text("b.png is not a text file")
    chat.composer.evaluate("""area => {
        const clipboardData = new DataTransfer();
        clipboardData.setData("text/plain", "x".repeat(2000));
        area.dispatchEvent(new ClipboardEvent("paste", {clipboardData, bubbles: true, cancelable: true}));
    }""")
    expect(chat.page.locator(".chips li")).to_have_count(2)
    chat.button("Remove pasted text").click()
    chat.page.reload()
    expect(chat.page.locator(".chip-name")).to_have_text("a.py")
    chat.ask("why?")
    sent = "File a.py:\n````\nprint('```')\n````\n\nwhy?"
    assert chat.bodies[-1]["messages"] == [{"role": "user", "content": sent}]
    expect(chat.page.locator(".chips li")).to_have_count(0)
    expect(chat.page.locator(".attachment summary")).to_contain_text("a.py")
    expect(chat.page.locator(".bubble")).to_have_text("why?")
    chat.page.locator(".message.user").hover()
    chat.page.locator(".message.user").get_by_role("button", name="Edit").click()
    expect(chat.page.get_by_label("Edit the message")).to_have_value("why?")
    chat.page.get_by_label("Edit the message").fill("how?")
    chat.page.locator(".editing").get_by_role("button", name="Send").click()
    chat.wait_for_answer()
    assert chat.bodies[-1]["messages"][0]["content"] == sent.replace("why", "how")


def test_a_chat_goes_on_with_its_last_messages_when_the_context_is_nearly_full(chat):
    chat.ask("0123456789" * 8)
    expect(chat.page.locator(".context")).to_contain_text("of 256 tokens")
    expect(chat.page.locator(".context-advice")).to_have_count(0)
    chat.ask("b1" * 5)
    expect(chat.page.locator(".context-advice")).to_contain_text("nearly full")
    chat.button("Go on in a new chat with the last messages").click()
    chat.shows("b1" * 5, "b1" * 5)
    expect(chat.page.locator(".conversations .title")).to_have_count(2)
    chat.ask("c")
    assert len(chat.bodies[-1]["messages"]) == 3


def test_an_answer_tells_where_its_time_went_and_is_replayed(chat):
    chat.ask("the same beginning, one")
    chat.page.keyboard.press("Alt+n")
    chat.ask("the same beginning, two")
    chat.answer.locator("button.speed").click()
    panel = chat.answer.get_by_role("region", name="Timing of this answer")
    expect(panel.locator("th").filter(has_text="Read the prompt")).to_be_visible()
    expect(panel.locator(".differs code").first).to_have_text(re.compile("^two"))
    expect(panel.locator(".differs code").last).to_have_text(re.compile("^one"))
    panel.get_by_role("button", name="Replay").click()
    expect(panel.locator(".replay")).to_contain_text("The same bits: all")
    assert chat.bodies[-1]["seed"] == chat.bodies[-2]["seed"]


def test_two_answers_are_compared_side_by_side(chat):
    chat.ask("one")
    chat.button("Compare with another answer").click()
    chat.page.get_by_role("dialog").get_by_role("button", name="With another seed").click()
    sides = chat.page.locator(".beside section")
    expect(sides).to_have_count(2)
    chat.wait_for_answer()
    seeds = [body["seed"] for body in chat.bodies[-2:]]
    assert seeds[0] != seeds[1]
    expect(sides.locator("h2")).to_have_text([f"seed {seed}" for seed in seeds])
    sides.first.get_by_role("button", name="Go on with this one").click()
    expect(chat.page.locator(".beside")).to_have_count(0)
    expect(chat.answer.locator(".branches")).to_have_text("1/2")


def test_a_message_is_found_in_any_branch(chat):
    for text in ("one", "two", "three", "four"):
        chat.page.keyboard.press("Alt+n")
        chat.ask(text)
    chat.page.locator(".message.user").hover()
    chat.page.locator(".message.user").get_by_role("button", name="Edit").click()
    chat.page.get_by_label("Edit the message").fill("other")
    chat.page.locator(".editing").get_by_role("button", name="Send").click()
    chat.wait_for_answer()
    chat.page.get_by_label("Search conversations").fill("OUR")
    found = chat.page.locator(".conversations .found")
    expect(found).to_have_count(2)
    expect(found.first.locator("mark")).to_have_text("our")
    found.first.click()
    chat.shows("four", "four")


def test_settings_are_kept_as_a_preset_of_the_model(chat):
    chat.page.keyboard.press("Alt+s")
    chat.page.get_by_label("System prompt").fill("Be a pirate.")
    chat.page.get_by_label("Name of a new preset").fill("pirate")
    chat.button("Save").click()
    chat.page.keyboard.press("Alt+n")
    expect(chat.page.get_by_label("System prompt")).to_have_value("")
    chat.page.get_by_label("Presets of tiny").select_option("pirate")
    expect(chat.page.get_by_label("System prompt")).to_have_value("Be a pirate.")
    chat.button("Delete").click()
    expect(chat.page.get_by_label("Presets of tiny")).to_be_disabled()


def test_models_are_unloaded_and_loaded(chat):
    chat.button("More").click()
    chat.page.locator("#more").get_by_role("button", name="Models").click()
    dialog = chat.page.get_by_role("dialog", name="Models")
    expect(dialog.locator(".models-name")).to_have_text("tiny")
    dialog.get_by_role("button", name="Unload tiny").click()
    expect(dialog.get_by_role("button", name="Load tiny")).to_be_enabled()
    expect(chat.page.locator(".banner")).to_contain_text("No text model is loaded on this server.")
    dialog.get_by_role("button", name="Load tiny").click()
    expect(dialog).to_contain_text("ready, generates text, up to", timeout=20_000)
    chat.button("Close").click()
    expect(chat.button("More")).to_be_focused()
    chat.ask("one")


def test_a_message_loads_a_model_on_demand(browser, tiny_repository, tmp_path, monkeypatch):
    root = echo_repository(tiny_repository, tmp_path / "repository")
    with LiveServer(root, api_key=KEY, model_control_mode="on-demand") as server:
        chat = ChatPage(browser, server).open()
        expect(chat.page.get_by_label("Model")).to_have_text("tiny (not loaded)")
        lifecycle = server.server.services.repository.lifecycle
        opened, load = threading.Event(), lifecycle.load
        monkeypatch.setattr(lifecycle, "load", lambda request: opened.wait() and load(request))
        chat.send("one")
        expect(chat.answer.get_by_role("status")).to_have_text("loading tiny")
        opened.set()
        chat.wait_for_answer()
        assert "temperature" in chat.bodies[0], "the defaults of a chat are known once it is loaded"
        expect(chat.page.get_by_label("Model")).to_have_text("tiny")
        chat.button("More").click()
        chat.page.locator("#more").get_by_role("button", name="Models").click()
        dialog = chat.page.get_by_role("dialog", name="Models")
        expect(dialog.locator("li .faint")).to_contain_text(re.compile(r"up to [\d.]+ .B, leaves in 5 min"))
        chat.button("Unload tiny").click()
        expect(dialog.locator("li .faint")).to_have_text("not loaded")
        chat.button("Load tiny").click()
        expect(chat.button("Unload tiny")).to_be_enabled()
        chat.close(server)
        chat.context.close()


def test_a_key_that_may_not_control_the_server_is_told_so(browser, tiny_repository, tmp_path):
    root = echo_repository(tiny_repository, tmp_path / "repository")
    with LiveServer(root, api_key=KEY, control_key="other", model_control_mode="on-demand") as server:
        chat = ChatPage(browser, server).open()
        chat.button("More").click()
        chat.page.locator("#more").get_by_role("button", name="Models").click()
        chat.button("Load tiny").click()
        expect(chat.page.get_by_role("dialog").get_by_role("alert")).to_contain_text("key")
        assert all("403" in fault for fault in chat.faults), "the browser itself reports these"
        chat.context.close()


def test_the_alternatives_at_a_token_cover_nothing_but_tokens(chat):
    chat.ask("one")
    chat.page.keyboard.press("Alt+p")
    chat.answer.locator(".token").first.click()
    panel = chat.page.locator(".alternatives").bounding_box()
    legend = chat.answer.locator(".legend").bounding_box()
    assert panel["y"] + panel["height"] <= legend["y"]
    chat.page.keyboard.press("Escape")
    assert chat.answer.locator(".legend").bounding_box()["y"] < legend["y"]
    chat.page.keyboard.press("Alt+p")


def test_a_link_leads_to_the_probabilities_of_an_answer(chat):
    chat.ask("one")
    chat.page.keyboard.press("Alt+p")
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    chat.button("Copy link").click()
    link = chat.page.evaluate("navigator.clipboard.readText()")
    chat.page.keyboard.press("Alt+p")
    chat.page.keyboard.press("Alt+n")
    chat.page.goto(link)
    expect(chat.answer.locator(".token").first).to_be_visible()
    chat.page.goto(f"{chat.url}/#probabilities/a/b")
    expect(chat.page.locator(".notice")).to_contain_text("does not have the linked conversation")


def test_a_wide_table_scrolls_on_a_phone_and_its_words_are_whole(phone):
    chat = phone
    chat.send("|planet|diameter|satellites|\n|-|-|-|\n|" + "|".join(["incomprehensible"] * 3) + "|")
    chat.button("Send").click()     # Enter begins a line
    chat.wait_for_answer()
    lines = "cell => { const r = new Range(); r.selectNodeContents(cell); return r.getClientRects().length }"
    assert [cell.evaluate(lines) for cell in chat.answer.locator("td").all()] == [1, 1, 1]
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_page_fits_a_phone_and_follows_dark_mode(phone):
    chat = phone
    chat.send("a `" + "w" * 60 + "`\n```\n" + "w" * 60 + "\n```")
    chat.button("Send").click()     # Enter begins a line
    chat.wait_for_answer()
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 360
    expect(chat.page.locator(".sidebar")).to_have_count(0)
    chat.button("Conversations").click()
    expect(chat.page.locator(".sidebar")).to_be_in_viewport()
    background = "getComputedStyle(document.body).backgroundColor"
    assert chat.page.evaluate(background) == "rgb(22, 24, 29)"
    chat.button("Close the list").click()
    chat.button("More").click()
    chat.button("Colours: as the system").click()
    assert chat.page.evaluate(background) == "rgb(255, 255, 255)"


@pytest.mark.slow
def test_the_page_works_behind_a_path_of_a_proxy(tab, echo):
    def proxied(route):
        route.fulfill(response=route.fetch(url=route.request.url.replace("/llm/", "/")))

    tab.open()
    tab.page.route(f"{echo.url}/llm/**", proxied)
    tab.page.goto(f"{echo.url}/llm/")
    tab.ask("hi")
    expect(tab.answer.locator(".markdown")).to_have_text("hi")
    behind = [url.removeprefix(f"{echo.url}/llm/") for url in tab.urls if "/llm/" in url]
    assert {"page/chat.js", "openapi.json", "v1/chat/completions"} <= {*behind}
    assert all("/llm/" in url for url in tab.urls[-len(behind) :])
    tab.page.unroute(f"{echo.url}/llm/**")
    tab.close(echo)

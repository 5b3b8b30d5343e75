"""The chat page in a real browser, over a server whose model repeats the last message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.echo_chat import echo_repository
from tests.support.live_server import LiveServer, slow_down, wait_until

KEY = "sesame"
FORGET = """
async (key) => {
  localStorage.clear();
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
    with LiveServer(root, api_key=KEY, override_generation_config='{"top_p": 0.75}') as server:
        yield server


class ChatPage:
    """The page in a browser context of its own, with what went wrong and what it requested."""

    def __init__(self, browser: Browser, server: LiveServer, **options) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 700}, **options})
        self.context.add_init_script(f"""localStorage["genserve.key"] ??= '"{KEY}"'""")
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.faults: list[str] = []
        self.urls: list[str] = []
        self.bodies: list[dict] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda line: self.faults.append(line.text) if line.type == "error" else None)
        self.page.on("request", self._on_request)
        self.url = server.url

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

    def close(self, server: LiveServer) -> None:
        """Assert that nothing failed and no other address was called."""
        urls, faults = self.urls[:], self.faults[:]
        for record in (self.urls, self.faults, self.bodies):
            record.clear()
        assert faults == []
        assert [url for url in urls if not url.startswith((server.url, "blob:"))] == []

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> None:
        """Send a message, and wait for the end of the answer."""
        self.send(text)
        self.wait_for_answer()

    def wait_for_answer(self) -> None:
        expect(self.answer).to_have_attribute("aria-busy", "false", timeout=20_000)
        expect(self.answer.locator(".speed")).to_be_visible()

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
        assert http.post("/page/chat.js").status_code == 401


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


def test_an_answer_is_stopped_and_continued(chat, echo, monkeypatch):
    with monkeypatch.context() as patch:
        slow_down(echo, patch, step_s=0.1)     # a browser on a busy machine is slow, too
        chat.send("0123456789" * 7)
        expect(chat.answer.locator(".markdown")).to_contain_text("0123")
        chat.page.keyboard.press("Escape")
        expect(chat.button("Send")).to_be_visible()
    stopped = chat.answer.locator(".markdown").inner_text()
    assert 4 <= len(stopped) < 70
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
    for key in ("wrong", KEY):
        dialog.get_by_label("API key").fill(key)
        dialog.get_by_role("button", name="Use the key").click()
        if key == "wrong":
            expect(dialog).to_contain_text("rejected")
    expect(chat.page.get_by_label("Model")).to_have_value("tiny")
    chat.ask("hi")
    expect(chat.answer.locator(".markdown")).to_have_text("hi")
    assert all("401" in fault for fault in chat.faults), "the browser itself reports these"
    chat.faults.clear()


def test_an_error_of_the_server_is_shown_and_tried_again(chat):
    chat.page.keyboard.press("Alt+s")
    chat.page.get_by_label("max_tokens", exact=True).fill("100000")
    chat.send("hi")
    expect(chat.answer.get_by_role("alert")).to_contain_text("max_tokens is 100000")
    chat.page.get_by_role("button", name="Reset max_tokens").click()
    chat.button("Try again").click()
    chat.wait_for_answer()
    expect(chat.answer.locator(".markdown")).to_have_text("hi")
    assert all("400" in fault for fault in chat.faults), "the browser itself reports these"
    chat.faults.clear()


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

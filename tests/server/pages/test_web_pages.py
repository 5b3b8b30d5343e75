"""Pages in a real browser: attacks from other origins fail, and the server's own page works."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

from tests.server.browser import REBOUND
from tests.support.live_server import LiveServer
from tests.support.python_models import write_model

pytestmark = pytest.mark.extended

PLANT = """
from pathlib import Path
Path({marker!r}).touch()
class TritonPythonModel:
    def execute(self, requests): return []
"""
# Everything that a page may try. Answers what it could read: a status, a text, or nothing.
ATTACK = """
async ({base, source}) => {
  const parameters = {config: '{"backend": "python"}', "file:1/model.py": btoa(source)};
  const load = JSON.stringify({parameters});
  const infer = JSON.stringify({inputs: [{name: "X", datatype: "FP32", shape: [1], data: [1]}]});
  const posts = [
    ["/v2/repository/models/one/unload", "{}"],
    ["/v2/repository/models/evil/load", load],
    ["/v2/models/one/infer", infer],
    ["/v2/models/one/generate", infer],
    ["/v2/logging", '{"log_info": false, "log_warning": false}'],
    ["/v1/chat/completions", '{"messages": [{"role": "user", "content": "x"}]}'],
    ["/generate", '{"inputs": "x"}'],
  ];
  const read = [];
  for (const [path, body] of posts) {
    for (const type of ["text/plain", "application/x-www-form-urlencoded", "application/json", ""]) {
      for (const mode of ["no-cors", "cors"]) {
        try {
          const blob = new Blob([body], {type});
          const answer = await fetch(base + path, {method: "POST", mode, body: blob});
          read.push([path, answer.type, answer.status]);
        } catch (error) {}
      }
      navigator.sendBeacon(base + path, new Blob([body], {type}));
    }
    for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
      const frame = document.createElement("iframe");
      frame.name = `f${Math.random()}`;
      document.body.append(frame);
      const form = document.createElement("form");
      Object.assign(form, {action: base + path, method: "post", enctype, target: frame.name});
      const input = document.createElement("input");
      // As text/plain it is sent as NAME=VALUE: a JSON document whose last string holds the equals sign.
      [input.name, input.value] = [body.slice(0, -1) + (body.length > 2 ? "," : "") + '"_": "', '"}'];
      form.append(input);
      document.body.append(form);
      const loaded = new Promise((resolve) => frame.addEventListener("load", resolve));
      form.submit();
      await loaded;
    }
  }
  for (const path of ["/v2/models/one", "/metrics", posts[0][0], "/v1/models", "/docs"]) {
    await new Promise((resolve) => {
      const image = new Image();
      image.onload = () => { read.push([path, "image", 200]); resolve(); };
      image.onerror = resolve;
      image.src = base + path;
    });
    try {
      const answer = await fetch(base + path);
      read.push([path, "get", answer.status]);
    } catch (error) {}
  }
  return read;
}
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "planted"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    repository = tmp_path / "repository"
    write_model(repository, "one")
    with LiveServer(repository, model_control_mode="explicit", load_model=("one",)) as live:
        yield live


def attack(page: Any, base: str, marker: Path) -> list[list[Any]]:
    read: list[list[Any]] = page.evaluate(ATTACK, {"base": base, "source": PLANT.format(marker=str(marker))})
    return read


def assert_untouched(server: LiveServer, marker: Path) -> None:
    services = server.server.services
    [model] = services.repository.served
    assert (model.name, model.statistics.success.count, model.statistics.fail.count) == ("one", 0, 0)
    assert services.log_settings.values["log_info"] is True
    assert not marker.exists()


class _Page(BaseHTTPRequestHandler):
    """An empty page of a foreign site."""

    def do_GET(self) -> None:
        body = b"<!doctype html><title>foreign</title><body>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # http.server's name
        pass


@contextmanager
def foreign_site() -> Iterator[int]:
    """A web site on a port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield site.server_address[1]
        site.shutdown()
        thread.join()


class Rebinding(socketserver.ThreadingTCPServer):
    """A port that leads to one server and later to another, as a rebound name does."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = port
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Forward(socketserver.BaseRequestHandler):
    """One connection, to where the port leads when it comes."""

    server: Rebinding

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.target)) as upstream:
            back = threading.Thread(target=self._pump, args=(upstream, self.request))
            back.start()
            self._pump(self.request, upstream)
            back.join()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return


def test_the_same_attack_succeeds_without_protection(browser, tmp_path, marker):
    """Proves that the attack of the other tests works."""
    repository = tmp_path / "repository"
    write_model(repository, "one")
    settings = {"allowed_origins": ("*",), "allow_uploaded_code": True, "load_model": ("one",)}
    with (
        LiveServer(repository, model_control_mode="explicit", **settings) as server,
        foreign_site() as port,
    ):
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        read = attack(page, server.url, marker)
        page.close()
    assert ["/v2/repository/models/evil/load", "cors", 200] in read
    assert marker.exists()


def test_a_page_of_another_origin_is_blocked(browser, server, marker):
    with foreign_site() as port:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        read = attack(page, server.url, marker)
        page.close()
    # An opaque answer tells a page nothing.
    assert [entry for entry in read if entry[1] != "opaque"] == []
    assert_untouched(server, marker)


def test_a_page_with_a_rebound_name_is_blocked(browser, server, marker):
    with foreign_site() as port, Rebinding(port) as name:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"http://{REBOUND}:{name.port}/")
        name.target = server.port
        read = attack(page, f"http://{REBOUND}:{name.port}", marker)
        # Now it is of one origin with what answers, and reads that it may not ask.
        assert read
        assert {status for _, _, status in read} == {403}
        assert_untouched(server, marker)
        context.close()
        server.stop()  # it holds connections of the browser, and they the port's threads


def test_the_docs_page_calls_the_routes_with_the_key_and_the_model(browser, tiny_repository):
    with LiveServer(tiny_repository, api_key="secret") as server:
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(f"{server.url}/docs")
        rejected = page.locator("form[data-path='/v1/models']")
        rejected.locator("text=Send").click()
        rejected.locator("output", has_text="401 Unauthorized, ").wait_for()
        # Chromium reports answers that are errors: of the model list, and of this.
        assert [fault for fault in faults if "401 (Unauthorized)" not in fault] == []
        faults.clear()
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Tab")
        page.locator("#model option", has_text="tiny").wait_for(state="attached")
        one_model = page.locator("form[data-path='/v1/models/{name}']")
        one_model.get_by_label("name").fill("tiny")
        one_model.locator("text=Send").click()
        one_model.locator("pre", has_text='"id":"tiny"').wait_for()
        form = page.locator("form[data-path='/v1/chat/completions']")
        form.locator("text=curl").click()
        assert '-H "Authorization: Bearer $GENSERVE_API_KEY"' in form.locator("pre").inner_text()
        message = {"role": "user", "content": "hi"}
        form.locator("textarea").fill(json.dumps({"messages": [message], "max_tokens": 2, "stream": True}))
        form.locator("text=Send").click()
        form.locator("pre", has_text="[DONE]").wait_for()
        assert form.locator("output").inner_text().startswith("200 OK")
        page.close()
    assert faults == []

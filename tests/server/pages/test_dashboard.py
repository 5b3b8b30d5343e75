"""The dashboard in a real browser: with scripted metrics, whose numbers are known, and with a real load."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.live_server import LiveServer, wait_until

pytestmark = pytest.mark.extended

INTERVAL_MS = 2000
NOTHING = "\N{EN DASH}"     # instead of a value
NOW_MS = 1_800_000_000_000
# Pixels of the first line's colour on the canvas of a plot.
COUNT_PIXELS = """
figure => {
  const probe = document.createElement("i");
  probe.style.color = "var(--line-0)";
  figure.append(probe);
  const [red, green, blue] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  const canvas = figure.querySelector("canvas");
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    count += data[i] === red && data[i + 1] === green && data[i + 2] === blue && data[i + 3] === 255;
  }
  return count;
}
"""
# Whether the browser keeps what was measured just now.
IS_KEPT = """
async () => {
  const opened = indexedDB.open("genserve-dashboard");
  await new Promise((done) => { opened.onsuccess = done; });
  const keys = opened.result.transaction("snapshots").objectStore("snapshots").getAllKeys();
  await new Promise((done) => { keys.onsuccess = done; });
  opened.result.close();
  return keys.result.at(-1) >= Date.now() / 1000 - 1;
}
"""


class Dashboard:
    """The open page, and what went wrong on it."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.page: Page = browser.new_page()
        self.faults: list[str] = []
        self.urls: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console", lambda message: self.faults.append(message.text) if message.type == "error" else None
        )
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.clock.install(time=0)
        self.page.clock.pause_at(NOW_MS)
        self._url = url

    def open(self) -> None:
        self.page.goto(f"{self._url}/dashboard")

    @property
    def status(self) -> Locator:
        return self.page.get_by_role("status")

    def pass_time(self) -> None:
        """Let the page ask for the metrics again, and show them: then it shows another status."""
        before = self.status.inner_text()
        self.page.clock.run_for(INTERVAL_MS)
        expect(self.status).not_to_have_text(before)

    def expect_line(self, plot: str, line: str) -> None:
        """Wait for a value in the legend of a plot: `generated 50/s`."""
        expect(self.figure(plot).locator("li", has_text=line)).to_have_count(1)

    def figure(self, plot: str) -> Locator:
        return self.page.locator("figure").filter(has=self.page.get_by_role("heading", name=plot, exact=True))


def has_counted(server: LiveServer, *lines: str) -> bool:
    """Whether the metrics have these lines: the engine counts a step after its answers have left."""
    return {*lines} <= {*httpx2.get(f"{server.url}/metrics").text.splitlines()}


@pytest.fixture
def dashboard(browser: Browser, tiny_server: LiveServer) -> Iterator[Dashboard]:
    opened = Dashboard(browser, tiny_server.url)
    yield opened
    opened.page.close()


class ScriptedMetrics:
    """Answers `/metrics` as the test says."""

    def __init__(self, page: Page) -> None:
        self.text = ""
        self.status = 200
        self.keys: list[str] = []
        page.route("**/metrics?replicas=sum", self._answer)

    def _answer(self, route: Route) -> None:
        self.keys.append(route.request.headers.get("authorization", ""))
        if self.status == 0:
            route.abort()
        else:
            route.fulfill(status=self.status, body=self.text, content_type="text/plain")

    def of_model(self, name: str, *, generated: int, running: int, times_s: dict[str, int]) -> str:
        """Metrics of a text model; `times_s` are the cumulative buckets of the time to the first token."""
        prefix, label = "genserve_", f'model="{name}"'
        first = f"{prefix}time_to_first_token_seconds"
        return "".join(
            f"{line}\n"
            for line in (
                f"# TYPE {prefix}generation_tokens counter",
                f"{prefix}generation_tokens_total{{{label}}} {generated}.0",
                f"{prefix}prompt_tokens_total{{{label}}} 0.0",
                f"{prefix}num_requests_running{{{label}}} {running}.0",
                f"{prefix}num_requests_waiting{{{label}}} 1.0",
                f"{prefix}kv_cache_usage_perc{{{label}}} 0.{running}",
                f'{prefix}requests_total{{finished_reason="length",{label}}} {generated // 10}.0',
                f'{prefix}requests_total{{finished_reason="error",{label}}} {generated // 20}.0',
                f"{first}_count{{{label}}} {times_s['+Inf']}.0",
                *(f'{first}_bucket{{le="{bound}",{label}}} {count}.0' for bound, count in times_s.items()),
            )
        )


def test_the_plots_show_rates_and_percentiles_of_the_last_seconds(dashboard: Dashboard):
    metrics = ScriptedMetrics(dashboard.page)
    metrics.text = metrics.of_model("a", generated=100, running=3, times_s={"0.1": 5, "1.0": 5, "+Inf": 5})
    dashboard.open()
    dashboard.expect_line("Requests", "running 3")
    dashboard.expect_line("KV cache", "in use 30 %")
    dashboard.expect_line("Throughput", f"generated {NOTHING}")    # nothing to compare with
    # In two seconds 100 tokens; ten first tokens, of which the sixth to tenth were in the bucket up to 1 s.
    metrics.text = metrics.of_model("a", generated=200, running=4, times_s={"0.1": 10, "1.0": 15, "+Inf": 15})
    dashboard.pass_time()
    dashboard.expect_line("Throughput", "generated 50/s")
    dashboard.expect_line("Ended requests", "completed 5/s")
    dashboard.expect_line("Ended requests", "failed 2.5/s")
    dashboard.expect_line("Time to first token", "p50 100 ms")
    dashboard.expect_line("Time to first token", "p90 820 ms")      # 0.1 s and 4/5 of 0.9 s
    # What is more than ten seconds ago no longer counts.
    for _ in range(6):
        dashboard.pass_time()
    dashboard.expect_line("Throughput", "generated 0/s")
    dashboard.expect_line("Time to first token", f"p50 {NOTHING}")
    assert dashboard.faults == []


def test_the_page_survives_a_restart_of_the_server_and_asks_for_its_key(dashboard: Dashboard):
    metrics = ScriptedMetrics(dashboard.page)
    times_s = {"+Inf": 0}
    metrics.text = metrics.of_model("a", generated=1000, running=1, times_s=times_s)
    dashboard.open()
    dashboard.expect_line("Requests", "running 1")
    metrics.status = 0
    dashboard.pass_time()
    expect(dashboard.status).to_have_text("The server does not answer; trying again.")
    metrics.status = 401
    dashboard.pass_time()
    expect(dashboard.status).to_have_text("The server asks for its API key.")
    metrics.status, metrics.text = 200, metrics.of_model("a", generated=10, running=2, times_s=times_s)
    dashboard.page.get_by_label("API key").fill("secret")
    dashboard.page.keyboard.press("Tab")
    dashboard.expect_line("Requests", "running 2")
    assert metrics.keys[-1] == "Bearer secret"
    dashboard.expect_line("Throughput", f"generated {NOTHING}")    # not 990 fewer
    metrics.text = metrics.of_model("a", generated=30, running=2, times_s=times_s)
    dashboard.pass_time()
    dashboard.expect_line("Throughput", "generated 10/s")
    metrics.text = metrics.of_model("a", generated=0, running=0, times_s=times_s)   # it restarts in between
    dashboard.pass_time()
    dashboard.expect_line("Throughput", f"generated {NOTHING}")


def test_the_page_remembers_its_history_when_it_is_reloaded(dashboard: Dashboard):
    metrics = ScriptedMetrics(dashboard.page)
    times_s = {"+Inf": 0}
    metrics.text = metrics.of_model("a", generated=100, running=1, times_s=times_s)
    dashboard.open()
    dashboard.expect_line("Throughput", f"generated {NOTHING}")
    for seconds, generated, line in ((10, 300, "generated 20/s"), (60, 900, f"generated {NOTHING}")):
        wait_until(lambda: dashboard.page.evaluate(IS_KEPT))
        dashboard.page.goto("about:blank")
        dashboard.page.clock.run_for(1000 * seconds)
        metrics.text = metrics.of_model("a", generated=generated, running=1, times_s=times_s)
        dashboard.open()
        dashboard.expect_line("Throughput", line)       # after a minute there is a gap
    assert dashboard.faults == []


def test_each_model_has_its_plots_and_text_models_have_a_sum(dashboard: Dashboard):
    metrics = ScriptedMetrics(dashboard.page)
    of_model, times_s = metrics.of_model, {"+Inf": 0}
    metrics.text = (
        of_model("a", generated=0, running=2, times_s=times_s)
        + of_model("b", generated=0, running=5, times_s=times_s)
        + 'nv_inference_request_success{model="sum",version="1"} 4.0\n'
        + 'nv_inference_pending_request_count{model="sum",version="1"} 7.0\n'
    )
    dashboard.open()
    dashboard.expect_line("Requests", "running 7")
    dashboard.expect_line("KV cache", "in use 50 %")
    picker = dashboard.page.get_by_label("Model")
    assert picker.locator("option").all_inner_texts() == ["All text models", "a", "b", "sum"]
    picker.select_option("b")
    dashboard.expect_line("Requests", "running 5")
    picker.select_option("sum")
    dashboard.expect_line("Queue", "waiting 7")
    assert dashboard.faults == []


def test_the_page_plots_a_real_load_on_a_phone_and_asks_nobody_else(
    dashboard: Dashboard, tiny_server: LiveServer
):
    page = dashboard.page
    page.set_viewport_size({"width": 390, "height": 800})
    dashboard.open()
    dashboard.expect_line("Requests", "running 0")
    assert dashboard.figure("Batch").evaluate(COUNT_PIXELS) == 0
    body = {"prompt": "x" * 40, "max_tokens": 40, "ignore_eos": True}

    def complete(_: int) -> int:
        return httpx2.post(f"{tiny_server.url}/v1/completions", json=body, timeout=60).status_code

    with ThreadPoolExecutor(4) as clients:
        assert {*clients.map(complete, range(8))} == {200}
    requests = 'genserve_requests_total{finished_reason="length",model="tiny"} 8.0'
    tokens = 'genserve_generation_tokens_total{model="tiny"} 320.0'
    wait_until(lambda: has_counted(tiny_server, requests, tokens))
    dashboard.pass_time()
    dashboard.pass_time()
    for plot, line in (
        ("Throughput", "generated 80/s"),   # 320 tokens in 4 s of the page's clock
        ("Ended requests", "completed 2/s"),
    ):
        dashboard.expect_line(plot, line)
    for plot in ("Time to first token", "Time between tokens", "Whole request", "Time in the queue", "Batch"):
        assert NOTHING not in dashboard.figure(plot).locator("ul").inner_text()
        assert dashboard.figure(plot).evaluate(COUNT_PIXELS) > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert {url.startswith(tiny_server.url) for url in dashboard.urls} == {True}
    assert dashboard.faults == []
    policy = httpx2.get(f"{tiny_server.url}/dashboard").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy

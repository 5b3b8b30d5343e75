"""Make the pictures of docs/chat_page.md from a running server: `genserve serve`, then this, with its URL.

Needs Chromium and the package playwright, as the tests of the page do.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "images"
PARAMS = {"temperature": 0, "min_p": 0, "repetition_penalty": 1, "penalty_window": 0, "max_tokens": 120}
SETTINGS = {"system": "", "tools": "", "toolChoice": "auto", "params": PARAMS}


def main(url: str) -> None:
    """Ask a question, and take the pictures."""
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 720})
        page.add_init_script(f"localStorage['genserve.new-chats'] = '{json.dumps(SETTINGS)}'")
        page.goto(url)
        ask(page, "What is the capital of Japan, and what is it known for?")
        page.get_by_role("button", name="Token probabilities").first.click()
        page.locator(".token.level-3").last.click()
        page.locator(".alternatives").wait_for()
        page.screenshot(path=FOLDER / "chat_page_probabilities.png")
        page.keyboard.press("Escape")
        page.keyboard.press("Alt+p")
        page.keyboard.press("Alt+n")
        page.emulate_media(color_scheme="dark")
        ask(page, "Write a Python function that reverses a string.")
        page.screenshot(path=FOLDER / "chat_page_dark.png")
        browser.close()


def ask(page: Page, text: str) -> None:
    """Send a message, and wait for the end of the answer."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.locator(".message.assistant[aria-busy=false] .speed").wait_for()


if __name__ == "__main__":
    main(sys.argv[1])

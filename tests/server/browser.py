"""Debian's Chromium, headless, for the tests of web pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

__all__ = ["REBOUND", "chromium"]

REBOUND = "evil.example"    # a name that resolves to this machine


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser; skips the tests where there is none."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no chromium")
    rebound = f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"
    arguments = ["--no-sandbox", "--disable-background-networking", rebound]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()

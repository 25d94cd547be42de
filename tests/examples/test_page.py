"""The page of examples/serve.py in a real browser: Chromium, driven by playwright, where both are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernelhub

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync")

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


@pytest.fixture
def address() -> Iterator[str]:
    """A server as a user starts it."""
    command = [sys.executable, "examples/serve.py", "--port", "0", "--max-tokens", "64", "--max-len", "256"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert server.stdout is not None
    lines = []
    for line in server.stdout:
        lines.append(line)
        if found := re.search(r"http://\S+", line):
            break
    else:
        pytest.fail(f"the server ended: {lines}")
    yield found[0]
    server.terminate()
    server.wait(30)


def test_it_shows_the_kernels_and_completes_a_prompt(address, tmp_path) -> None:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#layers tr")
        rows = page.locator("#layers tr").all_inner_texts()
        mixed = kernelhub.explain("paged_attention", q_len="many", ragged=True, causal=True).selected
        assert [row.split("\t")[2] for row in rows[:2]] == ["cpp.split_kv", mixed]
        assert page.inner_text("#model") == "llama-tiny"
        page.fill("#most", "24")
        page.click("button")
        page.wait_for_function("document.getElementById('counts').textContent.includes(' 24 tokens so far')")
        assert len(page.inner_text("#text")) > 0
        page.fill("#most", "9999")
        page.click("button")
        page.wait_for_function("document.getElementById('text').textContent.includes('more than the 256')")
        assert page.inner_text("#late") == ""
        failed = 'data: {"choices": [{"text": "", "finish_reason": "error: no memory"}]}\n\ndata: [DONE]\n\n'
        page.route("**/v1/completions", lambda route: route.fulfill(body=failed))
        page.click("button")
        page.wait_for_function("document.getElementById('text').textContent.includes('error: no memory')")
        page.screenshot(path=str(tmp_path / "page.png"))
        browser.close()
    assert not errors

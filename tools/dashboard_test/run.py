#!/usr/bin/env python3
"""Checks the dashboard in a browser. See README.md in this folder."""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import runs

ROOT = Path(__file__).resolve().parents[2]
TABS = ["overview", "timeline", "memory", "ranks", "samples", "configuration"]
DEADLINE_MS = 60_000
# Frames of a page that draws 60 pictures per second: most come in time even on a busy machine without a GPU.
SLOW_FRAME_MS = 50
CONFIG = """\
model: {architectures: [LlamaForCausalLM], hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
  intermediate_size: 64, max_position_embeddings: 64}
train_files: data.jsonl
max_length: 64
per_device_train_batch_size: 2
max_steps: 1000000
save_strategy: "no"
output_dir: live
threads: 1
"""

failures = []


def check(condition, what):
    print(f"{'ok' if condition else 'FAILED'}: {what}")
    if not condition:
        failures.append(what)


def until(page, condition):
    """Waits for a condition in the page. Playwright's own way evaluates text in the page, which its policy forbids."""
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            sys.exit(f"FAILED: never true: {condition}")
        page.wait_for_timeout(50)


class Served:
    """A process of the program that serves, and the address it prints."""

    def __init__(self, binary, arguments, folder, environment=None):
        self.process = subprocess.Popen(
            [binary, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for line in self.process.stdout:
            if line.startswith("dashboard at "):
                self.url = line.removeprefix("dashboard at ").strip()
                break
        else:
            sys.exit(f"{arguments} printed no address")
        # A run that prints must not wait for a reader.
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


class Browser:
    def __init__(self, playwright, axe):
        path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        self.browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        self.axe = axe
        self.problems = []

    def page(self, **options):
        page = self.browser.new_context(viewport={"width": 1280, "height": 820}, **options).new_page()
        page.set_default_timeout(DEADLINE_MS)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        # The page must ask nobody but its own server.
        page.on("request", lambda request: None if request.url.startswith("http://127.0.0.1:") else self.problems.append(request.url))
        return page

    def accessible(self, page, where):
        if self.axe is None:
            return
        # The policy of the page forbids foreign scripts, so this one comes by the debugger.
        page.evaluate(self.axe + "; undefined")
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        texts = [f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:120]} ({len(one['nodes'])})" for one in found]
        check(not found, f"axe finds nothing in {where}" + "".join(f"\n    {text}" for text in texts))


def open_tab(page, url, tab, run=0, charted="0"):
    page.goto(f"{url}#tab={tab}&run={run}&runs={charted}")
    page.reload()
    page.wait_for_selector(f"#tab-{tab}[aria-selected=true]")
    until(page, "document.querySelector('#panel').childElementCount > 0")
    page.wait_for_load_state("load")
    page.wait_for_timeout(600)


def live_run(browser, binary, folder):
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": f"{i}: one step follows the other"}) + "\n" for i in range(64)))
    with Served(binary, ["train", "run.yaml", "--dashboard", "0"], folder) as served:
        page = browser.page()
        page.goto(served.url)
        page.wait_for_selector(".chart canvas")
        step = "document.querySelector('.tile dd')?.firstChild.textContent"
        cursor = "document.querySelector('.plot')?.getAttribute('aria-valuemax')"
        # The first picture of the charts may come before the first step.
        until(page, f"Number({cursor}) > 0")
        first = page.evaluate(f"[Number({step}), Number({cursor})]")
        until(page, f"Number({step}) > {first[0]} && Number({cursor}) > {first[1]}")
        check(True, f"points of a live run arrive (from step {first[0]} on)")
        check(page.inner_text("#connection") == "live", "the page says that it is live")
        browser.accessible(page, "a live run")
    until(page, "document.querySelector('#connection').textContent === 'not connected'")
    check(True, "the page says when the server has gone")
    # Those are the requests that fail because the server has gone.
    browser.problems = [text for text in browser.problems if "ERR_" not in text]


def views(browser, url):
    for scheme in ("light", "dark"):
        page = browser.page(color_scheme=scheme)
        for tab in TABS:
            open_tab(page, url, tab, charted="0,1")
            browser.accessible(page, f"{tab}, {scheme}")
            check("cannot be read" not in page.inner_text("#panel"), f"{tab} shows the run")
    open_tab(page, url, "overview")
    before = page.locator(".chart").first.locator(".legend li").count()
    page.locator("#runs input[type=checkbox]").nth(1).check()
    until(page, f"document.querySelector('.chart .legend')?.childElementCount > {before}")
    check(True, "a second run is drawn into the charts")
    page.locator("button.run").nth(2).click()
    until(page, "document.querySelector('#head h2').textContent === document.querySelectorAll('button.run .name')[2].textContent")
    check(True, "another run is opened")
    zoom(page)
    keyboard(page)


def zoom(page):
    plot = page.locator(".plot").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 250, box["y"] + 60, steps=8)
    page.mouse.up()
    until(page, "!document.querySelector('.toolbar button')?.disabled")
    ranges = "[...document.querySelectorAll('.plot')].slice(0, 3).map((p) => p.getAttribute('aria-valuemin'))"
    until(page, f"new Set({ranges}).size === 1 && Number({ranges}[0]) > 1")
    check(True, "a drag zooms all charts")
    page.get_by_role("button", name="Reset zoom").click()
    until(page, f"Number({ranges}[0]) <= 1000")


def keyboard(page):
    page.locator("#tab-overview").focus()
    page.keyboard.press("ArrowRight")
    check(page.locator("#tab-timeline").get_attribute("aria-selected") == "true", "arrows move between tabs")
    page.keyboard.press("Home")
    page.wait_for_selector(".plot")
    until(page, "Number(document.querySelector('.plot')?.getAttribute('aria-valuemax')) > 0")
    page.locator(".plot").first.focus()
    text = lambda: page.locator(".plot").first.get_attribute("aria-valuetext")
    page.keyboard.press("End")
    last = text()
    page.keyboard.press("ArrowLeft")
    check(text() != last and re.match(r"step \d+: .*loss", text()) is not None, f"arrows read the chart: {text()}")
    page.locator(".chart details.data summary").first.click()
    page.locator(".chart table tbody tr").first.wait_for()
    check(True, "a chart has a table")


def hostile(browser, url):
    page = browser.page()
    open_tab(page, url, "samples", run=1, charted="1")
    page.select_option("#sample-step", "1")
    until(page, "document.querySelector('#panel').textContent.includes('onerror')")
    check(page.locator("#panel img").count() == 0 and page.title() != "broken", "hostile completions are text")
    check("\\u{1b}[31m" in page.inner_text("#panel"), "escapes are shown")


def long_run(browser, url, ids):
    page = browser.page()
    open_tab(page, url, "overview", run=ids, charted=str(ids))
    until(page, "Number(document.querySelector('.plot')?.getAttribute('aria-valuemax')) > 90000")
    box = page.locator(".plot").first.bounding_box()
    page.evaluate("""() => {
      window.frames_ms = [];
      let last = performance.now();
      const next = (now) => { window.frames_ms.push(now - last); last = now; window.more && requestAnimationFrame(next); };
      window.more = true;
      requestAnimationFrame(next);
    }""")
    for i in range(120):
        page.mouse.move(box["x"] + 70 + 2 * i, box["y"] + 80)
    frames = sorted(page.evaluate("() => { window.more = false; return window.frames_ms.slice(2); }"))
    typical, late = frames[len(frames) // 2], frames[int(len(frames) * 0.95)]
    print(f"    100,000 steps, moving the cursor: {len(frames)} frames, typical {typical:.1f} ms, 95 % below {late:.1f} ms")
    check(typical < SLOW_FRAME_MS, "100,000 steps are smooth")
    drawn = page.evaluate("""async () => {
      const { Chart } = await import("/assets/chart.js");
      const n = 100000;
      const x = Array.from({ length: n }, (_, i) => i), y = x.map((i) => Math.sin(i / 9999) + Math.random());
      const chart = new Chart({ title: "raw" });
      document.querySelector("#panel").prepend(chart.node);
      chart.setLines([{ label: "raw", color: "#1864ab", x, y }]);
      const start = performance.now();
      for (let i = 0; i < 20; i++) chart.draw();
      return (performance.now() - start) / 20;
    }""")
    print(f"    100,000 points without the server's reduction: {drawn:.1f} ms for a picture")
    size = page.evaluate("fetch('/api/runs/%d/series?keys=loss').then((r) => r.text()).then((t) => t.length)" % ids)
    check(size < 100_000, f"the server reduces them to {size} bytes")


def token(browser, binary, folder):
    environment = {"PATH": "/usr/bin:/bin", "LOCKSTEP_DASHBOARD_TOKEN": "0123456789abcdef-right"}
    with Served(binary, ["serve", ".", "--port", "0"], folder, environment) as served:
        page = browser.page()
        response = page.goto(served.url)
        check(response.status == 401, "without the token there is no page")
        browser.accessible(page, "the page that asks for the token")
        page.fill("#token", "0123456789abcdef-wrong")
        page.click("button")
        page.wait_for_load_state()
        check("This token is wrong." in page.inner_text("main"), "a wrong token is refused")
        page.fill("#token", "0123456789abcdef-right")
        page.click("button")
        page.wait_for_selector("#tabs button")
        check(page.url.split("#")[0] == served.url, "the right token opens the page, and leaves the address")
        check("right" not in page.evaluate("document.cookie"), "scripts do not see the cookie")
    browser.problems = [text for text in browser.problems if "401" not in text and "ERR_" not in text]


def screenshots(browser, url, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, scheme, tab in (("light", "light", "overview"), ("dark", "dark", "overview"), ("timeline", "dark", "timeline"), ("memory", "light", "memory")):
        page = browser.page(color_scheme=scheme)
        open_tab(page, url, tab, run=0, charted="0,2")
        if tab == "overview":
            box = page.locator(".plot").first.bounding_box()
            page.mouse.move(box["x"] + 180, box["y"] + 90)
            page.wait_for_timeout(200)
        page.screenshot(path=folder / f"{name}.png")
    phone = browser.browser.new_context(viewport={"width": 390, "height": 844}, device_scale_factor=1.5, is_mobile=True, has_touch=True).new_page()
    open_tab(phone, url, "overview")
    phone.evaluate("scrollTo(0, 250)")
    phone.wait_for_timeout(300)
    phone.screenshot(path=folder / "phone.png")
    wide = phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
    check(wide, "nothing is wider than a phone")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", default=ROOT / "target/debug/lockstep", type=Path)
    parser.add_argument("--axe", type=Path, help="axe.min.js of the package axe-core")
    parser.add_argument("--screenshots", type=Path, help="write pictures of the page to this folder")
    arguments = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return print("skipped: the Python package playwright is not installed")
    axe = arguments.axe.read_text() if arguments.axe else None
    if axe is None:
        print("skipped: accessibility, for --axe names no axe.min.js")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        all_runs = folder / "all"
        runs.write(all_runs / "a", "llama-1b, lr 1e-3", 900, total=1200, seed=1)
        runs.write(all_runs / "b", "grpo on sums", 300, rate=2e-5, seed=2, rewards=True)
        runs.write(all_runs / "c", "llama-1b, lr 3e-4", 1200, rate=3e-4, seed=3)
        runs.write(all_runs / "d", runs.HOSTILE, 40, seed=4, ranks=1)
        runs.write(all_runs / "e", "a long run", 100_000, rate=6e-4, seed=5)
        try:
            browser = Browser(playwright, axe)
        except Exception as error:  # Playwright's own error says how to install a browser.
            return print(f"skipped: Chromium cannot be started: {error}")
        binary = arguments.binary.resolve()
        with Served(binary, ["serve", "all", "--port", "0"], folder) as served:
            views(browser, served.url)
            hostile(browser, served.url)
            long_run(browser, served.url, 4)
        if arguments.screenshots:
            with Served(binary, ["serve", "a", "b", "c", "--port", "0"], all_runs) as served:
                screenshots(browser, served.url, arguments.screenshots)
        # Requests that ended with their server.
        browser.problems = [text for text in browser.problems if "ERR_" not in text]
        token(browser, binary, all_runs)
        live_run(browser, binary, folder)
        check(not browser.problems, f"the browser reports no error: {browser.problems[:3]}")
    if failures:
        sys.exit(f"{len(failures)} checks failed")


if __name__ == "__main__":
    main()

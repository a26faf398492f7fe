# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""The page in a browser without a display, as on a phone and on a desktop, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from megatron_mtraining.tools.cli import main

pytest.importorskip("matplotlib")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs chromium or google-chrome in PATH"
)
LOOK = """<script>addEventListener("load", () => {
  const all = (what) => [...document.querySelectorAll(what)];
  const seen = (each) => each.getBoundingClientRect().width > 0;
  const texts = all("svg text").filter(seen).map((each) => each.getBoundingClientRect());
  parent.document.body.dataset.found = JSON.stringify({
    width: innerWidth, needed: document.documentElement.scrollWidth,
    light: all("div.light").filter(seen).length, dark: all("div.dark").filter(seen).length,
    charts: all("section").length, background: getComputedStyle(document.body).backgroundColor,
    texts: texts.length, left: Math.min(...texts.map((each) => each.left)),
    right: Math.max(...texts.map((each) => each.right)),
    height: Math.min(...texts.map((each) => each.height)),
  });
});</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with a long name, a long warning and a timeline, which looks at itself."""
    folder = tmp_path_factory.mktemp("a_long_name_of_a_run_" * 4)
    history = [
        dict(step=step, loss=float("nan") if step % 7 == 0 else 3 - step / 90, mtraining_density=0.2,
             mtraining_recall=0.95, mtraining_search_ms=12.0, mtraining_attention_ms=90.0)
        for step in range(1, 90)
    ]  # fmt: skip
    (folder / "trainer_state.json").write_text(json.dumps(dict(log_history=history)))
    operators = [
        dict(ph="X", cat="cpu_op", name="op", ts=10 * tid, dur=100, pid=1, tid=tid)
        for tid in range(9)
    ]
    trace = folder / "trace.json"
    trace.write_text(json.dumps(dict(traceEvents=operators)))
    output = folder / "report.html"
    assert main(["report", str(folder), "--trace", str(trace), "--output", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    output.write_text(text.replace("</body>", f"{LOOK}</body>"), encoding="utf-8")
    return output


@needs_browser
@pytest.mark.parametrize("width", [390, 1300], ids=["phone", "desktop"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_and_has_the_theme_of_the_screen(page, tmp_path, width, theme):
    # Chromium has no window of a phone's width, but frames. Its own name for a dark screen is 0.
    frame = html.escape(page.read_text(encoding="utf-8"))
    around = tmp_path / "around.html"
    around.write_text(
        '<!doctype html><meta charset="utf-8"><style>:root { color-scheme: light dark; }</style><body>'
        f'<iframe srcdoc="{frame}" style="width: {width}px; height: 844px; border: 0"></iframe></body>',
        encoding="utf-8",
    )
    words = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,900",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={int(theme == 'light')}",
        "--virtual-time-budget=5000", "--dump-dom", around.as_uri(),
    ]  # fmt: skip
    run = subprocess.run([BROWSER, *words], capture_output=True, text=True, timeout=120)
    said = re.search(r'data-found="([^"]*)"', run.stdout)
    assert said, run.stderr[-2000:]
    found = json.loads(html.unescape(said[1]))
    assert found["needed"] <= found["width"] == width, "nothing is wider than the screen"
    assert found["charts"] == found[theme] > 3 and found["light"] + found["dark"] == found["charts"]
    assert found["background"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}[theme]
    assert found["texts"] > 40 and found["left"] >= 0 and found["right"] <= width
    assert found["height"] > 7, "can be read"

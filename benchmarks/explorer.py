"""The time of a frame while the mask explorer is panned, beside a blank canvas: `python -m benchmarks.explorer`.

Headless Chromium drags the picture of a mask of 1,048,576 tokens for some seconds. A frame takes 16.7 ms at 60 Hz.
"""

import tempfile
from pathlib import Path

import numpy as np

import longspan as ls
from benchmarks.measure import table
from longspan.explorer.document import document
from longspan.explorer.page import page_html
from tests.explorer.browser import CHROMIUM, Browser, Tab

LENGTH = 1 << 20
FRAMES = 240
STEP = 7  # pixels per frame
WIDTH, HEIGHT, DENSITY = 1200, 860, 2
ZOOMS = (4, 64, 1024, 16384)
BLANK = """<!doctype html><html data-ready="true"><body><canvas id="mask-canvas" style="width:740px;height:640px"
></canvas><script>
const canvas = document.getElementById("mask-canvas");
[canvas.width, canvas.height] = [740 * devicePixelRatio, 640 * devicePixelRatio];
const context = canvas.getContext("2d");
canvas.addEventListener("pointermove", () => requestAnimationFrame(() => {
  context.clearRect(0, 0, canvas.width, canvas.height);
}));
</script></body></html>"""
# Drags the canvas by `step` pixels per frame, there and back; the result is the milliseconds of each frame.
PAN = """((frames, size) => new Promise((resolve) => {
  const canvas = document.getElementById("mask-canvas");
  const box = canvas.getBoundingClientRect();
  let [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
  const fire = (type) => canvas.dispatchEvent(new PointerEvent(type,
    { clientX: x, clientY: y, pointerId: 1, pointerType: "mouse", button: 0, buttons: 1, bubbles: true }));
  canvas.setPointerCapture = () => {};
  const times = [];
  let last = null;
  fire("pointerdown");
  const frame = (now) => {
    if (last !== null) times.push(now - last);
    last = now;
    if (times.length >= frames) return fire("pointercancel"), resolve(times);
    const step = Math.floor(times.length / 60) % 2 ? size : -size;
    [x, y] = [x + step, y + step];
    fire("pointermove");
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}))"""


def masks() -> dict[str, ls.Mask]:
    """The masks of the benchmark."""
    lengths = np.random.default_rng(0).multinomial(LENGTH, np.ones(300) / 300)
    ids = np.repeat(np.arange(300), lengths)[None]
    return {
        "window and prefix": ls.Causal() & (ls.Window(4095, 0) | ls.Prefix(4)),
        "documents": ls.Causal() & ls.Segments(ids),
        "dilated window": ls.Window(65536, 65536, dilation=4),
    }


def measured(tab: Tab) -> list[str]:
    """Median, 95th percentile and maximum of the frames, and the main thread's work per frame."""
    tab.send("Performance.enable")
    before = busy(tab)
    times = np.array(tab.run(f"{PAN}({FRAMES}, {STEP})"))
    work = 1000 * (busy(tab) - before) / len(times)
    return [f"{x:.1f}" for x in (np.median(times), np.percentile(times, 95), times.max(), work)]


def busy(tab: Tab) -> float:
    """Seconds of work of the main thread."""
    return next(m["value"] for m in tab.send("Performance.getMetrics")["metrics"] if m["name"] == "TaskDuration")


def main() -> None:
    if CHROMIUM is None:
        raise SystemExit("This benchmark needs Chromium. Install Debian's package: apt-get install chromium.")
    rows = [["1,048,576 tokens", "zoom", "median (ms)", "95% (ms)", "most (ms)", "work per frame (ms)"]]
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder) / "profile")
        try:
            tab = Tab(browser)
            tab.resize(WIDTH, HEIGHT, DENSITY)
            path = Path(folder) / "page.html"
            path.write_text(BLANK, "utf-8")
            tab.open(path.as_uri())
            rows.append(["blank canvas", "", *measured(tab)])
            for name, mask in masks().items():
                path.write_text(page_html(document(mask, LENGTH)), "utf-8")
                for zoom in ZOOMS:
                    middle = LENGTH // 2
                    tab.open(f"{path.as_uri()}#q={middle}&k={middle}&zoom={zoom}")
                    rows.append([name, f"{zoom:,}", *measured(tab)])
        finally:
            browser.close()
    print(table(rows))


if __name__ == "__main__":
    main()

"""Pages as a headless Chromium renders them: their DOM after rendering, a picture, and what they asked the network for."""

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 120


@dataclass(frozen=True, kw_only=True)
class Rendered:
    dom: str
    """HTML after rendering, scripts of the page included."""
    requests: list[str]
    """URLs that the page asked for, the page itself left out."""


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def render(page: Path, *, picture: Path | None = None, width: int = 1240, height: int = 1700) -> Rendered:
    """Open a file in a browser of its own that may go nowhere. picture: PNG to write."""
    binary = chromium()
    assert binary is not None, "dashboards/check.sh installs Debian's chromium"
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "net.json"
        common = [binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                  f"--user-data-dir={scratch}/profile", f"--window-size={width},{height}", "--virtual-time-budget=4000",
                  "--host-resolver-rules=MAP * ~NOTFOUND",
                  "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        done = subprocess.run([*common, f"--log-net-log={log}", "--dump-dom", page.resolve().as_uri()], capture_output=True,
                              text=True, timeout=LIMIT_S, check=True)
        if picture is not None:
            subprocess.run([*common, f"--screenshot={picture}", page.resolve().as_uri()], capture_output=True,
                           timeout=LIMIT_S, check=True)
        return Rendered(dom=done.stdout, requests=_urls_of_page(log))


def _urls_of_page(log: Path) -> list[str]:
    """Of requests in Chromium's network log that a page began. Those of the browser itself (its clock, updates, the page it
    is told to open) have no origin."""
    recorded: dict[str, Any] = json.loads(log.read_text())
    starts = {number for name, number in recorded["constants"]["logEventTypes"].items() if name == "URL_REQUEST_START_JOB"}
    found = [event["params"] for event in recorded["events"] if event["type"] in starts and "url" in event.get("params", {})]
    return [each["url"] for each in found if each["initiator"] != "not an origin"]


MEASURE = """
<script>
const seen = [];
for (const group of document.querySelectorAll('svg')) {
  const inside = group.getBoundingClientRect();
  for (const mark of group.querySelectorAll('rect, polyline, circle, text')) {
    const box = mark.getBoundingClientRect();
    if (box.left < inside.left - 2 || box.right > inside.right + 2 || box.top < inside.top - 2 ||
        box.bottom > inside.bottom + 2)
      seen.push('outside its picture: ' + mark.outerHTML.slice(0, 160));
  }
  const texts = [...group.querySelectorAll('text')];
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const a = texts[i].getBoundingClientRect(), b = texts[j].getBoundingClientRect();
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
      seen.push('texts overlap: ' + texts[i].textContent + ' and ' + texts[j].textContent);
  }
}
const cards = [...document.querySelectorAll('section')];
for (let i = 0; i < cards.length; i++) for (let j = i + 1; j < cards.length; j++) {
  const a = cards[i].getBoundingClientRect(), b = cards[j].getBoundingClientRect();
  if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)
    seen.push('cards overlap: ' + i + ' ' + j);
}
for (const chart of document.querySelectorAll('svg.timeline')) {
  const blocks = [...chart.querySelectorAll('rect.op')].map(block => block.getBoundingClientRect());
  for (let i = 0; i < blocks.length; i++) for (let j = i + 1; j < blocks.length; j++) {
    const a = blocks[i], b = blocks[j];
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 && Math.abs(a.top - b.top) < 1)
      seen.push('ops overlap: ' + i + ' ' + j);
  }
}
const found = document.createElement('pre'); found.id = 'layout'; found.textContent = JSON.stringify(seen);
document.body.append(found);
</script>
"""
"""Appended to a copy of a page: says in `#layout` what lies outside its picture or upon something else."""


def with_measure(page: str) -> str:
    """A copy that measures itself: without the policy, which allows no script."""
    head, _, rest = page.partition('<meta http-equiv="Content-Security-Policy"')
    return head + rest.partition(">")[2].replace("</body>", MEASURE + "</body>")

"""Look at the built site in a browser, headless and without a network: `make site-check`.

Every page is opened at four widths. It fails on an error in the console, on a request to another host, on a missing file, on a
formula that KaTeX refuses and on a page that is wider than its window. At the widest no line of code is cut. At no width does
a table break inside a word of code, or hide its last column where nothing shows that it can be scrolled. A page that computes
something brings values of the Python function in `script[data-values]` and a `check()` that compares; it is called.
Columns of numbers stand to the right, text, code and tables have one right edge, intervals and options of commands stay on one
line, and no cell holds a dash alone. On a phone, the letters of drawings have 11 px or more, are legible in both schemes and do
not overlap. The home page has its number, command and moving picture within 600 px, every page a favicon and a social card.
Pictures of some pages are left to be looked at.
Needs Chromium or Chrome; knows the site as files, nothing else.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # another host is refused at once
]
WIDTHS = (390, 768, 1280, 1440)  # at the last, code is shown whole
SECONDS = 1200  # for all pages
MISSING: list[str] = []  # what was asked for in vain
RESULT: queue.Queue[list[str]] = queue.Queue()
PROBE = r"""<!doctype html><meta charset="utf-8"><body><script>
const report = found => fetch("/__result", { method: "POST", body: JSON.stringify(found) });
addEventListener("error", event => report(["the probe failed: " + event.message]));
addEventListener("unhandledrejection", event => report(["the probe failed: " + event.reason]));
const wait = ms => new Promise(done => setTimeout(done, ms));
(async () => {
  const found = new Set();
  const shown = element => element.checkVisibility() && element.getClientRects().length;
  const short = text => JSON.stringify(text.trim().slice(0, 60));
  const cutLines = (inside, page, width) => {
    for (const code of inside.querySelectorAll("pre code"))
      if (shown(code) && code.scrollWidth > code.clientWidth)
        found.add(`${page}: code is cut at ${width} px, by ${code.scrollWidth - code.clientWidth} px: ` +
          short(code.textContent.split("\n").reduce((a, b) => (b.length > a.length ? b : a))));
  };
  const brokenWords = (inside, page, width) => {
    const range = inside.createRange();
    for (const code of inside.querySelectorAll("td code, th code")) {
      if (!shown(code)) continue;
      const walker = inside.createTreeWalker(code, NodeFilter.SHOW_TEXT);
      for (let text = walker.nextNode(); text; text = walker.nextNode())
        for (const word of text.data.matchAll(/\S+/g)) {
          range.setStart(text, word.index);
          range.setEnd(text, word.index + word[0].length);
          const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
          if (lines.size > 1) found.add(`${page}: a table at ${width} px breaks inside ${short(word[0])}`);
        }
    }
  };
  const lostColumns = (inside, page, width) => {
    const style = inside.defaultView.getComputedStyle;
    for (const table of inside.querySelectorAll("table")) {
      if (!shown(table) || !table.rows.length) continue;
      const right = Math.max(...[...table.rows].map(row => row.getBoundingClientRect().right));
      let seen = false, edge = width;
      for (let box = table; box && box !== inside.body; box = box.parentElement) {
        if (style(box).overflowX === "visible") continue;
        edge = Math.min(edge, box.getBoundingClientRect().right);
        if (right <= edge + 1) break; // whole, as far as this box goes
        const scrolls = ["auto", "scroll"].includes(style(box).overflowX) && box.scrollWidth > box.clientWidth;
        if (scrolls && style(box).backgroundImage.includes("gradient")) { seen = true; break; }
      }
      if (!seen && right > edge + 1)
        found.add(`${page}: a table at ${width} px hides its last column: ${short(table.rows[0].textContent)}`);
    }
  };
  const texts = function* (root, skip) {
    const walker = root.ownerDocument.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode())
      if (!text.parentElement.closest(skip) && shown(text.parentElement)) yield text;
  };
  const splitLines = (inside, page, width) => {
    const range = inside.createRange();
    for (const text of texts(inside.querySelector("article"), "pre, script, svg, .shown, .katex"))
      for (const part of text.data.matchAll(/\[-?[\d.]+%?,\s-?[\d.]+%?\]|(?<!\S)--[a-z][\w-]+/g)) {
        if (part[0].startsWith("--") && !text.parentElement.closest("code")) continue;
        range.setStart(text, part.index);
        range.setEnd(text, part.index + part[0].length);
        const tops = [...range.getClientRects()].map(box => Math.round(box.top));
        if (Math.max(...tops) - Math.min(...tops) > 3) found.add(`${page}: ${short(part[0])} is on two lines at ${width} px`);
      }
  };
  const tables = (inside, page, width) => {
    for (const table of inside.querySelectorAll("article table:not([class], .shown table)")) {
      const rows = [...table.tBodies[0]?.rows ?? []].map(row => [...row.cells]);
      for (const cell of rows.flat())
        if (/^[-\u2013\u2014]+$/.test(cell.textContent.trim())) found.add(`${page}: a cell holds a dash alone`);
      if (width < 768 || !shown(table)) continue;
      rows[0]?.forEach((_, at) => {
        const cells = rows.map(row => row[at]).filter(cell => cell?.textContent.trim());
        const are = pattern => cells.length && cells.every(cell => pattern.test(cell.textContent.trim()));
        const numbers = are(/^[+-]?[\d.,]+( ?%)?(\s\[[^\]]*\])?$/) && !are(/^\d+\.\d+\.\d+$/);
        if (numbers && cells.some(cell => inside.defaultView.getComputedStyle(cell).textAlign !== "right"))
          found.add(`${page}: a column of numbers does not stand to the right: ${short(table.rows[0].cells[at].textContent)}`);
      });
    }
  };
  const edges = (inside, page) => {
    for (const column of inside.querySelectorAll("article, .notebook")) {
      const padding = parseFloat(inside.defaultView.getComputedStyle(column).paddingRight);
      const right = column.getBoundingClientRect().right - padding;
      const kinds = "p, ul, ol, blockquote, .highlight, .md-typeset__scrollwrap, .drawing";
      for (const child of column.querySelectorAll(`:scope > :is(${kinds})`))
        if (shown(child)) {
          const table = child.querySelector(":scope table"), end = (table ?? child).getBoundingClientRect().right;
          if (end < right - 1 || (!table && end > right + 1)) // a wide table scrolls
            found.add(`${page}: ${short(child.textContent)} ends elsewhere than the text around it`);
        }
    }
  };
  const light = color => {
    const parts = color.match(/[\d.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => (part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4));
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2] + .05;
  };
  const drawings = (inside, page) => {
    for (const svg of inside.querySelectorAll(".drawing svg, .moving svg")) {
      const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
      const words = [...svg.querySelectorAll("text")];
      if (!svg.querySelector("title, desc")) found.add(`${page}: a drawing without words for those who cannot see it`);
      const boxes = words.map(text => text.getBoundingClientRect());
      words.forEach((text, at) => {
        const box = boxes[at], style = inside.defaultView.getComputedStyle(text);
        const say = what => found.add(`${page}: ${short(text.textContent)} ${what}`);
        if (parseFloat(style.fontSize) * scale < 11) say("has less than 11 px on a phone");
        if (box.left < frame.left - 1 || box.right > frame.right + 1) say("leaves its drawing");
        for (let other = 0; other < at; other++)
          if (svg.closest(".drawing") && Math.min(box.right, boxes[other].right) - Math.max(box.left, boxes[other].left) > 1 &&
              Math.min(box.bottom, boxes[other].bottom) - Math.max(box.top, boxes[other].top) > 6 * scale)
            say(`lies over ${short(words[other].textContent)} in a drawing`);
      });
      for (const scheme of ["default", "slate"]) {
        inside.body.setAttribute("data-md-color-scheme", scheme);
        const ground = light(inside.defaultView.getComputedStyle(inside.body).backgroundColor);
        for (const text of svg.querySelectorAll("text, tspan")) {
          const ink = light(inside.defaultView.getComputedStyle(text).fill);
          if (Math.max(ink, ground) / Math.min(ink, ground) < 4.5)
            found.add(`${page}: ${short(text.textContent)} is too faint in the scheme ${scheme}`);
        }
      }
    }
  };
  const still = (inside, page) => {
    for (const picture of inside.querySelectorAll(".moving"))
      if (picture.getBoundingClientRect().top > 900 && !picture.classList.contains("waits"))
        found.add(`${page}: a picture moves before it is seen`);
  };
  const home = (inside, width) => {
    const parts = { number: ".hero .number", command: ".hero pre", picture: ".hero svg" };
    for (const [name, where] of Object.entries(parts)) {
      const box = inside.querySelector(where)?.getBoundingClientRect();
      if (!box || (width < 768 && name === "picture" ? box.top : box.bottom) > 600)
        found.add(`the home page at ${width} px: the ${name} is not within 600 px`);
    }
  };
  const fetched = new Set();
  const head = async (inside, page) => {
    for (const [where, key] of [['link[rel="icon"]', "href"], ['meta[property="og:image"]', "content"]]) {
      const name = inside.querySelector(where)?.getAttribute(key);
      const address = name && new URL(name, inside.baseURI).href;
      if (!address) found.add(`${page}: no ${where}`);
      else if (!fetched.has(address) && !(await fetch(address)).ok) found.add(`${page}: ${name} is missing`);
      fetched.add(address);
    }
  };
  for (const page of PAGES) for (const width of WIDTHS) {
    const frame = document.createElement("iframe");
    frame.style = `border: 0; height: 900px; width: ${width}px`;
    const loaded = new Promise(done => { frame.onload = done; });
    frame.src = "/" + page;
    document.body.append(frame);
    await loaded;
    const inside = frame.contentDocument;
    const raw = () => inside.querySelector(".arithmatex:not(:has(.katex))");
    const over = () => inside.documentElement.scrollWidth - width;
    for (let tries = 0; tries < 30 && (raw() || over() > 0); tries++) await wait(50);
    if (raw()) found.add(page + ": a formula is not drawn");
    if (over() > 0) found.add(page + ": " + over() + " px wider than a window of " + width);
    if (width === WIDTHS.at(-1)) {
      cutLines(inside, page, width);
      edges(inside, page);
      await head(inside, page);
    }
    tables(inside, page, width);
    splitLines(inside, page, width);
    if (!page) home(inside, width);
    if (width === WIDTHS[0]) drawings(inside, page);
    still(inside, page);
    brokenWords(inside, page, width);
    lostColumns(inside, page, width);
    if (inside.querySelector("script[data-values]")) {
      const wrong = frame.contentWindow.check ? frame.contentWindow.check() : ["has values and no check()"];
      for (const line of wrong) found.add(page + ": " + line);
    }
    for (const entry of frame.contentWindow.performance.getEntriesByType("resource"))
      if (new URL(entry.name).host !== location.host) found.add(page + ": asks for " + entry.name);
    frame.remove();
  }
  await report([...found]);
})();
</script>"""


class Handler(SimpleHTTPRequestHandler):
    """The site's files, the probe, and the place where the probe hands in what it found."""

    probe = ""

    def do_GET(self) -> None:
        if self.path != "/__probe":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.probe.encode())

    def do_POST(self) -> None:
        RESULT.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def send_error(self, code: int, *details: str | None) -> None:
        if self.path != "/favicon.ico":
            MISSING.append(f"{self.path}: {code}")
        super().send_error(code, *details)

    def log_message(self, *_: object) -> None:
        pass


def check(site: Path, browser: str, port: int) -> list[str]:
    """What is wrong with the site that is served at this port."""
    pages = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    addresses = ["" if page == "." else f"{page}/" for page in pages]
    Handler.probe = PROBE.replace("PAGES", json.dumps(addresses)).replace("WIDTHS", json.dumps(WIDTHS))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, tempfile.TemporaryFile("w+") as log:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", f"http://127.0.0.1:{port}/__probe"]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            found = RESULT.get(timeout=SECONDS)
        except queue.Empty:
            found = [f"the pages were not all looked at within {SECONDS} s"]
        finally:
            running.terminate()
            running.wait()
        log.seek(0)
        said = re.findall(r"CONSOLE:?\(?\d*\)?\] (.*)", log.read())
    print(f"{len(addresses)} pages at {len(WIDTHS)} widths")
    return [*found, *dict.fromkeys(f"console: {line}" for line in said), *dict.fromkeys(MISSING)]


def pictures(pages: list[str], folder: Path, browser: str, port: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for page, mode in itertools.product(pages, ("light", "dark")):
        path = folder / f"{page.strip('/').replace('/', '-') or 'home'}-{mode}.png"
        flags = ["--force-dark-mode"] if mode == "dark" else []
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            flags += ["--window-size=1280,3000", f"--screenshot={path}", f"--user-data-dir={profile}"]
            command = [browser, *FLAGS, *flags, f"http://127.0.0.1:{port}/{page}"]
            subprocess.run(command, capture_output=True, timeout=120, check=False)
        print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Look at the built site in a headless browser.")
    parser.add_argument("site", type=Path, nargs="?", default=Path("site"), help="the built site (default: site)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also write pictures of --pages here")
    parser.add_argument("--pages", nargs="+", default=["", "learn/"], metavar="PAGE", help="which to take pictures of")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error(f"none of {', '.join(BROWSERS)} is installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(options.site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = check(options.site, browser, server.server_port)
    if options.pictures:
        pictures(options.pages, options.pictures, browser, server.server_port)
    server.shutdown()
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

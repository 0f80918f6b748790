"""Looks at every page of the site in a real browser, at the width of a desk and of a phone.

    make docs
    pip install playwright     # and a Chromium, e.g. `apt-get install chromium`
    python scripts/look_at_site.py [--screenshots FOLDER]

Fails when a page is wider than its window, writes an error to the console, or has a link that leads
nowhere. Links to other hosts are not followed.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag

SITE = Path(__file__).parents[1] / "out" / "site"
WIDTHS = (1280, 390)

WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LINKS = "[...document.querySelectorAll('a[href]')].map(each => each.href)"
TARGETS = "[...document.querySelectorAll('[id]')].map(each => each.id)"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line per request."""

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def serve() -> str:
    """Serve the site on a free port, and return its address."""
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def look(screenshots: Path | None) -> list[str]:
    """Return what is wrong, one line each."""
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found]

    address, wrong = serve(), []
    links: dict[str, set[str]] = {}
    targets: dict[str, set[str]] = {}
    with sync_playwright() as tools:
        browser = tools.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        pages = sorted(SITE.rglob("*.html"))
        for width in WIDTHS:
            view = browser.new_page(viewport={"width": width, "height": 900})
            errors: list[str] = []
            view.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            for page in pages:
                name = page.relative_to(SITE).as_posix()
                view.goto(f"{address}/{name}", wait_until="load")
                if (over := view.evaluate(WIDER)) > 0:
                    wrong.append(f"{name}: {over} px wider than {width}")
                wrong.extend(f"{name}: {error}" for error in errors)
                errors.clear()
                links[name] = set(view.evaluate(LINKS))
                targets[name] = set(view.evaluate(TARGETS))
                if screenshots:
                    picture = screenshots / str(width) / f"{name.replace('/', '-')}.png"
                    view.screenshot(path=picture, full_page=False)
            view.close()
        browser.close()
    for name, found in links.items():
        for link in sorted(each for each in found if each.startswith(address)):
            path, anchor = urldefrag(link.removeprefix(address + "/"))
            if not (SITE / (path or "index.html")).exists():
                wrong.append(f"{name}: {path} is not there")
            elif anchor and path in targets and unquote(anchor) not in targets[path]:
                wrong.append(f"{name}: {path} has no #{anchor}")
    print(f"{len(pages)} pages, {sum(map(len, links.values()))} links, {len(wrong)} wrong")
    return wrong


def main() -> int:
    """Read the command line, look, and print what is wrong."""
    parser = argparse.ArgumentParser(description="Look at every page in a real browser.")
    parser.add_argument("--screenshots", type=Path, help="also keep a picture of each page")
    wrong = look(parser.parse_args().screenshots)
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

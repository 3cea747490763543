"""Check a built site: no page loads anything from elsewhere, and every local link leads to a file and an anchor.

python docs/check_site.py build/site
"""

import pathlib
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The ids of a page, what it links to, and what it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.ids |= {named[name] for name in ("id", "name") if named.get(name)}
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        if named.get(LOADED.get(tag, "")) and named.get("rel") not in ("canonical", "search", "index", "next", "prev"):
            self.loads.append(named[LOADED[tag]])


def problems(site: pathlib.Path) -> list[str]:
    """One line for each dead link and for each thing that a page loads from elsewhere."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if "_static" not in path.parts}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name} loads {target}" for target in page.loads if is_remote(target)]
        for target in {*page.links, *page.loads}:
            parts = urlsplit(target)
            if is_remote(target) or parts.scheme:
                continue
            other = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            other = other / "index.html" if other.is_dir() else other
            if not other.exists():
                found.append(f"{name} links to {target}, which does not exist")
            elif parts.fragment and other in pages and unquote(parts.fragment) not in pages[other].ids:
                found.append(f"{name} links to {target}, which has no such anchor")
    return sorted(found)


def is_remote(target: str) -> bool:
    return target.startswith(("http:", "https:", "//"))


def main():
    site = pathlib.Path(sys.argv[1]).resolve()
    found = problems(site)
    print("\n".join(found), file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

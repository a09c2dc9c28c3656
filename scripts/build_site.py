"""Builds the documentation site from docs/ and mkdocs.yml: `python scripts/build_site.py [FOLDER]`.

Pages are first copied to build/site, as the site's generator is to see them:

- A page may link to any file or folder of the repository, relative to the page's own file, as on
  the repository's web page. A link to a page, or to a folder with a README, leads to that page; a
  link to anything else leads to the source repository.
- MOUNTED files outside docs/ are pages too.
- A pattern in the navigation stands for all pages that match it and are not named elsewhere.

A link to nothing, a page outside the navigation, an entry without a page and whatever the
generator warns of end the build with status 1.
"""

import argparse
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from html import unescape
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any
from urllib.parse import unquote

import yaml

ROOT = Path(__file__).resolve().parents[1]
MOUNTED = {
    "CHANGELOG.md": "docs/changelog.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "examples/README.md": "docs/examples.md",
    "examples/verl/README.md": "docs/verl.md",
}
REPOSITORY = "https://github.com/proxpo/proxpo"
CODE_OR_LINK = re.compile(r"^ *(```+).*?^ *\1|`[^`\n]+`|\]\(([^)\s]+)\)", re.M | re.S)


def main(site: Path) -> int:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    staged = ROOT / "build" / "site"
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(ROOT / "docs", staged / "docs")
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    faults: list[str] = []
    for source in sorted(pages | set(MOUNTED)):
        text = (ROOT / source).read_text()
        place = staged / MOUNTED.get(source, source)
        place.write_text(with_links(text, source, faults))
    known = {page.removeprefix("docs/") for page in pages | set(MOUNTED.values())}
    settings["nav"] = expanded(settings["nav"], known)
    listed = entries(settings["nav"])
    faults += [f"{page}: not in the navigation" for page in sorted(known - set(listed))]
    faults += [f"mkdocs.yml: no page {entry}" for entry in sorted(set(listed) - known)]
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 1
    (staged / "mkdocs.yml").write_text(yaml.dump(settings, sort_keys=False))
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    code = subprocess.run(command, cwd=staged).returncode
    dead = dead_links(staged / "site") if code == 0 else []
    print("\n".join(dead), file=sys.stderr, end="\n" if dead else "")
    if code or dead:
        return 1
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(staged / "site", site)
    return 0


def with_links(text: str, source: str, faults: list[str]) -> str:
    """The text of the file `source` with links that work on the site; those that cannot: faults."""
    page = MOUNTED.get(source, source)

    def replaced(match: re.Match[str]) -> str:
        target = match[2]
        if target is None or re.match(r"[a-z]+:|#", target):
            return match[0]
        name, mark, anchor = target.partition("#")
        path = normpath(join(dirname(source), name))
        if not (ROOT / path).exists():
            faults.append(f"{source}: links to {name}, which does not exist")
        return f"]({address(path, page)}{mark}{anchor})"

    return CODE_OR_LINK.sub(replaced, text)


def address(path: str, page: str) -> str:
    """Address of a file or folder of the repository in a link on a page."""
    if (ROOT / path / "README.md").exists():
        path = join(path, "README.md")
    path = MOUNTED.get(path, path)
    if path.startswith("docs/") and not (ROOT / path).is_dir():
        return relpath(path, dirname(page))
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{path}"


def dead_links(site: Path) -> list[str]:
    """Links and pictures of a built site that lead to no file of it, or to no place in it."""
    texts = {path: path.read_text() for path in sorted(site.rglob("*.html"))}
    ids = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in texts.items()}
    dead: list[str] = []
    for path, text in texts.items():
        targets = dict.fromkeys(re.findall(r'\b(?:href|src)="([^"]*)"', text))
        for target in targets if path.name != "404.html" else ():
            name, _, anchor = unescape(unquote(target)).partition("#")
            if re.match(r"[a-z]+:", name):
                continue
            file = (path.parent / name).resolve() if name else path
            anchored = not anchor or anchor in ids.get(file, {anchor})
            if not file.exists() or not anchored:
                dead.append(f"{path.relative_to(site)}: {target}")
    return dead


def entries(nav: Any) -> list[str]:
    """The pages and patterns of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [entry for child in children for entry in entries(child)]


def expanded(nav: Any, pages: set[str]) -> Any:
    """The navigation with the pages that each pattern stands for."""
    named = {entry for entry in entries(nav) if "*" not in entry}

    def matching(pattern: str) -> list[str]:
        alike = (page for page in sorted(pages - named) if fnmatch(page, pattern))
        return [page for page in alike if page.count("/") == pattern.count("/")]

    def below(part: Any) -> Any:
        if isinstance(part, dict):
            return {title: below(child) for title, child in part.items()}
        if isinstance(part, str):
            return part
        listed: list[Any] = []
        for entry in part:
            listed += matching(entry) if isinstance(entry, str) and "*" in entry else [below(entry)]
        return listed

    return below(nav)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Builds the documentation site.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "site")
    sys.exit(main(parser.parse_args().folder))

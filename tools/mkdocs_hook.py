"""A hook of mkdocs: what pages in docs/ link to outside of docs/ becomes a part of the site.

So the same relative links work where the repository is read and on the site, wherever it lies and
without a network. Markdown becomes a page, any other text a page that shows it. A link to what does
not exist is left as it is, for `mkdocs build --strict` to refuse.
"""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LINK = re.compile(r"(?<=\]\()[^()\s]+(?=\))")
# Where such pages lie in the site: below this, at the path that they have in the repository.
BESIDE = "repository"


def on_files(files: Any, config: Any) -> Any:
    """Add the files that are linked to, those that these link to, and so on."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    root = Path(config.docs_dir).parent
    open_pages = [Path(config.docs_dir) / file.src_uri for file in files.documentation_pages()]
    while open_pages:
        page = open_pages.pop()
        for target in _targets(page, page.read_text(), root).values():
            place = _place(target, root)
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, content=_content(target)))
                if target.suffix == ".md":
                    open_pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point the links of a page at the places that `on_files` gave their targets."""
    root = Path(config.docs_dir).parent
    uri = page.file.src_uri
    beside = uri.startswith(f"{BESIDE}/")
    source = root / uri.removeprefix(f"{BESIDE}/") if beside else Path(config.docs_dir) / uri
    if not source.is_file():
        return markdown  # the text of a program
    for link, target in _targets(source, markdown, root).items():
        place = os.path.relpath(_place(target, root), os.path.dirname(uri) or ".")
        mark = urlsplit(link).fragment
        markdown = markdown.replace(f"]({link})", f"]({place}{'#' + mark if mark else ''})")
    return markdown


def _targets(source: Path, markdown: str, root: Path) -> dict[str, Path]:
    """Of a Markdown file's links to files of the repository, those that do not stay in docs/."""
    docs = root / "docs"
    found = {}
    for link in LINK.findall(markdown):
        parts = urlsplit(link)
        target = (source.parent / parts.path).resolve()
        local = not parts.scheme and parts.path and target.is_file()
        if local and not (source.is_relative_to(docs) and target.is_relative_to(docs)):
            found[link] = target
    return found


def _place(target: Path, root: Path) -> str:
    """The path in the site's sources of a file of the repository."""
    if target.is_relative_to(root / "docs"):
        return target.relative_to(root / "docs").as_posix()
    path = target.relative_to(root).as_posix()
    return f"{BESIDE}/{path}" if target.suffix == ".md" else f"{BESIDE}/{path}.md"


def _content(target: Path) -> str:
    text = target.read_text()
    if target.suffix == ".md":
        return text
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", text)), 0)
    return f"# {target.name}\n\n{fence}{target.suffix.removeprefix('.')}\n{text}\n{fence}\n"

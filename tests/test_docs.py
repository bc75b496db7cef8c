"""The documentation says what the code says, and its links lead somewhere."""

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "megatron_opo"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
ENTRY = re.compile(r"^### (`+)(.+)\1\n\n- Cause: (?s:.+?)\n- Cure: ", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def texts_of(tree: ast.AST) -> list[str]:
    """Every text of a program but docstrings, with NUL where a value is put in; parts that `+`
    joins are two."""
    nodes = list(ast.walk(tree))
    left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
    found = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and id(node) not in left_out:
            found.append(str(node.value))
    return found


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """What the program can say. A line break of a message is a space."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        found += texts_of(ast.parse(path.read_text()))
    return [" ".join(text.split()) for text in found]


def quoted(page: str) -> list[str]:
    return [entry[2] for entry in ENTRY.finditer(page)]


def can_be_said(message: str, texts: list[str]) -> bool:
    """Whether one text of the program has the parts of a quoted message, with a value for each
    of its `...`."""
    parts = [re.escape(part) for part in re.split(r" ?\.\.\. ?", message) if part]
    wanted = re.compile(r"[^\n]*?\0[^\n]*?".join(parts).replace(r"\ ", " "))
    return any(wanted.search(text) for text in texts)


def test_every_quoted_message_is_one_that_the_program_can_say(texts):
    page = (DOCS / "troubleshooting.md").read_text()
    messages = quoted(page)
    assert len(messages) == page.count("\n### ") > 40, "an entry lacks its cause or cure"
    assert [m for m in messages if not can_be_said(m, texts)] == []
    assert len(set(messages)) == len(messages)


def test_a_message_that_no_code_says_is_found(texts):
    assert can_be_said("is not a directory; give a Hugging Face model directory", texts)
    assert not can_be_said("is not a directory; give a Hugging Face model folder", texts)
    assert not can_be_said("model.path: is not a ... directory", texts)


def module_names() -> set[str]:
    """Packages and modules at the top, as architecture.md writes them: `train.py`, `actor/`."""
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    return files | {f"{path.parent.name}/" for path in PACKAGE.glob("*/*.py")}


def test_the_architecture_names_every_module_once_and_no_other():
    rows = re.findall(r"^\| `([\w/]+(?:\.py)?)` \|", (DOCS / "architecture.md").read_text(), re.M)
    described = [row for row in rows if row.endswith((".py", "/"))]
    assert sorted(described) == sorted(module_names())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(page):
    for link in LINK.findall(page.read_text()):
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), link


def test_the_site_has_every_page():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def pages(tree) -> list[str]:
        if isinstance(tree, str):
            return [tree]
        values = tree.values() if isinstance(tree, dict) else tree
        return [page for value in values for page in pages(value)]

    assert sorted(pages(nav)) == sorted(path.name for path in DOCS.glob("*.md"))


def test_links_out_of_docs_lead_into_the_site():
    hook = runpy.run_path(str(ROOT / "tools" / "mkdocs_hook.py"))["on_page_markdown"]

    def on_site(uri: str, markdown: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri))
        return hook(markdown, page, SimpleNamespace(docs_dir=str(DOCS)), None)

    program = "[families](../megatron_opo/weights/families.py)"
    shown = "[families](repository/megatron_opo/weights/families.py.md)"
    assert on_site("checkpoints.md", f"{program}, {program}") == f"{shown}, {shown}"
    table = "[table](../benchmarks/results/scaling.md#gpus)"
    assert (
        on_site("performance.md", table) == "[table](repository/benchmarks/results/scaling.md#gpus)"
    )
    back = on_site("repository/benchmarks/results/variance.md", "[v](../../docs/variance.md)")
    assert back == "[v](../../../variance.md)"
    for kept in ("[a](variance.md#b)", "[a](https://x.org/../y)", "[a](../nowhere.md)", "[a](#b)"):
        assert on_site("estimators.md", kept) == kept


def test_a_program_is_shown_as_it_is(tmp_path):
    content = runpy.run_path(str(ROOT / "tools" / "mkdocs_hook.py"))["_content"]
    program = tmp_path / "a.py"
    for text in ("x = 1\n", '"""`one`, and:\n```\n````\n"""\n'):
        program.write_text(text)
        heading, _, opened, *lines, closed = content(program).rstrip("\n").split("\n")
        assert heading == "# a.py" and opened == f"{closed}py" and set(closed) == {"`"}
        assert "\n".join(lines) == text and len(closed) >= 3 and closed not in text

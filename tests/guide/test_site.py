"""What a machine can check of `docs/`: links, anchors, sizes, questions, the reference and images."""

import argparse
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from test_public_api import PUBLIC

from fabric import cli

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s]+)\)")
MOST_BYTES = 12_288
MOST_LINES = 60
"""A README below `fabric/`, which is for people who change the code."""


def tool(name):
    """A script of `docs/site/`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[\s]+", "-", word) for word in words}


def targets(page: Path) -> list[tuple[Path, str]]:
    """(file, anchor) of each link."""
    found = [link.partition("#") for link in LINK.findall(prose(page))]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_short_and_its_links_lead_somewhere(page):
    assert page.stat().st_size <= (10_000 if page.name == "README.md" else MOST_BYTES)
    wrong = [f"{file}#{anchor}" for file, anchor in targets(page) if not file.exists()]
    wrong += [
        f"{file}#{anchor}"
        for file, anchor in targets(page)
        if anchor and file.suffix == ".md" and file.exists() and anchor not in anchors(file)
    ]
    assert wrong == []
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1


def test_the_readme_of_a_folder_is_short():
    lines = {page: len(page.read_text().splitlines()) for page in (ROOT / "fabric").rglob("README.md")}
    assert len(lines) > 40
    assert {str(page): count for page, count in lines.items() if count > MOST_LINES} == {}


def test_every_page_is_in_the_navigation():
    navigation = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert navigation == {"index.md", *[page.relative_to(ROOT / "docs").as_posix() for page in DOCS]}


def test_each_question_is_two_clicks_from_its_answer():
    """The links of the README, then those of these pages; not by the list of questions itself."""
    table = ROOT / "docs" / "questions.md"
    rows = re.findall(r"^\| (\d+) \| (.*?\?) \| \[.*?\]\((.*?)\) \|$", table.read_text(), re.MULTILINE)
    assert len(rows) >= 25
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    first = {file for file, _ in targets(ROOT / "README.md") if file.suffix == ".md"} - {table}
    second = {file for page in first for file, _ in targets(page)}
    for _, question, link in rows:
        path, _, anchor = link.partition("#")
        answer = (table.parent / path).resolve()
        assert answer in first | second | {ROOT / "README.md"}, question
        assert anchor in anchors(answer), question


def test_the_reference_has_every_public_name():
    pages = tool("reference").pages()
    folder = ROOT / "docs" / "reference"
    wrong = [name for name, text in pages.items() if (folder / name).read_text() != text]
    assert wrong == [], "run: python docs/site/reference.py"
    shown = set(re.findall(r"heading: (\S+)", "".join(pages.values())))
    names = {name.rpartition(".")[2] for name in shown}
    others = {"LightningDeprecationWarning", "MisconfigurationException", "ReduceOp", "get_available_flops"}
    others |= {"DistributedSamplerWrapper", "_unwrap_objects"}  # names of Lightning Fabric that need no word
    public = {name for text in PUBLIC.values() for name in re.findall(r"^\w+", text, re.MULTILINE)}
    assert public - names - others == set()


def test_the_images_are_those_that_the_script_draws():
    drawn = tool("draw_loop").images()
    folder = ROOT / "docs" / "images"
    wrong = [name for name, text in drawn.items() if (folder / name).read_text() != text]
    assert wrong == [], "run: python docs/site/draw_loop.py"
    assert {path.name for path in folder.iterdir()} == drawn.keys()
    (loss,) = set(re.findall(r"last loss \d\.\d+", (ROOT / "README.md").read_text()))
    assert drawn["loop.svg"].count(loss) == 2


def test_every_environment_variable_has_a_row():
    page = (ROOT / "docs/reference/environment-variables.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "fabric").rglob("*.py"))
    used = {name for name in re.findall(r"FABRIC_[A-Z]+(?:_[A-Z]+)*(?!\w|\{)", source) if name[-1] != "_"}
    shown = set(re.findall(r"FABRIC_[A-Z_]+[A-Z]", page))
    assert used - shown == set()


def test_every_option_of_the_command_line_has_a_row():
    page = (ROOT / "docs/reference/command-line.md").read_text()
    sections = dict(re.findall(r"^## fabric (\w+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    parsers = next(
        action.choices for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    assert sections.keys() == parsers.keys()
    for command, parser in parsers.items():
        options = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
        assert set(re.findall(r"^\| `(-[\w-]+)`", sections[command], re.MULTILINE)) == options

"""What MkDocs cannot do by itself: the README as the front page, and links to files of the repository.

Pages link to `../examples/digits.py` or `../../CONTRIBUTING.md`, as GitHub shows them. Here each such file
becomes a page under `repository/`, and the link leads there. `build.txt` is the reference's list of names.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".ipynb": "json", ".sh": "bash", ".toml": "toml", ".cff": "yaml"}


def on_files(files, config):
    """Add the front page and every file of the repository that a page links to."""
    files.append(File.generated(config, "index.md", content=rewritten("README.md")))
    todo = ["README.md", *[f"{DOCS}{file.src_uri}" for file in files if file.is_documentation_page()]]
    todo.remove(f"{DOCS}index.md")
    done = set()
    while todo:
        for target in links(todo.pop()):
            if target not in done and not target.startswith(DOCS) and target != "README.md":
                done.add(target)
                todo += [target] * target.endswith(".md")
                files.append(File.generated(config, page_of(target), content=content(target)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links out of `docs/` to the pages made of these files."""
    source = page.file.src_uri
    return markdown if source.startswith("repository/") or source == "index.md" else rewritten(DOCS + source)


def links(source):
    """The files of the repository that a page links to, from the root; code blocks are left out."""
    text = re.sub(r"^```.*?^```", "", (ROOT / source).read_text(), flags=re.DOTALL | re.MULTILINE)
    folder = posixpath.dirname(source)
    found = {readable(posixpath.normpath(posixpath.join(folder, link))) for link in LINK.findall(text)}
    return {target for target in found if (ROOT / target).is_file()}


def readable(target):
    """A folder's README in place of the folder."""
    return f"{target}/README.md" if (ROOT / target / "README.md").is_file() else target


def page_of(target):
    """Where a file of the repository is in the site."""
    if target == "README.md":
        return "index.md"
    if target.startswith(DOCS):
        return target.removeprefix(DOCS)
    return f"repository/{target}" + ".md" * (not target.endswith(".md"))


def rewritten(source):
    """A page's text; each of its links leads to a page of the site."""
    folder = posixpath.dirname(source)
    here = posixpath.dirname(page_of(source)) or "."

    def lead(match):
        target = readable(posixpath.normpath(posixpath.join(folder, match[1])))
        if not (ROOT / target).is_file():
            return match[1]  # MkDocs says which link is broken
        return posixpath.relpath(page_of(target), here)

    return LINK.sub(lead, (ROOT / source).read_text())


def content(target):
    """The text of a page made of a file: Markdown as it is, all else as one block of code."""
    if target.endswith(".md"):
        return rewritten(target)
    fence = "~~~~~~"
    text = (ROOT / target).read_text()
    return f"# {target}\n\n{fence}{LANGUAGES.get(Path(target).suffix, 'text')}\n{text}\n{fence}\n"


def on_post_page(output, page, config):
    """Take the search's shim for `file://` from the site, so that a page makes no request to the network."""
    local = posixpath.relpath("assets/iframe-worker.js", posixpath.dirname(page.url) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", local)

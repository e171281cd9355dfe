"""The site of `make docs` in headless Chromium: front page, search, reference, phone width, dark mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from browser import NEEDS_BROWSER, browsers, requests_of, wait_for

ROOT = Path(__file__).parents[3]
PAGES = ("index.html", "how-to/errors.html", "reference/fabric.html", "how-to/choose-a-strategy.html")
pytestmark = [pytest.mark.filterwarnings("default"), NEEDS_BROWSER]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.fixture
def browse(tmp_path):
    """Function that opens a page in a browser of its own."""
    yield from browsers(tmp_path)


def errors_of(driver):
    return [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_shown_without_an_error_or_a_request_to_a_server(site, browse, page):
    driver = browse(site / page)
    wait_for(driver, "document.querySelector('article h1')")
    assert driver.execute_script("return document.querySelector('article').innerText.length") > 500
    assert (
        driver.execute_script(
            "return [...document.images].filter(one => one.complete && !one.naturalWidth).length"
        )
        == 0
    )
    assert errors_of(driver) == []
    assert [url for url in requests_of(driver) if not url.startswith("file:")] == []


def test_the_front_page_leads_to_tutorials_and_questions(site, browse):
    driver = browse(site / "index.html")
    links = wait_for(driver, "[...document.querySelectorAll('article a')].map(one => one.href)")
    assert any(link.endswith("tutorials/first-loop.html") for link in links)
    assert any("how-to/hang.html" in link for link in links)
    assert all(
        Path(link.partition("#")[0].removeprefix("file://")).exists() for link in links if "file:" in link
    )


@pytest.mark.parametrize(
    ("words", "page"),
    [("hang", "how-to/hang.html"), ("clip_gradients", "fabric"), ("LoRA", "how-to/freeze.html")],
)
def test_the_search_works_offline(site, browse, words, page):
    from selenium.webdriver.common.by import By

    driver = browse(site / "index.html")
    wait_for(driver, "document.querySelector('[data-md-component=search-query]')")
    field = driver.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]")
    driver.execute_script("document.querySelector('#__search').click(); arguments[0].focus()", field)
    field.send_keys(words)
    links = "[...document.querySelectorAll('.md-search-result__link')].map(one => one.href)"
    found = wait_for(driver, f"{links}.length && {links}")
    assert any(page in link for link in found[:5]), found
    driver.execute_script("document.querySelector('.md-search-result__link').click()")
    assert errors_of(driver) == []


def test_the_reference_has_signatures_and_arguments(site, browse):
    driver = browse(site / "reference/fabric.html")
    text = wait_for(driver, "document.querySelector('article').innerText")
    for part in ("all_reduce", "reduce_op", "setup_dataloaders", "All ranks must call this", "Raises"):
        assert part in text, part


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("page", PAGES)
def test_a_phone_needs_no_horizontal_scroll(site, browse, page, dark):
    driver = browse(site / page, width=390, height=844, dark=dark)
    wait_for(driver, "document.querySelector('article h1')")
    assert driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]


@pytest.mark.parametrize("dark", [False, True])
def test_colors_follow_the_scheme_of_the_system(site, browse, dark):
    driver = browse(site / "index.html", dark=dark)
    wait_for(driver, "document.body.getAttribute('data-md-color-scheme')")
    colors = driver.execute_script(
        "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color]"
    )
    paper, ink = [
        sum(int(part) for part in color.split("(")[1].rstrip(")").split(",")[:3]) for color in colors
    ]
    assert (paper < ink) == dark

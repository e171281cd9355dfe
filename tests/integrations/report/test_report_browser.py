"""The page of `fabric report` in headless Chromium: plots, hover, zoom, console, phone width, dark mode."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from browser import NEEDS_BROWSER, browsers, requests_of, wait_for
from report_cases import start_of, steps_of, write_rank, write_run

from fabric import cli
from fabric.report.format import FILE_NAME, KINDS, STEP, pack_header
from fabric.tools.report.aggregate import BINS

pytestmark = [pytest.mark.filterwarnings("default"), NEEDS_BROWSER]
PLOTS = 4


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = write_run(tmp_path_factory.mktemp("run"))
    assert cli.main(["report", str(directory)]) == 0
    return directory / "report.html"


@pytest.fixture
def browse(tmp_path):
    """Function that opens a page in a browser of its own."""
    yield from browsers(tmp_path)


def plot(driver, index):
    """A plot, in the middle of the window."""
    from selenium.webdriver.common.by import By

    found = driver.find_elements(By.CSS_SELECTOR, ".js-plotly-plot")[index]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found.find_element(By.CSS_SELECTOR, ".nsewdrag")


def test_every_plot_is_drawn_without_an_error_or_a_request(page, browse):
    driver = browse(page)
    assert wait_for(driver, "document.querySelectorAll('.js-plotly-plot .main-svg').length") >= PLOTS
    count = "document.querySelectorAll('.js-plotly-plot')[{}].querySelectorAll('{}').length"
    assert wait_for(driver, count.format(0, ".bars .point path")) == 4 * (len(KINDS) + 1)
    assert wait_for(driver, count.format(1, ".heatmaplayer image")) == 1
    assert wait_for(driver, count.format(2, ".scatterlayer .js-line")) == 2 + 2 + 3 + 3
    assert wait_for(driver, count.format(3, ".scatterlayer .point")) == 8
    colors = driver.execute_script(  # of the heatmap
        """
        const image = document.querySelector('.heatmaplayer image');
        const canvas = document.createElement('canvas');
        [canvas.width, canvas.height] = [image.width.baseVal.value, image.height.baseVal.value];
        const context = canvas.getContext('2d'), found = new Set();
        context.drawImage(image, 0, 0, canvas.width, canvas.height);
        const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 3).join());
        return found.size
        """
    )
    assert colors > 20
    text = driver.execute_script("return document.body.innerText")
    assert "rank 3 on node0: +23 %, in data, steps 400-1,199" in text
    assert "ended, 4 ranks on 1 machine, 1,500 steps" in text
    assert driver.get_log("browser") == []
    assert requests_of(driver) == {page.as_uri()}


def test_hover_shows_the_rank_and_the_numbers(page, browse):
    from selenium.webdriver.common.action_chains import ActionChains

    driver = browse(page)
    texts = []
    for index in range(3):
        ActionChains(driver).move_to_element_with_offset(plot(driver, index), 40, 20).perform()
        shown = (
            f"document.querySelectorAll('.js-plotly-plot')[{index}].querySelector('.hoverlayer').textContent"
        )
        texts.append(wait_for(driver, shown))
    assert re.search(r"rank \d on node0: [\d.]+ ms", texts[0])
    assert re.search(r"rank \d, step \d+: [\d.]+ ms, mean", texts[1])
    assert re.search(r"mean.*: ", texts[2])
    dot = driver.execute_script(
        "const dot = [...document.querySelectorAll('.js-plotly-plot')[3].querySelectorAll('.point')].pop();"
        "dot.scrollIntoView({block: 'center'}); return dot"
    )
    ActionChains(driver).move_to_element(dot).perform()
    shown = "document.querySelectorAll('.js-plotly-plot')[3].querySelector('.hoverlayer').textContent"
    assert re.search(r"\d\d:\d\d:\d\d +step [\d,]+", wait_for(driver, shown))


def test_a_drag_zooms_and_a_double_click_resets(page, browse):
    from selenium.webdriver.common.action_chains import ActionChains

    driver = browse(page)
    for index in range(3):
        area = plot(driver, index)
        span = f"document.querySelectorAll('.js-plotly-plot')[{index}]._fullLayout.xaxis.range.slice()"
        before = driver.execute_script(f"return {span}")
        drag = ActionChains(driver).move_to_element_with_offset(area, -120, -20).click_and_hold()
        drag.move_by_offset(60, 10).move_by_offset(140, 30).release().perform()
        wait_for(driver, f"{span}[1] - {span}[0] < {0.5 * (before[1] - before[0])}")
        zoomed = driver.execute_script(f"return {span}")
        assert before[0] < zoomed[0] < zoomed[1] < before[1]
        ActionChains(driver).move_to_element(area).double_click().perform()
        wait_for(driver, f"{span}[1] - {span}[0] > {0.95 * (before[1] - before[0])}")
    assert driver.get_log("browser") == []


def test_the_button_shows_the_longest_step(page, browse):
    driver = browse(page)
    visible = "document.querySelectorAll('.js-plotly-plot')[1]._fullData.map(trace => trace.visible).join()"
    assert wait_for(driver, visible) == "true,false"
    driver.execute_script(
        "[...document.querySelectorAll('.updatemenu-button')][1].dispatchEvent(new MouseEvent('click'))"
    )
    assert wait_for(driver, f"{visible} == 'false,true'")
    largest = (
        "Math.max(...document.querySelectorAll('.js-plotly-plot')[1]._fullData[1].z.flatMap(row => [...row]))"
    )
    assert driver.execute_script(f"return {largest}") == pytest.approx(2098, rel=0.01)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_horizontal_scroll(page, browse, dark):
    driver = browse(page, width=390, height=844, dark=dark)
    wait_for(driver, "document.querySelectorAll('.js-plotly-plot .main-svg').length")
    assert driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    right = driver.execute_script(
        "return [...document.querySelectorAll('h1, h2, p, li, .main-svg, .legend, .updatemenu-button')]"
        ".map(part => part.getBoundingClientRect()).filter(box => box.width).map(box => box.right)"
    )
    assert max(right) <= 390
    sizes = driver.execute_script(
        "return [...document.querySelectorAll('p, li, .js-plotly-plot text')]"
        ".filter(part => part.textContent).map(part => parseFloat(getComputedStyle(part).fontSize))"
    )
    assert min(sizes) >= 11
    assert driver.get_log("browser") == []


def luminance(color):
    red, green, blue = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("dark", [False, True])
def test_colors_follow_the_scheme_of_the_system(page, browse, dark):
    driver = browse(page, dark=dark)
    color = "getComputedStyle(document.querySelector('{}')).{}"
    wait_for(driver, "document.querySelector('.js-plotly-plot .xtick text')")

    def read():
        paper = luminance(driver.execute_script("return " + color.format("body", "backgroundColor")))
        inks = [
            ("h1", "color"),
            ("li", "color"),
            (".xtick text", "fill"),
            (".legendtext", "fill"),
            (".ytitle", "fill"),
        ]
        return paper, [luminance(driver.execute_script("return " + color.format(*ink))) for ink in inks]

    paper, inks = read()
    assert (paper < 0.2) == dark
    assert all(abs(ink - paper) > 0.6 for ink in inks)
    other = {"name": "prefers-color-scheme", "value": "light" if dark else "dark"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [other]})
    wait_for(driver, f"/{'27' if dark else '228'}/.test({color.format('.xtick text', 'fill')})")
    paper, inks = read()
    assert (paper < 0.2) != dark
    assert all(abs(ink - paper) > 0.6 for ink in inks)


def test_texts_of_a_run_are_no_markup(tmp_path, browse):
    bad = "</script><script>console.error('run')</script><img src=x onerror=alert(1)>"
    events = [(3, "log", {"values": {bad: 1.0}}), (4, "failure", {"error": "ValueError", "text": bad})]
    write_rank(tmp_path, 0, 1, steps_of(5), events=events, last=None)
    assert cli.main(["report", str(tmp_path)]) == 0
    driver = browse(tmp_path / "report.html")
    wait_for(driver, "document.querySelectorAll('.js-plotly-plot .main-svg').length")
    assert bad in driver.execute_script("return document.querySelector('#failures').innerText")
    assert driver.execute_script("return document.querySelectorAll('img').length") == 0
    assert driver.get_log("browser") == []


def test_a_thousand_ranks_with_all_bins_are_a_page_of_less_than_10_mb(tmp_path, browse):
    """As large as 100,000 steps make it: these have no more bins."""
    count, ranks = BINS - 1, 1000
    template = bytearray(b"".join([write_step(number) for number in range(1, count + 1)]))
    for rank in range(ranks):
        seconds = torch.rand(count, len(KINDS)).float()
        rows = torch.frombuffer(template, dtype=torch.uint8).view(count, STEP.size)
        rows[:, 16:44] = seconds.view(torch.uint8).view(count, -1)
        rows[:, 44:48] = seconds.sum(1, keepdim=True).view(torch.uint8)
        data = pack_header() + start_of(rank, ranks, 1.7e9) + bytes(template)
        (tmp_path / FILE_NAME.format(rank)).write_bytes(data)
    assert cli.main(["report", str(tmp_path)]) == 0
    page = tmp_path / "report.html"
    assert 7e6 < page.stat().st_size < 10e6
    driver = browse(page)
    areas = (
        "document.querySelectorAll('.js-plotly-plot')[0].querySelectorAll('.scatterlayer .js-fill').length"
    )
    assert wait_for(driver, areas) == len(KINDS) + 1
    assert wait_for(driver, "document.querySelectorAll('.js-plotly-plot')[1]._fullData[0].z.length") == ranks
    print("seconds until loaded:", driver.execute_script("return performance.now()"))
    assert driver.get_log("browser") == []


def write_step(number):
    return STEP.pack(b"S", number, 1.7e9 + number, *[0.0] * len(KINDS), 0.0, 1_000_000)

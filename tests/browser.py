"""Pages in headless Chromium, for tests in `integrations/report` and `integrations/docs`."""

from __future__ import annotations

import json
import shutil

import pytest

CHROMIUM = next(
    (path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None
)
DRIVER = shutil.which("chromedriver")
FLAGS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync
"""
NEEDS_BROWSER = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs a browser: apt install chromium chromium-driver"
)


def browsers(tmp_path):
    """Yield a function that opens a page in a browser of its own; for a fixture."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    opened = []

    def open_page(path, width=1200, height=900, dark=False):
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        profile = tmp_path / f"profile{len(opened)}"
        for flag in [*FLAGS.split(), f"--user-data-dir={profile}", f"--window-size={width},{height}"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        opened.append(driver)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        driver.get(path.as_uri())
        return driver

    yield open_page
    for driver in opened:
        driver.quit()


def wait_for(driver, script):
    """The first true value of a script."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, 60).until(lambda _: driver.execute_script(f"return {script}"))


def requests_of(driver):
    """The addresses that the page asked for; the browser's own page for new tabs has others."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    urls = {one["request"]["url"] for one in sent}
    return {url for url in urls if not url.startswith(("data:", "chrome:"))}

"""Takes the pictures of docs/report.md with Debian's chromium and chromium-driver: `python docs/screenshots.py RUN`.

Of a run with an inspect.json, it takes those of docs/inspect.md too; of a run with episodes of several turns, that of
episodes alone.
"""

import argparse
import base64
from pathlib import Path
from shutil import which

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.select import Select

from tokencredit.report.page import write_report

FIGURES = Path(__file__).with_name("figures")


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    page = write_report(run)
    options = webdriver.ChromeOptions()
    options.binary_location = which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, webdriver.ChromeService(which("chromedriver")))
    FIGURES.mkdir(exist_ok=True)
    try:
        show(browser, page, 1200, "light")
        if browser.find_elements(By.CSS_SELECTOR, ".episode"):
            iteration = Select(browser.find_element(By.CSS_SELECTOR, "#pane0 select"))
            iteration.select_by_index(len(iteration.options) // 4)
            Select(browser.find_element(By.ID, "order")).select_by_value("worst")
            shoot(browser, FIGURES / "report-episodes.png", "#pane0", height=1000)
            return
        for name, width, scheme in (("report", 1200, "light"), ("report-narrow-dark", 400, "dark")):
            show(browser, page, width, scheme)
            shoot(browser, FIGURES / f"{name}.png", "body", height=1400)
        show(browser, page, 1200, "light")
        early = Select(browser.find_element(By.CSS_SELECTOR, "#pane0 select"))
        early.select_by_index(len(early.options) // 10)  # completions differ, and so does their credit
        token = browser.find_element(By.CSS_SELECTOR, "#pane0 .tokens span[tabindex]")
        browser.execute_script("arguments[0].focus({ preventScroll: true })", token)
        shoot(browser, FIGURES / "report-credit.png", "section:has(#credit)", height=1000)
        shoot(browser, FIGURES / "report-what-if.png", "section:has(#whatif)", height=1100)
        shoot(browser, FIGURES / "report-curves.png", "section:has(#curves)", height=1100)
        if (run / "inspect.html").is_file():
            show(browser, run / "inspect.html", 1200, "light")
            shoot(browser, FIGURES / "inspect.png", "body", height=1000)
    finally:
        browser.quit()


def show(browser: webdriver.Chrome, page: Path, width: int, scheme: str) -> None:
    """Open the page at a width, light or dark."""
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.resolve().as_uri())


def shoot(browser: webdriver.Chrome, file: Path, selector: str, height: int) -> None:
    """A picture of the upper part of an element."""
    element = browser.find_element(By.CSS_SELECTOR, selector)
    browser.execute_script("arguments[0].scrollIntoView()", element)  # the sticky line of numbers at its end
    box = element.rect
    clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": min(box["height"], height), "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    file.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()

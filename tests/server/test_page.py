"""The page in a real browser: ask, see the stream, stop it, race, upload a document."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service as DriverService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from longspec import LongSpec
from tests.server.live import Live, live

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="needs a browser: apt-get install chromium chromium-driver"
)


@pytest.fixture(scope="module")
def server(_loaded: LongSpec) -> Iterator[Live]:
    with live(_loaded, keys=["open sesame"]) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, DriverService(DRIVER)) as driver:
        yield driver


class Page:
    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def text(self, where: str) -> str:
        found = self.browser.find_elements(By.CSS_SELECTOR, where)
        return "".join(str(one.get_property("textContent")) for one in found)

    def wait(self, where: str, for_text: str, seconds: float = 60) -> str:
        WebDriverWait(self.browser, seconds).until(
            lambda _: for_text in self.text(where), f"{where}: {for_text}"
        )
        return self.text(where)

    def put(self, where: str, text: str) -> None:
        field = self.browser.find_element(By.ID, where)
        field.clear()
        field.send_keys(text)

    def ask(self, question: str, *keys: str) -> None:
        self.put("prompt", question)
        self.browser.find_element(By.ID, "prompt").send_keys(*(keys or (Keys.ENTER,)))

    def answered(self, count: int) -> None:
        is_ready = "return !document.getElementById('send').disabled"
        is_there = f"return document.querySelectorAll('.message.assistant').length === {count}"
        WebDriverWait(self.browser, 60).until(
            lambda page: page.execute_script(is_ready) and page.execute_script(is_there)
        )


def test_the_page(server: Live, browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = Page(browser)
    browser.get(server.address)
    page.wait("#model", "an API key is needed")
    assert "valid API key" in page.text("#problem")
    browser.get_log("browser")  # the refusal is no error of the page
    page.put("key", "open sesame\t")
    page.wait("#model", "smollm2-135m")
    assert page.text("#problem") == ""

    # Ask: the answer streams in, each token marked by how it came.
    Select(browser.find_element(By.ID, "method")).select_by_value("seq")
    page.put("max-tokens", "24")
    page.ask("What is the capital of France?")
    page.answered(1)
    assert page.text(".message.assistant .text") == "The capital of France is Paris."
    assert len(browser.find_elements(By.CSS_SELECTOR, ".message.assistant .d1")) >= 1
    assert "8 tokens" in page.text(".message.assistant .figures")
    assert float(page.text("#tau")) > 1
    assert browser.find_elements(By.CSS_SELECTOR, "#rounds rect")

    # What anybody writes is text, and never markup.
    page.put("max-tokens", "1")
    page.ask("<img src=x onerror=\"document.title='run'\"><b>bold</b>")
    page.answered(2)
    assert "<b>bold</b>" in page.text(".message.user")
    assert not browser.find_elements(By.CSS_SELECTOR, "#log img, #log b")
    assert browser.title == "LongSpec"

    # Stop it: by the key, and the slot is free again.
    page.put("max-tokens", "2000")
    page.put("temperature", "2")  # so that it does not end by itself
    page.ask("Tell me everything.")
    WebDriverWait(browser, 30).until(
        lambda _: browser.find_elements(By.CSS_SELECTOR, ".message:nth-child(6) .text span")
    )
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
    page.wait(".message:nth-child(6) .figures", "stopped", 10)
    WebDriverWait(browser, 10).until(lambda _: server.is_idle)

    # A request that fails: the question is in its box again, and no answer is there.
    page.put("max-tokens", "90000")
    page.ask("How far is the moon?")
    page.wait("#problem", "context holds")
    assert browser.find_element(By.ID, "prompt").get_property("value") == "How far is the moon?"
    assert len(browser.find_elements(By.CSS_SELECTOR, ".message")) == 6
    browser.get_log("browser")  # the refusal is no error of the page

    # Race: the same words, one after the other.
    page.put("temperature", "0.5")
    browser.find_element(By.ID, "clear").click()
    page.put("max-tokens", "10")
    page.ask("Name three colours.", Keys.CONTROL, Keys.ENTER)
    verdict = page.wait("#verdict", "times as fast as vanilla")
    assert "with the same words" in verdict
    assert page.text("#race-method") == page.text("#race-vanilla") != ""
    assert not browser.find_elements(By.CSS_SELECTOR, "#race-vanilla .d1")

    # A document, and how much of it was reused for the second question.
    report = tmp_path / "report.txt"
    report.write_text("Sales rose by three percent in spring. " * 20)
    browser.find_element(By.CSS_SELECTOR, "#document-box summary").click()
    browser.find_element(By.ID, "file").send_keys(str(report))
    page.wait("#document-size", "780 characters")
    page.put("max-tokens", "4")
    page.ask("By how much did sales rise?")
    page.wait("#reuse", "prompt tokens were reused")
    page.answered(1)
    page.ask("When?")
    page.answered(2)
    reused, total = (int(word) for word in page.text("#reuse").split() if word.isdigit())
    assert reused > 0.7 * total

    # Dark and light, narrow screens.
    before = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    browser.find_element(By.ID, "theme").click()
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    browser.set_window_size(500, 800)
    width = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    assert len(set(browser.execute_script(width))) == 1  # nothing to scroll sideways

    faults = [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]
    assert not faults

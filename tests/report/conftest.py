"""A headless Chromium; a page must log no error and request nothing from the network."""

import shutil
from typing import NamedTuple

import pytest
from playwright.sync_api import Page, sync_playwright


@pytest.fixture(scope="session")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found, "no Chromium: apt-get install chromium"
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


class Opened(NamedTuple):
    page: Page
    complaints: list
    requests: list


@pytest.fixture
def opened(browser):
    """Opens files; at the end none may have logged an error or requested another file."""
    every = []

    def open_page(path, **options):
        page = browser.new_page(**{"viewport": {"width": 1360, "height": 900}} | options)
        one = Opened(page, [], [])
        page.on("console", lambda message: one.complaints.append(message.text))
        page.on("pageerror", lambda error: one.complaints.append(str(error)))
        page.on("request", lambda request: one.requests.append(request.url))
        page.goto(path.as_uri())
        every.append((one, path))
        return page

    yield open_page
    for one, path in every:
        one.page.close()
        assert one.complaints == []
        assert [url for url in one.requests if not url.startswith("data:")] == [path.as_uri()]

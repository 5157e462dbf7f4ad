"""The page in a browser: headless Chromium opens the example, and the tests use it as people do."""

import pytest

from longspan.explorer.page import page_html
from tests.explorer import example
from tests.explorer.browser import CHROMIUM, Browser, Tab

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
TROUBLE = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "example.html"
    path.write_text(page_html(example.made()), "utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def tab(browser, url):
    return Tab(browser)


def test_the_page_is_drawn_without_errors_and_requests_nothing_else(browser, tab, url):
    browser.events.clear()
    tab.open(url)
    assert not [event for event in browser.events if event["method"] in TROUBLE]
    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert set(requests) <= {url, "about:blank", "data:,"}
    assert tab.run("document.getElementById('expression').textContent") == example.made()["mask"]["text"]

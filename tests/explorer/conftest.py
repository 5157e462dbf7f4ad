"""A browser for the tests of the page, and pages that it opens."""

import pytest

from longspan.explorer.page import page_html
from tests.explorer import example
from tests.explorer.browser import Browser, Tab


@pytest.fixture(scope="package")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="package")
def tab(browser):
    return Tab(browser)


@pytest.fixture(scope="package")
def save(tmp_path_factory):
    """Writes a document's page, and returns its address."""
    folder = tmp_path_factory.mktemp("pages")

    def write(found, name):
        (folder / f"{name}.html").write_text(page_html(found), "utf-8")
        return (folder / f"{name}.html").as_uri()

    return write


@pytest.fixture(scope="package")
def url(save):
    return save(example.made(), "example")

"""The chat page as a file: stands alone, and lets no reply text become markup."""

import re
from html.parser import HTMLParser
from pathlib import Path

import gateway

PAGE = (Path(gateway.__file__).parent / "web" / "index.html").read_text()


class _Elements(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_nothing_is_loaded_from_elsewhere() -> None:
    for tag, attributes in _Elements().found:
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "data:,") == "data:,", f"<{tag} {name}>"
    assert not re.search(r"https?://|@import|url\(|import\s*\(", PAGE)


def test_text_enters_the_page_as_text_only() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", PAGE)


def test_every_element_that_the_script_asks_for_exists_once() -> None:
    ids = [attributes["id"] for _, attributes in _Elements().found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'\$\("([\w-]+)"\)', PAGE)) <= set(ids)


def test_every_control_has_a_name_for_those_who_cannot_see_it() -> None:
    elements = _Elements().found
    labelled = {attributes["for"] for tag, attributes in elements if tag == "label" and "for" in attributes}
    for tag, attributes in elements:
        if tag == "textarea":
            assert attributes["id"] in labelled
    assert ("html", {"lang": "en"}) in elements
    assert any(attributes.get("role") == "status" for _, attributes in elements)

"""The pages say what the code says: citations resolve, and keys, files and links that a page names exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.methods import METHODS
from recipes.schema import Recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    *(path for folder in ("recipes", "heads", "data_prep", "train", "eval", "tests") for path in (ROOT / folder).rglob("*.py")),
    *(ROOT / "recipes").rglob("*.yaml"),
    ROOT / "CONTRIBUTING.md",
]


def cited(text: str) -> Iterator[str]:
    """References in a text, as `METHODS 5.3` or `B20`.

    >>> list(cited("(METHODS §2.3, §16.8; B20) and VLLM_FORMATS §5–7: see STYLE L3"))
    ['METHODS 2.3', 'METHODS 16.8', 'VLLM_FORMATS 5', 'VLLM_FORMATS 7', 'STYLE L3', 'B20']
    """
    text = re.sub(r"\s*\n[\s#]*", " ", text)
    for page, sections in re.findall(r"\b(DESIGN|METHODS|VLLM_FORMATS|PEERS) ((?:§\d[\w.]*(?:, |–)?)+(?:\d+)?)", text):
        yield from (f"{page} {section}" for section in re.findall(r"\d+(?:\.\d+)*[a-z]?", sections))
    yield from re.findall(r"\bSTYLE L\d+", text)
    yield from re.findall(r"\b[BE]\d\d\b", text)


def resolved() -> set[str]:
    """What docs/design.md and docs/references.md explain."""
    found = {f"DESIGN {n}" for n in re.findall(r"^## §(\d+)", (ROOT / "docs/design.md").read_text(), re.M)}
    page = ""
    for line in (ROOT / "docs/references.md").read_text().splitlines():
        if heading := re.match(r"## (\w+)", line):
            page = heading[1]
        elif (row := re.match(r"\| ([\w., ]+?) \|", line)) and page:
            names = row[1].split(", ")
            found |= set(names) if page in ("Fault", "PEERS") else {f"{page} {name}" for name in names}
    return found


def test_every_citation_is_resolved():
    known = resolved()
    missing = {
        (name, str(path.relative_to(ROOT)))
        for path in SOURCES
        if "embedded" not in path.parts and path != Path(__file__)
        for name in cited(path.read_text(encoding="utf-8"))
        if name not in known
    }
    assert not missing, "explain them in docs/references.md"
    assert {"METHODS 16.8", "B20", "STYLE L3", "DESIGN 8"} <= known


def test_methods_names_keys_that_exist():
    page = (ROOT / "docs/methods.md").read_text()
    keys: dict[str, set[str]] = {block: set(getattr(field.annotation, "model_fields", ())) for block, field in Recipe.model_fields.items()}
    for method in METHODS.values():
        keys["head"] |= set(method.head.model_fields)
        keys["objective"] |= set(method.objective.model_fields)
    named = set(re.findall(r"`(head|objective|train|data|features|target|export|eval)\.(\w+)", page))
    assert len(named) > 60 and not [f"{block}.{key}" for block, key in named if key not in keys[block]]
    assert not [name for name in METHODS if f"`{name}`" not in page]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./-])((?:recipes|train|heads|eval|data_prep|tests|docs)/[\w./-]+\.(?:py|yaml|md|json))", text))
    assert not [name for name in named if not (ROOT / name).is_file()]
    for link in re.findall(r"\]\((?!http)([^)]*)\)", text):
        file, _, anchor = link.partition("#")
        other = page.parent / file if file else page
        assert other.is_file(), link
        slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", other.read_text(), re.M)}
        assert not anchor or anchor in slugs, link

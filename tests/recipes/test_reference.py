"""docs/recipe.md is what the schema says, and it says something about every key."""

from pathlib import Path

import pytest

from recipes.methods import METHODS
from recipes.reference import AFTER, BLOCKS, comments_in, document, table

SHOWN = [*BLOCKS, *AFTER, *((f"{name} {part}", block) for name, method in METHODS.items() for part, block in method._asdict().items())]


def test_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs/recipe.md"
    assert page.read_text() == document(), "run `python -m recipes.reference > docs/recipe.md`"


@pytest.mark.parametrize(("path", "block"), SHOWN, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_every_key_has_a_meaning_and_a_readable_type(path, block):
    rows = [[cell.strip() for cell in row.split(" | ")] for row in table(path, block).splitlines() if row.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(block.model_fields)
    assert not [row for row in rows if len(row) != 4 or not row[3].strip("| ")], (
        "a key without a comment in the schema, or a cell cut in two"
    )
    for _, kind, _, _ in rows:
        assert not [debris for debris in ("Annotated", "Literal", "Optional", "typing", "<class", ")]", "metadata") if debris in kind]


def test_a_comment_is_found_wherever_it_stands():
    source = """class A:
    a: int = 1  # behind
    b: int = (
        2  # inside
    )
    c: dict[
        str, int
    ] = {}  # at the end
    # above,
    # in two lines
    d: str = "# no comment"
    e: int = 5

    # of a method
    def f(self): ...
"""
    assert comments_in(source) == {"a": "behind", "b": "inside", "c": "at the end", "d": "above, in two lines"}

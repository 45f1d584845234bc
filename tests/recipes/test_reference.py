"""docs/recipe.md is what the schema says."""

from pathlib import Path

from recipes.reference import document


def test_page_is_up_to_date():
    page = Path(__file__).parents[2] / "docs/recipe.md"
    assert page.read_text() == document(), "run `python -m recipes.reference > docs/recipe.md`"

"""Look at one row as training sees it: what is supervised is green and stands between ⟦ and ⟧.

    python -m data_prep.show recipes/smollm2-135m/eagle3.yaml         # the first row
    python -m data_prep.show recipes/smollm2-135m/eagle3.yaml 41 data.max_length=256

The row is rendered anew from the recipe's conversations; no features are needed.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby, islice
from pathlib import Path

from data_prep.conversations import Conversation, Tally, read_conversations
from data_prep.render import Row, chat_tokenizer, render_rows
from recipes.errors import DataError, HeadstartError
from recipes.schema import Recipe, load_recipe


def find_row(recipe: Recipe, number: int, tokenizer) -> tuple[Conversation, Row, Tally]:
    """The `number`-th usable row of the recipe, counted from 0.

    Raises:
        DataError: there are fewer rows, or the answers are still to be written by the target.
    """
    sources = recipe.data.prompts
    if recipe.data.regenerate is not None:
        answers = Path(recipe.features.dir) / "answers.jsonl"
        if not answers.is_file():
            raise DataError(f"data.regenerate: the target has not written {answers} yet; run python -m data_prep RECIPE first")
        sources = [str(answers)]
    tally = Tally()
    conversations = read_conversations(sources, tally=tally, max_rows=recipe.data.max_rows)
    for conversation, row in islice(render_rows(conversations, tokenizer, recipe.data, tally), number, None):
        return conversation, row, tally
    raise DataError(f"there is no row {number}: {tally.summary()}\n{tally.explain()}".rstrip())


def show_row(conversation: Conversation, row: Row, tokenizer, console) -> None:
    """Print one row and its counts to a rich console."""
    from rich.text import Text

    text, pairs = Text(), zip(row.input_ids, row.loss_mask, strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        piece = tokenizer.decode([token for token, _ in run])
        text.append(f"⟦{piece}⟧" if supervised else piece, style="bold green" if supervised else "dim")
    console.print(text, soft_wrap=True)
    tokens, supervised = len(row.input_ids), sum(row.loss_mask)
    origin = "the target's own tokens" if row.exact else "text, tokenised here"
    if conversation.temperature is not None:
        origin += f", temperature {conversation.temperature:g}, ended by {conversation.finish_reason}"
    console.rule(style="dim")
    console.print(
        Text(f"{conversation.id}: {tokens} tokens, {supervised} supervised ({supervised / tokens:.0%}); answer: {origin}"), soft_wrap=True
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", help="a YAML file, for instance recipes/debug/eagle3.yaml")
    parser.add_argument(
        "rest", nargs="*", metavar="row key=value", help="which row, counted from 0 (default 0), and overrides of the recipe"
    )
    args = parser.parse_args(argv)
    rows = [word for word in args.rest if word.isdecimal()]
    overrides = [word for word in args.rest if not word.isdecimal()]
    if len(rows) > 1:
        parser.error(f"one row at a time, not {' and '.join(rows)}")
    try:
        recipe = load_recipe(args.recipe, overrides)
        from rich.console import Console

        tokenizer = chat_tokenizer(recipe.target, recipe.data.chat_template, recipe.data.template_kwargs)
        conversation, row, tally = find_row(recipe, int(rows[0]) if rows else 0, tokenizer)
        show_row(conversation, row, tokenizer, Console())
    except HeadstartError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    if tally.skipped:
        print(f"up to this row: {tally.summary()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

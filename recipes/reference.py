"""Write docs/recipe.md from the schema: `python -m recipes.reference > docs/recipe.md`.

The text beside each key is the comment that stands beside it in the schema, so there is one place to write it.
"""

from __future__ import annotations

import inspect
import re

from recipes import schema
from recipes.blocks import Block
from recipes.methods import METHODS

BLOCKS = [
    ("", schema.Recipe),
    ("target", schema.Target),
    ("data", schema.Data),
    ("data.regenerate", schema.Regenerate),
    ("features", schema.Features),
]
AFTER = [("train", schema.Train), ("export", schema.Export), ("eval", schema.Eval)]


def comments(block: type[Block]) -> dict[str, str]:
    """Comment behind each field of a block, own or inherited."""
    found: dict[str, str] = {}
    for cls in reversed(block.__mro__):
        if issubclass(cls, Block) and cls is not Block:
            for line in inspect.getsource(cls).splitlines():
                if m := re.match(r"    (\w+): [^#]*# (.*)", line):
                    found[m[1]] = m[2]
    return found


def table(path: str, block: type[Block]) -> str:
    """One block as a Markdown table."""
    notes = comments(block)
    lines = [
        f"### `{path or 'top level'}`",
        "",
        inspect.cleandoc(block.__doc__ or ""),
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in block.model_fields.items():
        kind = str(field.annotation).replace("typing.", "").replace("recipes.schema.", "").replace("recipes.head_blocks.", "")
        kind = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", kind)
        kind = re.sub(r"Annotated\[(\w+), [^\]]*\)\]", r"\1", kind)
        default = "required" if field.is_required() else f"`{field.default!r}`" if not isinstance(field.default, Block) else ""
        lines.append(f"| `{name}` | {kind.replace('|', 'or')} | {default} | {notes.get(name, '')} |")
    return "\n".join(lines)


def document() -> str:
    """The whole page."""
    parts = [
        "# Recipe reference",
        "",
        "One YAML file describes a run from prompts to report. Unknown keys fail; `train.lr=1e-3` behind the file overrides a value.",
        "This page is made by `python -m recipes.reference > docs/recipe.md`.",
        "",
    ]
    parts += [table(path, block) + "\n" for path, block in BLOCKS]
    for name, method in METHODS.items():
        parts += [f"## Method `{name}`\n", table("head", method.head) + "\n", table("objective", method.objective) + "\n"]
    parts += ["## Training, export, evaluation\n"] + [table(path, block) + "\n" for path, block in AFTER]
    return "\n".join(parts)


if __name__ == "__main__":
    print(document(), end="")

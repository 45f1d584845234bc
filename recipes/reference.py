"""Write docs/recipe.md from the schema: `python -m recipes.reference > docs/recipe.md`.

The text beside each key is the comment that stands beside it in the schema, so there is one place to write it.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

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
    """Comment of each field of a block, own or inherited."""
    found: dict[str, str] = {}
    for cls in reversed(block.__mro__):
        if issubclass(cls, Block) and cls is not Block:
            found |= comments_in(inspect.getsource(cls))
    return found


def comments_in(source: str) -> dict[str, str]:
    """Comment of each field in the source of a class: on the lines of its statement, else the comment lines directly above.

    >>> comments_in("class A:\\n    # above,\\n    # in two lines\\n    x: int\\n    y: list[\\n        int\\n    ]  # behind\\n    z: int")
    {'x': 'above, in two lines', 'y': 'behind'}
    """
    notes: dict[int, str] = {}  # by line
    alone: set[int] = set()  # lines that hold a comment and nothing else
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            notes[token.start[0]] = token.string.removeprefix("#").strip()
            if token.line.lstrip().startswith("#"):
                alone.add(token.start[0])
    (cls,) = ast.parse(source).body
    assert isinstance(cls, ast.ClassDef), "inspect gives the source of one class"
    found: dict[str, str] = {}
    for field in cls.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            lines = [n for n in range(field.lineno, (field.end_lineno or field.lineno) + 1) if n in notes]
            if not lines:
                first = field.lineno
                while first - 1 in alone:
                    first -= 1
                lines = list(range(first, field.lineno))
            if lines:
                found[field.target.id] = " ".join(notes[n] for n in lines)
    return found


def type_text(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type as a reader of YAML takes it, with its bounds.

    >>> from pydantic import Field, PositiveInt
    >>> type_text(list[Annotated[float, Field(ge=0)]]), type_text(Literal["auto"] | PositiveInt), type_text(float, [Field(ge=0, lt=1)])
    ('list of float ≥ 0', '`auto` or int > 0', 'float in [0, 1)')
    """
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return "block"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0], args[1:])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin is list:
        inner = type_text(args[0])
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    if origin is tuple:
        return f"list of {len(args)}: {', '.join(type_text(arg) for arg in args)}"
    if origin is dict:
        return "mapping"
    return ("None" if annotation is type(None) else annotation.__name__) + bounds(metadata)


def bounds(metadata: Iterable[Any]) -> str:
    """What pydantic checks of a number, as ` ≥ 0` or ` in [0, 1)`."""
    parts = [part for extra in metadata for part in getattr(extra, "metadata", [extra])]  # a nested Field holds its own
    limit = {name: getattr(part, name) for part in parts for name in ("ge", "gt", "le", "lt") if hasattr(part, name)}
    low = next((name for name in ("ge", "gt") if name in limit), None)
    high = next((name for name in ("le", "lt") if name in limit), None)
    if low and high:
        return f" in {'[' if low == 'ge' else '('}{limit[low]}, {limit[high]}{']' if high == 'le' else ')'}"
    only = low or high
    return f" {({'ge': '≥', 'gt': '>', 'le': '≤', 'lt': '<'})[only]} {limit[only]}" if only else ""


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
        default = "required" if field.is_required() else "optional" if isinstance(field.default, Block) else f"`{field.default!r}`"
        meaning = notes.get(name, "").replace("|", "\\|")
        lines.append(f"| `{name}` | {type_text(field.annotation, field.metadata)} | {default} | {meaning} |")
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

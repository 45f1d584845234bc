"""Options of the commands that let the target write (data_prep.regenerate, data_prep.magpie): named and preset like the recipe's keys."""

from __future__ import annotations

import argparse
import json
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from data_prep.answering import ENGINES
from data_prep.render import TemplateValue
from recipes.blocks import Block
from recipes.errors import RecipeError
from recipes.schema import Regenerate, Target

B = TypeVar("B", bound=Block)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Which target writes, with which template, in which engine."""
    parser.add_argument("--target", required=True, help="embedded:smollm2-135m, a local folder or a HF id")
    for name, how in _options().items():
        parser.add_argument(f"--{name.replace('_', '-')}", **how)


def _options() -> dict[str, dict[str, Any]]:
    """What `add_argument` takes, by recipe key; `--target` (target.path) stands apart."""
    target, settings = Target.model_fields, Regenerate.model_fields
    dtype, attn, concurrency = target["dtype"].default, target["attn"].default, settings["concurrency"].default
    example = """variables of the chat template, for instance '{"enable_thinking": false}'"""
    return {
        "revision": {"help": "branch, tag or commit of a HF id"},
        "dtype": {"default": dtype, "choices": get_args(target["dtype"].annotation), "help": f"of the target (default {dtype})"},
        "attn": {"default": attn, "choices": get_args(target["attn"].annotation), "help": f"attention with --engine hf (default {attn})"},
        "tp": {"default": target["tp"].default, "type": int, "help": "GPUs over which vLLM splits the target (default 1)"},
        "trust_remote_code": {
            "default": False,
            "action": "store_true",
            "help": "run the Python files of the model's folder: read them first",
        },
        "chat_template": {"metavar": "FILE", "help": "a Jinja file that replaces the tokenizer's own template"},
        "template_kwargs": {"default": {}, "type": _template_kwargs, "metavar": "JSON", "help": example},
        "engine": {"default": settings["engine"].default, "choices": list(ENGINES), "help": "vLLM (default), or hf: transformers"},
        "concurrency": {"default": concurrency, "type": int, "help": f"requests in flight (default {concurrency})"},
    }


def _template_kwargs(text: str) -> dict[str, TemplateValue]:
    """`--template-kwargs` as `data.template_kwargs`."""
    try:
        return TypeAdapter(dict[str, TemplateValue]).validate_json(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(
            f"""{text!r} is no JSON object of plain values, such as '{{"enable_thinking": false}}'"""
        ) from None


def engine_options(args: argparse.Namespace) -> list[str]:
    """The options of `add_engine_arguments` that are not as preset, as words for another command."""
    words = ["--target", args.target]
    for name, how in _options().items():
        value = getattr(args, name)
        if value != how.get("default"):
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [text])
    return words


def target_of(args: argparse.Namespace) -> Target:
    """The `target` block of these options.

    Raises:
        RecipeError: a value is out of range.
    """
    return _block(Target, {"path": args.target} | {name: getattr(args, name) for name in Target.model_fields if name != "path"})


def settings_of(args: argparse.Namespace) -> Regenerate:
    """The `data.regenerate` block of a command that takes some of its keys as options.

    Raises:
        RecipeError: a value is out of range.
    """
    return _block(Regenerate, {name: getattr(args, name) for name in Regenerate.model_fields if hasattr(args, name)})


def _block(model: type[B], values: dict[str, Any]) -> B:
    try:
        return model(**values)
    except ValidationError as e:
        faults = (f"--{str(fault['loc'][0]).replace('_', '-')} {fault['input']}: {fault['msg']}" for fault in e.errors())
        raise RecipeError("; ".join(faults)) from None

"""Prompts → answers → tokens → features: everything that training needs, into the recipe's `features.dir`.

    python -m data_prep recipes/debug/eagle3.yaml
    python -m data_prep recipes/debug/eagle3.yaml data.max_length=256 --rebuild

Stages, each resumed or skipped (docs/features.md, docs/recipe.md):

    answers     data.regenerate: the target answers data.prompts          answers.jsonl
    rows        chat template, loss mask, truncation; bad rows counted    rows.safetensors
    features    the target's states at every token                        shard-00000.safetensors …
                (train.features: online leaves them out: training runs the target itself)

It may be interrupted (Ctrl-C or SIGTERM: the shard at hand is finished first; a second time: at once) and run again:
finished answers, rows and shards are verified and kept.
"""

from __future__ import annotations

import argparse
import fcntl
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.manifest import mend_command
from data_prep.status import clear, describe, find_work
from data_prep.stop import Stopped, stop_signals
from recipes.errors import FeatureError, HeadstartError
from recipes.folders import writable_folder
from recipes.schema import load_recipe


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", help="a YAML file, for instance recipes/debug/eagle3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the recipe, for instance data.max_rows=100")
    parser.add_argument("--rebuild", action="store_true", help="remove the store in features.dir, the answers excepted, and build it anew")
    args = parser.parse_intermixed_args(argv)
    with stop_signals() as stop:
        try:
            recipe = load_recipe(args.recipe, args.overrides)
            folder = Path(recipe.features.dir)
            with locked(folder):
                if args.rebuild:
                    clear(folder)
                manifest, work = find_work(recipe, folder)
                if work:
                    from data_prep.build import build  # torch and transformers take seconds

                    manifest = build(recipe, manifest, folder, stop)
        except HeadstartError as e:
            print(f"error: {e}", file=sys.stderr)
            return 1
        except (Stopped, KeyboardInterrupt):
            print(f"stopped; everything finished is kept. Run `{mend_command()}` to go on.", file=sys.stderr)
            return 128 + (stop.signum or 0)
    assert manifest is not None, "a store without work left has a manifest"
    print(f"{'features' if work else 'nothing to do':<15}{folder} ({describe(manifest, folder)})")
    print(f"next           accelerate launch train/{recipe.method}.py {shlex.join([args.recipe, *args.overrides])}")
    return 0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other data_prep processes out of `folder`; the lock goes with the process, however it ends.

    Raises:
        FeatureError: another process builds there.
        RecipeError: the folder cannot be written to.
    """
    with open(writable_folder(folder, "features.dir") / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FeatureError(f"another data_prep process is writing to {folder}; wait for it, or give another features.dir.") from None
        yield


if __name__ == "__main__":
    sys.exit(main())

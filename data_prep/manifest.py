"""The manifest of a feature store: what it holds, for which target and data, and whether it is whole.

While a store is being built, the same record lies in `unfinished.json`; `manifest.json` is written last, so its presence
means that every file it lists was finished. Both are replaced atomically. Nothing here needs torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import sys
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep.conversations import embedded_file
from heads.embedded import resolve_target, target_fingerprint
from recipes.errors import FeatureError, HeadstartError
from recipes.schema import Recipe

FORMAT = 1  # raised whenever rendering, extraction or the layout changes what a store holds
MANIFEST, UNFINISHED = "manifest.json", "unfinished.json"
ROWS, COUNTS, PROBE = "rows.safetensors", "token_counts.safetensors", "probe.safetensors"
ANSWERS = "answers.jsonl"  # what the target wrote, where data.regenerate asks for it (data_prep/regenerate.py)
LAYER_CONVENTION = "layer i is the residual stream after i decoder blocks (0 = embeddings, L = after the last block, before the final norm)"


class FileEntry(BaseModel):
    """Size and checksum of a finished file."""

    bytes: int
    crc32: int


class ShardEntry(BaseModel):
    """A run of consecutive rows; `written` is None until its file is finished."""

    file: str
    first_row: int
    num_rows: int
    num_tokens: int
    written: FileEntry | None = None


class Manifest(BaseModel):
    """Everything a reader must know about a store before it opens a shard."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    command: str  # what built it
    fingerprints: dict[str, Any]  # compared with the recipe before the store is used
    versions: dict[str, str]
    features: Literal["stored", "none"] = "none"  # none: tokens only, for train.features: online
    layers: list[int] = []  # layers stored as hidden.<i>
    layer_convention: str = LAYER_CONVENTION
    last_hidden: Literal["post_norm"] = "post_norm"
    dtypes: dict[str, str] = {}  # of `hidden` (the codec) and `last_hidden` (as computed: never rounded); `products` of the target
    num_target_layers: int
    hidden_size: int
    vocab_size: int
    counts: dict[str, int]  # rows, tokens, supervised_tokens, validation_rows, greedy_rows, duplicate_rows
    dropped: dict[str, int]  # rows by reason
    lengths: dict[str, int]  # tokens a row: min, p10, p50, p90, max
    rows_crc32: int | None = None  # of the rows that the shards belong to, even while their file is lost
    files: dict[str, FileEntry] = {}  # rows, token_counts and probe, once they are finished
    shards: list[ShardEntry] = []

    def save(self, path: Path) -> None:
        """Replace `path` atomically."""
        write_atomically(path, lambda tmp: tmp.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8"))

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            FeatureError: not JSON, another format version, or not a manifest.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.get("format") != FORMAT:
                found = raw.get("format")
                raise FeatureError(f"{path}: store format {found}, this code reads {FORMAT}. Rebuild it: `{mend_command('--rebuild')}`")
            return cls.model_validate(raw)
        except (ValueError, AttributeError, ValidationError) as e:
            kind = type(e).__name__
            raise FeatureError(f"{path} is not a readable manifest ({kind}). Rebuild the store: `{mend_command('--rebuild')}`") from None


def find_manifest(folder: Path) -> tuple[Manifest | None, bool]:
    """The record of a store and whether the store is whole; (None, False) where nothing has been built."""
    for name, whole in ((MANIFEST, True), (UNFINISHED, False)):
        if (folder / name).is_file():
            return Manifest.load(folder / name), whole
    return None, False


def mend_command(*options: str) -> str:
    """The data_prep command for the recipe and overrides of this process's own command line.

    Every command of the project takes them the same way; outside one (a test, a notebook) the placeholder RECIPE stands.
    """
    given = [a for a in sys.argv[1:] if a.endswith((".yaml", ".yml")) or ("=" in a and not a.startswith("-"))]
    if not any(a.endswith((".yaml", ".yml")) for a in given):
        given = ["RECIPE"]
    return " ".join(["python -m data_prep", *map(shlex.quote, [*given, *options])])


def package_versions() -> dict[str, str]:
    """Versions of the libraries whose numbers a store holds."""
    return {name: version(name) for name in ("torch", "transformers", "tokenizers")}


# ------------------------------------------------------------------------------------------------------- fingerprints


STATES = ("features.codec", "features.precision")  # what only stored states depend on


def fingerprints(recipe: Recipe) -> dict[str, Any]:
    """What a store depends on, by recipe key: stores with equal fingerprints hold the same rows and states.

    The layers are not among them (a store may hold more than a head reads); nor are batch and shard sizes, nor who decoded
    the answers: their own hash is.
    """
    target = resolve_target(recipe.target.path, recipe.target.revision)
    data = recipe.data
    sources = {source: source_fingerprint(source) for source in data.prompts}
    if data.regenerate is not None:
        sources[ANSWERS] = source_fingerprint(str(Path(recipe.features.dir) / ANSWERS))
    return {
        "target.path": target_fingerprint(target),
        "target.dtype": recipe.target.dtype,
        "data.chat_template": tokenizer_fingerprint(target, data.chat_template),
        "data.template_kwargs": data.template_kwargs or None,  # None too in stores that are older than the key
        "data.prompts": sources,
        "data.regenerate": data.regenerate.model_dump(mode="json", exclude={"engine", "concurrency"}) if data.regenerate else None,
        **{f"data.{key}": getattr(data, key) for key in ("max_length", "supervise", "holdout", "max_rows", "seed")},
        "features.codec": recipe.features.codec,
        "features.precision": recipe.features.precision,
    }


def tokenizer_fingerprint(target: Path, chat_template: str | None) -> str:
    """Hash of the tokenizer's files and of the template that renders a chat (a file of the recipe's, or the tokenizer's own)."""
    digest = hashlib.sha256()
    for pattern in ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"):
        for file in sorted(p for p in target.glob(pattern) if p.is_file()):
            digest.update(f"{file.name}:".encode() + file.read_bytes())
    if chat_template is not None:
        try:
            digest.update(b"override:" + Path(chat_template).read_bytes())
        except OSError as e:
            raise FeatureError(f"data.chat_template: cannot read {chat_template}: {e.strerror}") from None
    return digest.hexdigest()[:16]


def source_fingerprint(source: str) -> str | None:
    """Hash of a source's files; None for a source that is not on this disk (a hub id, or data left on another machine)."""
    path = embedded_file(source) if source.startswith("embedded:") else Path(source).expanduser()
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb") as f:
            digest.update(f"{file.name}:{hashlib.file_digest(f, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()[:16]


def check_fingerprints(manifest: Manifest, recipe: Recipe, where: Path) -> None:
    """Compare a store with the recipe that wants to use it (B12).

    Raises:
        FeatureError: names every differing key, both values, and the command that mends it.
    """
    wanted, lines, back = fingerprints(recipe), [], []
    stored = dict(manifest.fingerprints)
    if manifest.features == "none" or recipe.train.features == "online":  # no stored state is used
        for key in STATES:
            wanted.pop(key)
    before, now = stored.pop("data.prompts", {}), wanted.pop("data.prompts")
    if list(before) != list(now):
        lines.append(f"data.prompts: built from {list(before)}, the recipe says {list(now)}")
    for source in before.keys() & now.keys():
        if None not in (before[source], now[source]) and before[source] != now[source]:
            lines.append(f"data.prompts: the content of {source} changed (hash {before[source]}, now {now[source]})")
    for key in wanted:
        if stored.get(key) != wanted[key]:
            lines.append(f"{key}: built with {stored.get(key)!r}, the recipe says {wanted[key]!r}{_EXPLAIN.get(key, '')}")
            if key not in _EXPLAIN:
                back.append(key)
    if lines:
        restore = f", set {' and '.join(back)} back" if back else ""
        raise FeatureError(
            "\n  ".join([f"{where} was built for other settings:", *lines])
            + f"\nRebuild it with `{mend_command('--rebuild')}`{restore}, or give another folder with features.dir."
        )


_EXPLAIN = {
    "target.path": " (hash of the target's config and weight files)",
    "data.chat_template": " (hash of tokenizer files and chat template)",
}


def check_layers_stored(manifest: Manifest, recipe: Recipe, where: Path) -> None:
    """Raise FeatureError unless every layer that the recipe's head reads is in the store."""
    if manifest.features == "none":
        raise FeatureError(f"{where} holds tokens only, and train.features is stored. Add the states: `{mend_command()}`")
    needed = recipe.head.feature_layers(manifest.num_target_layers)
    if missing := sorted(set(needed) - set(manifest.layers)):
        raise FeatureError(missing_layers(manifest, missing, where, f"the head reads {needed}"))


def missing_layers(manifest: Manifest, missing: list[int], where: Path, why: str) -> str:
    """The message for a store that lacks layers."""
    both = "features.layers=" + str(sorted({*manifest.layers, *missing})).replace(" ", "")
    rebuild = mend_command(both, "--rebuild")
    return f"{where} holds layers {manifest.layers}, but {why}. Rebuild it with all of them: `{rebuild}`, or give another features.dir."


# ---------------------------------------------------------------------------------------------------------- safe files


def write_atomically(path: Path, write: Callable[[Path], object]) -> FileEntry:
    """Let `write` fill a temporary file, fsync it, and rename it to `path`; returns its size and checksum.

    Raises:
        FeatureError: the disk (or the quota) is full. The temporary file is removed; nothing finished is touched.
    """
    tmp = path.with_name(path.name + ".tmp")
    try:
        write(tmp)
        tmp.chmod(0o644)  # safetensors makes files that nobody else can read
        with tmp.open("rb+") as f:
            entry = file_entry(tmp)
            os.fsync(f.fileno())
        os.replace(tmp, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the new name itself durable
        finally:
            os.close(folder)
        return entry
    except HeadstartError:
        raise
    except Exception as e:  # safetensors raises its own type with the system's text
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(e) or "os error 122" in str(e):
            free = shutil.disk_usage(path.parent).free
            raise FeatureError(
                f"the disk is full: could not write {path} ({free / 1e9:.3g} GB free). Every finished file is kept. "
                f"Free some space and run `{mend_command()}` again, or move {path.parent} to a larger disk and set features.dir."
            ) from e
        raise
    finally:
        tmp.unlink(missing_ok=True)


def file_entry(path: Path) -> FileEntry:
    """Size and CRC-32 of a file, read in pieces."""
    crc = size = 0
    with path.open("rb") as f:
        while piece := f.read(1 << 22):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return FileEntry(bytes=size, crc32=crc)


def file_fault(path: Path, entry: FileEntry, checksum: bool) -> str | None:
    """Why `path` is not the file that was finished as `entry`; None where it is. The size alone costs nothing."""
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != entry.bytes:
        return f"has {size:,} bytes, {entry.bytes:,} were written"
    if checksum and (crc := file_entry(path).crc32) != entry.crc32:
        return f"has checksum {crc:08x}, {entry.crc32:08x} was written"
    return None

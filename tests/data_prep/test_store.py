"""The store as training sees it: every row as extracted, and a clear stop for whatever does not fit or is not whole."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from data_prep.extract import load_extraction_model
from data_prep.manifest import UNFINISHED, Manifest, mend_command, write_atomically
from data_prep.store import FeatureStore
from recipes.errors import FeatureError


@pytest.fixture
def store_dir(data_prep, tmp_path) -> Path:
    """A finished store of several shards."""
    assert data_prep() == 0
    return tmp_path / "store"


def flip_byte(path: Path, tensor: str, token: int) -> None:
    """Damage one byte of a state without changing the file's size."""
    raw = bytearray(path.read_bytes())
    header_size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + header_size])[tensor]
    at = 8 + header_size + entry["data_offsets"][0] + token * entry["shape"][1] * 4
    raw[at] ^= 1
    path.write_bytes(raw)


# ------------------------------------------------------------------------------------------------------------- contents


@torch.no_grad()
def test_every_row_is_as_the_target_gives_it_alone(store_dir, recipe):
    """B16, B17, B18: tokens, mask and states of every row, over shard borders, equal a forward pass of that row alone."""
    store = FeatureStore.open(store_dir, recipe())
    model = load_extraction_model(recipe().target)
    assert len(store.manifest.shards) > 2 and len(store) == 12
    for row in range(len(store)):
        got = store.read(row, [3, 1])
        assert got.input_ids.dtype == torch.int64 and got.loss_mask.dtype == torch.bool
        assert len(got.input_ids) == len(got.loss_mask) == len(got.last_hidden) == store.lengths[row]
        assert int(got.loss_mask.sum()) == store.supervised[row] > 0
        own = model(got.input_ids[None], output_hidden_states=True, use_cache=False)
        assert list(got.hidden) == [3, 1]
        for layer, states in got.hidden.items():
            torch.testing.assert_close(states, own.hidden_states[layer][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.last_hidden, own.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
        assert torch.equal(model.lm_head(got.last_hidden).argmax(-1), own.logits[0].argmax(-1))


def test_layout_is_the_documented_one(store_dir):
    """DESIGN §4: names, dtypes and shapes that any safetensors reader finds; no pad is stored."""
    manifest = Manifest.load(store_dir / "manifest.json")
    tokens = 0
    for shard in manifest.shards:
        with safe_open(store_dir / shard.file, "pt") as f:
            found = {name: (f.get_tensor(name).dtype, tuple(f.get_tensor(name).shape)) for name in f.keys()}  # noqa: SIM118
        n, r = shard.num_tokens, shard.num_rows
        states = {f"hidden.{i}": (torch.float32, (n, 64)) for i in (1, 2, 3)} | {"last_hidden": (torch.float32, (n, 64))}
        index = {"row_offsets": (torch.int64, (r + 1,)), "row_crc32": (torch.int64, (r, 4))}
        assert found == {"input_ids": (torch.int32, (n,)), "loss_mask": (torch.uint8, (n,))} | index | states
        tokens += n
    assert tokens == manifest.counts["tokens"]
    assert manifest.last_hidden == "post_norm" and manifest.dtypes == {"hidden": "f32", "last_hidden": "float32", "products": "float32"}
    assert (store_dir / "recipe.yaml").is_file() and not (store_dir / UNFINISHED).exists()


def test_probe_holds_the_targets_predictions_on_row_0(store_dir, recipe):
    store = FeatureStore.open(store_dir, recipe())
    model = load_extraction_model(recipe().target)
    with torch.no_grad():
        logits = model(store.tokens(0)[0][None]).logits[0]
    assert torch.equal(store.probe["argmax"], logits.argmax(-1))
    torch.testing.assert_close(store.probe["logsumexp"], logits.logsumexp(-1))


def test_token_counts_are_of_supervised_training_tokens(store_dir, recipe):
    store = FeatureStore.open(store_dir, recipe())
    expected = torch.zeros(260, dtype=torch.int64)
    for row in range(len(store)):
        ids, mask = store.tokens(row)
        if not store.validation[row]:
            for token in ids[mask].tolist():
                expected[token] += 1
    assert store.token_counts.dtype == torch.int64
    assert torch.equal(store.token_counts, expected)
    assert 0 < expected.sum() < store.supervised.sum()


def test_flags_of_rows(store_dir, recipe):
    """Greedy answers are the target's own tokens at temperature 0; equal prompts stay on one side of the hold-out."""
    store = FeatureStore.open(store_dir, recipe())
    assert store.greedy.tolist() == [True, False, False, True, False, False, False, True, False, False, False, False]
    assert store.validation[2] == store.validation[9] and store.validation[4] == store.validation[5]
    assert 0 < store.validation.sum() < 12
    assert store.manifest.counts["duplicate_rows"] == 1


def test_store_goes_through_pickle(store_dir, recipe):
    """A data-loader worker that is spawned gets the store by pickle, after rows have been read."""
    store = FeatureStore.open(store_dir, recipe())
    before = store.read(5, [2])
    copied = pickle.loads(pickle.dumps(store)).read(5, [2])
    assert torch.equal(before.hidden[2], copied.hidden[2])


def test_few_shards_stay_open(store_dir, recipe, monkeypatch):
    monkeypatch.setattr("data_prep.store.OPEN_SHARDS", 1)
    store = FeatureStore.open(store_dir, recipe())
    first = store.read(0, [1]).last_hidden.clone()
    for row in (11, 0, 6):
        store.read(row, [1])
        assert len(store._shards) == 1
    assert torch.equal(store.read(0, [1]).last_hidden, first)


# ------------------------------------------------------------------------------------------------------ fits the recipe


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("data.max_length=96", ("data.max_length", "128", "96")),
        ("data.supervise=all", ("data.supervise", "'assistant'", "'all'")),
        ("data.holdout=0.1", ("data.holdout", "0.3", "0.1")),
        ("data.max_rows=5", ("data.max_rows", "None", "5")),
        ("data.seed=3", ("data.seed", "0", "3")),
        ("data.template_kwargs={add_default_system: false}", ("data.template_kwargs", "None", "'add_default_system': False")),
        ("data.regenerate={engine: hf}", ("data.regenerate", "None", "max_new_tokens")),
        ("features.codec=bf16", ("features.codec", "'f32'", "'bf16'")),
        ("features.precision=bf16", ("features.precision", "'fp32'", "'bf16'")),
        ("target.dtype=bfloat16", ("target.dtype", "'float32'", "'bfloat16'")),
        ("data.prompts=[embedded:prompts]", ("data.prompts", "chats.jsonl", "embedded:prompts")),
    ],
)
def test_a_changed_setting_is_named(store_dir, recipe, data_prep, capsys, override, names):
    """B12: training and data_prep both stop, naming the field, both values and the command that mends it."""
    with pytest.raises(FeatureError) as e:
        FeatureStore.open(store_dir, recipe(override))
    assert all(name in str(e.value) for name in (*names, "--rebuild", "python -m data_prep"))
    manifest = (store_dir / "manifest.json").read_bytes()
    assert data_prep(override) == 1
    assert names[0] in capsys.readouterr().err
    assert (store_dir / "manifest.json").read_bytes() == manifest


def test_a_changed_template_is_named(store_dir, recipe, tmp_path):
    """B12: another chat template renders other rows."""
    (tmp_path / "other.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(FeatureError, match=r"data\.chat_template"):
        FeatureStore.open(store_dir, recipe(f"data.chat_template={tmp_path / 'other.jinja'}"))


def test_a_store_that_is_older_than_template_kwargs_opens(store_dir, recipe):
    """It was rendered without any, which is what a recipe without them asks for."""
    path = store_dir / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["fingerprints"]["data.template_kwargs"]
    path.write_text(json.dumps(manifest))
    FeatureStore.open(store_dir, recipe())
    with pytest.raises(FeatureError, match=r"data\.template_kwargs: built with None, the recipe says {'enable_thinking': False}"):
        FeatureStore.open(store_dir, recipe("data.template_kwargs.enable_thinking=false"))


def test_changed_data_is_named(store_dir, recipe, chats):
    """B12: the same file name with other rows in it."""
    chats.write_text(chats.read_text().replace("heron", "raven"))
    with pytest.raises(FeatureError, match=r"chats\.jsonl changed"):
        FeatureStore.open(store_dir, recipe())


def test_a_store_stands_without_its_sources(store_dir, recipe, chats):
    """Features carried to a training machine need no prompts there."""
    chats.unlink()
    assert len(FeatureStore.open(store_dir, recipe())) == 12


@pytest.mark.parametrize(("file", "key"), [("config.json", "target.path"), ("tokenizer_config.json", "data.chat_template")])
def test_a_changed_target_is_named(store_dir, recipe, tiny_target, tmp_path, file, key):
    """B12: the store belongs to these weights and this tokenizer; a copy of them elsewhere is the same target."""
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    assert len(FeatureStore.open(store_dir, recipe(f"target.path={copy}"))) == 12
    settings = json.loads((copy / file).read_text()) | {"rms_norm_eps": 0.5}
    (copy / file).write_text(json.dumps(settings))
    with pytest.raises(FeatureError, match=re.escape(key)):
        FeatureStore.open(store_dir, recipe(f"target.path={copy}"))


def test_layers_may_be_more_but_not_fewer(store_dir, recipe):
    """One store serves heads that read different layers; a layer that is missing is named with the remedy."""
    assert FeatureStore.open(store_dir, recipe("head.aux_layers=[2]", "head.draft_vocab_size=32")).read(0, [2]).hidden[2].shape[1] == 64
    with pytest.raises(FeatureError, match=r"\[1, 2, 3\].*\[0, 2, 4\].*features\.layers=\[0,1,2,3,4\]"):
        FeatureStore.open(store_dir, recipe("head.aux_layers=[0,2,4]"))
    with pytest.raises(FeatureError, match=r"layers \[4\] are read"):
        FeatureStore.open(store_dir, recipe()).read(0, [4])


def test_another_format_is_refused(store_dir, recipe):
    """B12: the code version is part of what a store depends on."""
    path = store_dir / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(FeatureError, match="format 0, this code reads 1"):
        FeatureStore.open(store_dir, recipe())


# ------------------------------------------------------------------------------------------------------ whole or refused


def test_no_store(tmp_path, recipe):
    with pytest.raises(FeatureError, match="no feature store in .*python -m data_prep"):
        FeatureStore.open(tmp_path / "nowhere", recipe())


def test_a_half_written_store_is_not_opened(store_dir, recipe):
    (store_dir / "manifest.json").rename(store_dir / UNFINISHED)
    with pytest.raises(FeatureError, match="half-written.*Finish it"):
        FeatureStore.open(store_dir, recipe())


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1, "layers": 3}'])
def test_a_broken_manifest_is_named(store_dir, recipe, text):
    (store_dir / "manifest.json").write_text(text)
    with pytest.raises(FeatureError, match=r"manifest\.json"):
        FeatureStore.open(store_dir, recipe())


SMALL_FILES = ["rows.safetensors", "token_counts.safetensors", "probe.safetensors"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [(file, damage) for file in ("shard-00001.safetensors", *SMALL_FILES) for damage in ("cut", "gone")]
    + [(f, "flipped") for f in SMALL_FILES],
)
def test_a_damaged_or_missing_file_is_named(store_dir, recipe, file, damage):
    path = store_dir / file
    raw = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(raw[:-7])
    elif damage == "flipped":
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(FeatureError, match=rf"{file} (has .* bytes|has checksum|is missing).*python -m data_prep"):
        FeatureStore.open(store_dir, recipe())


@pytest.mark.parametrize("tensor", ["hidden.2", "last_hidden"])
def test_a_damaged_row_is_named_and_the_others_are_read(store_dir, recipe, tensor):
    """A flipped bit in a shard of the right size is found when the row is read, and only where its bytes are used."""
    store = FeatureStore.open(store_dir, recipe())
    shard = store.manifest.shards[1]
    token = int(store.rows.row_offsets[shard.first_row + 1] - store.rows.row_offsets[shard.first_row])
    flip_byte(store_dir / shard.file, tensor, token)
    store = FeatureStore.open(store_dir, recipe())
    with pytest.raises(FeatureError, match=rf"{shard.file} has a wrong checksum in its row 1, {tensor}.*python -m data_prep"):
        store.read(shard.first_row + 1, [2])
    assert store.read(shard.first_row, [2]).last_hidden.isfinite().all()
    if tensor != "last_hidden":
        assert store.read(shard.first_row + 1, [1]).hidden[1].isfinite().all()


def test_a_shard_of_other_rows_is_refused(store_dir, recipe):
    """B16: stored ids are compared with the ids that are asked for."""
    manifest = Manifest.load(store_dir / "manifest.json")
    manifest.shards[0].file, manifest.shards[1].file = manifest.shards[1].file, manifest.shards[0].file
    manifest.shards[0].written, manifest.shards[1].written = manifest.shards[1].written, manifest.shards[0].written
    manifest.save(store_dir / "manifest.json")
    with pytest.raises(FeatureError, match="holds other tokens"):
        FeatureStore.open(store_dir, recipe()).read(0, [1])


# ----------------------------------------------------------------------------------------------------------- small parts


def test_mend_command_repeats_the_users_own_recipe(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train/eagle3.py", "recipes/a b.yaml", "train.max_steps=3", "--resume"])
    assert mend_command("--rebuild") == "python -m data_prep 'recipes/a b.yaml' train.max_steps=3 --rebuild"
    monkeypatch.setattr("sys.argv", ["pytest", "tests/x.py", "-k=a"])
    assert mend_command() == "python -m data_prep RECIPE"


def test_a_failed_write_leaves_the_former_file(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, lambda tmp: tmp.write_text("before"))

    def fail(tmp: Path) -> None:
        tmp.write_text("half")
        raise ValueError("cut")

    with pytest.raises(ValueError, match="cut"):
        write_atomically(path, fail)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]

"""`python -m data_prep`: it resumes, skips, repairs and stops cleanly, and always ends with the same bytes."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from data_prep import bench, extract, store
from data_prep.manifest import Manifest
from data_prep.rows import make_rows, split
from data_prep.store import FeatureStore
from heads.target import load_tokenizer
from recipes.errors import DataError, FeatureError


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors*"))}


@pytest.fixture
def whole(data_prep, tmp_path) -> dict[str, bytes]:
    """The files of an uninterrupted run, which is then removed from `store`."""
    assert data_prep() == 0
    (tmp_path / "store").rename(tmp_path / "uninterrupted")
    return contents(tmp_path / "uninterrupted")


@pytest.fixture
def forwards(monkeypatch) -> list[int]:
    """Rows of each forward pass of the target that extraction makes."""
    seen: list[int] = []
    original = extract.forward_batch
    monkeypatch.setattr(extract, "forward_batch", lambda model, rows, sink: (seen.append(len(rows)), original(model, rows, sink)))
    return seen


# ---------------------------------------------------------------------------------------------------------- plain running


def test_it_says_what_it_does(data_prep, capsys, tmp_path, recipe_file):
    """Rows kept and dropped by reason, supervised share, lengths; the size before extraction; where it went and what is next."""
    with (tmp_path / "chats.jsonl").open("a") as f:
        f.write('{"messages": []}\nnot json\n{"messages": [{"role": "user", "content": "a"}]}\n')
    assert data_prep("features.codec=bf16") == 0
    out = capsys.readouterr().out
    manifest = Manifest.load(tmp_path / "store/manifest.json")
    tokens = manifest.counts["tokens"]
    assert "rows kept      12" in out and "1 duplicates" in out
    assert "rows dropped   3 (" in out and manifest.dropped == {"empty": 1, "bad_json": 1, "no_assistant": 1}
    assert f"supervised {manifest.counts['supervised_tokens']:,} ({manifest.counts['supervised_tokens'] / tokens:.0%})" in out
    estimate = tokens * (64 * (3 * 2 + 4) + 5)
    assert f"{tokens:,} tokens × 64 × (3 layers in bf16 + last_hidden in float32) = {estimate / 1e9:.3g} GB" in out
    assert out.index("to write") < out.index("features  ")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "store").glob("shard-*"))
    assert estimate < on_disk < estimate + 5000 * len(manifest.shards)
    assert out.endswith(f"next           accelerate launch train/eagle3.py {recipe_file} features.codec=bf16\n")
    resolved = yaml.safe_load((tmp_path / "store/recipe.yaml").read_text())
    assert resolved["features"]["codec"] == "bf16" and resolved["head"]["aux_layers"] == [1, 2, 3]


def test_nothing_to_do(data_prep, capsys, tmp_path, forwards, monkeypatch):
    """A finished store is left alone, and no model is loaded to find that out."""
    assert data_prep() == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("*.safetensors")}
    forwards.clear()
    monkeypatch.setattr("heads.target.AutoModelForCausalLM.from_pretrained", lambda *a, **k: pytest.fail("the target was loaded"))
    assert data_prep("train.lr=0.5", "head.draft_vocab_size=32", "features.shard_tokens=77") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("*.safetensors")} == before and not forwards


def test_nothing_to_do_is_said_at_once(data_prep, recipe_file):
    """A rerun imports neither torch nor transformers: it answers in a second."""
    assert data_prep() == 0
    code = "import sys; from data_prep.__main__ import main; print(main(sys.argv[1:]), {'torch', 'transformers'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code, str(recipe_file)], capture_output=True, text=True, check=True)
    assert "nothing to do" in ran.stdout and ran.stdout.endswith("0 set()\n")


def test_user_errors_have_no_traceback(data_prep, capsys):
    assert data_prep("data.max_lenght=3") == 1
    err = capsys.readouterr().err
    assert "did you mean max_length" in err and "Traceback" not in err
    assert data_prep("data.prompts=[missing.jsonl]") == 1
    assert "missing.jsonl" in capsys.readouterr().err


def test_help_names_the_overrides(data_prep, capsys):
    with pytest.raises(SystemExit):
        data_prep("--help")
    assert "key=value" in capsys.readouterr().out


def test_rebuild_keeps_answers_and_foreign_files(data_prep, tmp_path, recipe):
    assert data_prep() == 0
    (tmp_path / "store/answers.jsonl").write_text("kept")
    assert data_prep("data.max_length=64", "features.shard_tokens=5000", "--rebuild") == 0
    assert (tmp_path / "store/answers.jsonl").read_text() == "kept"
    assert len(list((tmp_path / "store").glob("shard-*"))) == 1
    rebuilt = FeatureStore.open(tmp_path / "store", recipe("data.max_length=64"))
    assert rebuilt.lengths.max() <= 64


def test_one_builder_at_a_time(data_prep, tmp_path, capsys):
    (tmp_path / "store").mkdir()
    with (tmp_path / "store/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert data_prep() == 1
    assert "another data_prep process" in capsys.readouterr().err
    assert data_prep() == 0


@pytest.mark.parametrize("name", ["file", "file/below", "closed"])
def test_a_folder_that_cannot_be_written_to_is_one_line(data_prep, tmp_path, capsys, monkeypatch, name):
    (tmp_path / "file").write_text("no folder")
    if name == "closed":  # the tests may run as root, whom no mode keeps out

        def refuse(self, **how):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(Path, "mkdir", refuse)
    assert data_prep(f"features.dir={tmp_path / name}") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: features.dir: cannot write to {tmp_path / name}: ") and err.count("\n") == 1 and "Give a folder" in err


def test_template_kwargs_reach_answers_and_rows(data_prep, tmp_path, recipe):
    """From the recipe into the prompts that the target answers, into the rows, and into the record that a later run is compared with."""
    template = tmp_path / "greeting.jinja"
    template.write_text("{{ greeting }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    common = [f"data.chat_template={template}", "data.regenerate={engine: hf, max_new_tokens: 2}"]
    assert data_prep(*common, "data.template_kwargs.greeting=Hello!") == 0
    store = FeatureStore.open(tmp_path / "store", recipe(*common, "data.template_kwargs.greeting=Hello!"))
    assert all(store.tokens(row)[0][:6].tolist() == list(b"Hello!") for row in range(len(store)))
    assert json.loads((tmp_path / "store/answers.jsonl.settings.json").read_text())["template_kwargs"] == {"greeting": "Hello!"}
    with pytest.raises(FeatureError, match=r"data\.template_kwargs: built with {'greeting': 'Hello!'}, the recipe says {'greeting': 'Hi'}"):
        FeatureStore.open(tmp_path / "store", recipe(*common, "data.template_kwargs.greeting=Hi"))


def test_answers_by_the_target_become_rows(data_prep, tmp_path, recipe, chats):
    """data.regenerate: the answers in the file are replaced by the target's own greedy ones, and marked so."""
    regenerate = "data.regenerate={engine: hf, temperature: 0.0, max_new_tokens: 6, concurrency: 4}"
    assert data_prep(regenerate) == 0
    opened = FeatureStore.open(tmp_path / "store", recipe(regenerate))
    assert opened.greedy.all()
    answers = tmp_path / "store/answers.jsonl"
    answers.write_text(answers.read_text().replace('"temperature": 0.0', '"temperature": 1.0', 1))
    with pytest.raises(FeatureError, match=r"answers\.jsonl changed"):
        FeatureStore.open(tmp_path / "store", recipe(regenerate))


# ------------------------------------------------------------------------------------------------- interrupted, and again


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_shard_and_a_rerun_resumes(data_prep, whole, tmp_path, monkeypatch, capsys, recipe, forwards, signum):
    """The store that was stopped and finished later equals an uninterrupted one, byte for byte; nothing is computed twice."""
    handler = signal.getsignal(signum)
    original, calls = extract.extract_rows, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signum)
        return original(*args, **kwargs)

    monkeypatch.setattr(extract, "extract_rows", interrupted)
    assert data_prep() == 128 + signum
    err = capsys.readouterr().err
    assert "stopping after this shard" in err and "to go on" in err
    folder = tmp_path / "store"
    assert sorted(p.name for p in folder.glob("shard-*")) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    with pytest.raises(FeatureError, match="half-written \\(2 of"):
        FeatureStore.open(folder, recipe())
    done = sum(forwards)
    assert data_prep("features.shard_tokens=9999") == 0  # the plan of the store holds
    assert "2 are finished" in capsys.readouterr().out
    assert contents(folder) == whole
    assert sum(forwards) == 12 and done < 12
    assert signal.getsignal(signum) is handler  # the caller's own is back


def test_a_second_interrupt_stops_at_once(data_prep, whole, tmp_path, monkeypatch):
    original, calls, later = extract.forward_batch, [], []

    def twice(*args):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            later.append(1)
        return original(*args)

    monkeypatch.setattr(extract, "forward_batch", twice)
    assert data_prep() == 130
    assert len(calls) == 5 and not later
    finished = contents(tmp_path / "store")
    assert not any(name.endswith(".tmp") for name in finished)
    assert all(whole[name] == raw for name, raw in finished.items())
    assert data_prep() == 0
    assert contents(tmp_path / "store") == whole


def test_a_killed_process_loses_nothing_finished(data_prep, whole, tmp_path, recipe, monkeypatch, forwards):
    """SIGKILL in the middle of a write: the half-written file is not taken for a shard, and the finished ones are not redone."""
    child = os.fork()
    if child == 0:
        original, shards = store.save_file, []

        def killed(tensors, path):
            if "hidden.1" in tensors and shards.append(1) is None and len(shards) == 3:
                Path(path).write_bytes(b"half a shard")
                os.kill(os.getpid(), signal.SIGKILL)
            original(tensors, path)

        monkeypatch.setattr(store, "save_file", killed)
        data_prep()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    folder = tmp_path / "store"
    assert (folder / "shard-00002.safetensors.tmp").exists() and not (folder / "manifest.json").exists()
    with pytest.raises(FeatureError, match="half-written"):
        FeatureStore.open(folder, recipe())
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.safetensors")}
    assert finished
    assert data_prep() == 0
    assert contents(folder) == whole
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_loses_nothing_finished(data_prep, whole, tmp_path, monkeypatch, capsys, error):
    original, shards = store.save_file, []

    def full(tensors, path):
        if "hidden.1" in tensors and shards.append(1) is None and len(shards) == 3:
            Path(path).write_bytes(b"as much as fitted")
            raise error
        original(tensors, path)

    monkeypatch.setattr(store, "save_file", full)
    assert data_prep() == 1
    err = capsys.readouterr().err
    assert "the disk is full" in err and "shard-00002.safetensors" in err and "python -m data_prep" in err
    folder = tmp_path / "store"
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*")}
    assert sorted(path.name for path in finished) == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert data_prep() == 0
    assert contents(folder) == whole
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())


def test_a_disk_that_is_too_small_is_refused_before_the_work(data_prep, monkeypatch, capsys, forwards):
    monkeypatch.setattr("data_prep.build.shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert data_prep() == 1
    assert "1e-06 GB are free" in capsys.readouterr().err and not forwards


def test_a_damaged_shard_of_a_half_written_store_is_redone(data_prep, whole, tmp_path, monkeypatch, capsys):
    """A resumed run verifies checksums, not only sizes."""
    monkeypatch.setattr(extract, "write_shard", _fails_after(2, extract.write_shard))
    with pytest.raises(RuntimeError):
        data_prep()
    monkeypatch.undo()
    shard = tmp_path / "store/shard-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 255
    shard.write_bytes(raw)
    assert data_prep() == 0
    assert "shard-00001.safetensors has checksum" in capsys.readouterr().out
    assert contents(tmp_path / "store") == whole


def _fails_after(count, original):
    calls = []

    def write(*args):
        if len(calls) == count:
            raise RuntimeError("unplugged")
        calls.append(1)
        return original(*args)

    return write


@pytest.mark.parametrize("name", ["shard-00001.safetensors", "rows.safetensors", "token_counts.safetensors", "probe.safetensors"])
def test_a_lost_file_of_a_finished_store_is_made_again(data_prep, tmp_path, capsys, forwards, name):
    """The remedy that training prints: remove the file, run data_prep again; only that file is made."""
    assert data_prep() == 0
    before = contents(tmp_path / "store")
    (tmp_path / "store" / name).unlink()
    forwards.clear()
    assert data_prep() == 0
    assert f"{name} is missing" in capsys.readouterr().out
    assert contents(tmp_path / "store") == before
    shard = Manifest.load(tmp_path / "store/manifest.json").shards[1]
    assert sum(forwards) == (shard.num_rows if name == shard.file else 0)


def test_lost_rows_that_cannot_be_made_again_stop(data_prep, tmp_path, capsys, chats):
    """Shards are never paired with rows that they do not belong to."""
    assert data_prep() == 0
    path = tmp_path / "store/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["rows_crc32"] ^= 1
    path.write_text(json.dumps(manifest))
    (tmp_path / "store/rows.safetensors").unlink()
    assert data_prep() == 1
    assert "other rows" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- online


def test_online_stores_tokens_only_and_states_can_follow(data_prep, tmp_path, recipe, forwards, whole):
    """train.features: online stores nothing of the target; the same rows get states once the recipe asks for them."""
    forwards.clear()
    assert data_prep("train.features=online") == 0
    folder = tmp_path / "store"
    assert not list(folder.glob("shard-*")) and not forwards
    opened = FeatureStore.open(folder, recipe("train.features=online", "features.codec=bf16"))
    assert opened.manifest.features == "none" and len(opened) == 12
    assert opened.token_counts.sum() > 0 and len(opened.probe["argmax"]) == opened.lengths[0]
    with pytest.raises(FeatureError, match="tokens only"):
        opened.read(0, [1])
    with pytest.raises(FeatureError, match=r"tokens only.*python -m data_prep"):
        FeatureStore.open(folder, recipe())
    assert data_prep() == 0
    assert contents(folder) == whole
    assert data_prep("train.features=online") == 0  # more than enough


def test_online_does_not_declare_half_the_states_whole(data_prep, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extract, "write_shard", _fails_after(1, extract.write_shard))
    with pytest.raises(RuntimeError):
        data_prep()
    assert data_prep("train.features=online") == 1
    assert "train.features=stored" in capsys.readouterr().err
    assert not (tmp_path / "store/manifest.json").exists()


# ------------------------------------------------------------------------------------------------------- rows and layers


def test_layers_must_cover_what_the_head_reads(data_prep, capsys):
    assert data_prep("features.layers=[1,3]") == 1
    err = capsys.readouterr().err
    assert "features.layers: [1, 3] lacks [2]" in err


def test_every_layer_can_be_stored(data_prep, tmp_path, recipe):
    """B17: 0 is the embedding, L the stream before the final norm."""
    assert data_prep("features.layers=[4,0,1,2,3]") == 0
    got = FeatureStore.open(tmp_path / "store", recipe("features.layers=[0,1,2,3,4]")).read(3, [0, 4])
    model = extract.load_extraction_model(recipe().target)
    with torch.no_grad():
        torch.testing.assert_close(got.hidden[0], model.model.embed_tokens(got.input_ids))
        torch.testing.assert_close(model.model.norm(got.hidden[4]), got.last_hidden)
    assert not torch.allclose(got.hidden[4], got.last_hidden)


def test_bf16_products(data_prep, tmp_path, recipe):
    """`features.precision: bf16`: states in float32 and close to the exact ones, and recorded as such."""
    assert data_prep("features.precision=bf16") == 0
    store = FeatureStore.open(tmp_path / "store", recipe("features.precision=bf16"))
    assert store.manifest.dtypes == {"hidden": "f32", "last_hidden": "float32", "products": "bfloat16"}
    got = store.read(3, [1, 2, 3])
    exact = online_rows(recipe(), got)
    for ours, theirs in ((got.hidden[2], exact.hidden[2]), (got.last_hidden, exact.last_hidden)):
        assert ours.dtype == torch.float32 and not torch.equal(ours, theirs)
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def online_rows(recipe, row):
    """The same row through the target in float32."""
    model = extract.load_extraction_model(recipe.target)
    return extract.online_features(model, [row.input_ids], [row.loss_mask], [1, 2, 3], 1000)[0]


def test_more_layers_than_stored_need_a_rebuild(data_prep, capsys):
    assert data_prep() == 0
    assert data_prep("features.layers=[0,1,2,3]") == 1
    assert "features.layers=[0,1,2,3]" in capsys.readouterr().err


def test_tokenizer_and_vocabulary_must_match(data_prep, monkeypatch, capsys):
    monkeypatch.setattr("transformers.LlamaConfig.get_text_config", lambda self, **k: _smaller(self))
    assert data_prep() == 1
    assert "vocab_size=99" in capsys.readouterr().err


def _smaller(config):
    config.vocab_size = 99
    return config


def test_nothing_left_says_why(recipe, chats):
    """B03: all rows dropped is an error with the reasons."""
    chats.write_text(
        '{"messages": [{"role": "user", "content": "' + "far too long " * 20 + '"}, {"role": "assistant", "content": "ok"}]}\n'
    )
    with pytest.raises(DataError, match="no_loss_tokens"):
        make_rows([str(chats)], recipe("data.max_length=32").data, load_tokenizer(recipe().target))


def test_both_sides_of_a_small_split_have_rows():
    assert split(["a", "a"], 0.5, 0) in ([True, True], [False, False])
    assert sorted(set(split(["a", "b", "a"], 0.001, 0))) == [False, True]
    assert sorted(set(split(["a", "b", "a"], 0.999, 0))) == [False, True]
    assert split(["a", "b"], 0.0, 0) == [False, False]


# ----------------------------------------------------------------------------------------------------------------- bench


def test_bench_measures_both_and_leaves_nothing(data_prep, recipe, tmp_path):
    assert data_prep() == 0
    before = sorted((tmp_path / "store").iterdir())
    bare, extraction = bench.bench(recipe(), window_tokens=400, rounds=3)
    offsets = FeatureStore.open(tmp_path / "store", recipe()).rows.row_offsets
    first = int((offsets >= 400).nonzero()[0])  # the window ends with the row that fills it
    assert extraction.tokens == 2 * int(offsets[first]) + int(
        offsets[-1] - offsets[first]
    )  # two windows are all rows; then the first again
    assert bare.tokens >= extraction.tokens and min(bare.wall_s, extraction.wall_s) > 0
    assert sorted((tmp_path / "store").iterdir()) == before


def test_bench_needs_rows(recipe_file, capsys):
    assert bench.main([str(recipe_file)]) == 1
    assert "rows.safetensors is missing" in capsys.readouterr().err

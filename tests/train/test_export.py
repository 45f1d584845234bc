"""From a checkpoint to the served folder: whole, the same, and clear about what is missing."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.__main__ import main as data_prep
from data_prep.store import FeatureStore
from heads.exported import load_exported_head
from heads.target import read_target
from recipes.errors import ExportError, RecipeError
from recipes.schema import load_recipe
from train import export
from train.eagle3 import Eagle3Objective
from train.loop import fit
from train.start import open_source

DEBUG = str(Path(__file__).parents[2] / "recipes/debug/eagle3.yaml")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run of the debug recipe: (recipe, folder)."""
    out = tmp_path_factory.mktemp("trained")
    overrides = [f"features.dir={out}/features", f"train.dir={out}/run", f"export.dir={out}/export"]
    assert data_prep([DEBUG, *overrides]) == 0
    recipe = load_recipe(DEBUG, [*overrides, "train.max_steps=2", "train.save_every=1", "train.trackers=[tensorboard]"])
    fit(recipe, Eagle3Objective)
    return recipe, out


def test_any_checkpoint_can_be_exported(trained, tmp_path):
    recipe, out = trained
    export.main([str(recipe.run_dir), "--step", "1", "--output", str(tmp_path / "early")])
    early, last = load_file(tmp_path / "early/model.safetensors"), load_file(recipe.export_dir / "model.safetensors")
    assert early.keys() == last.keys() and not torch.equal(early["fc.weight"], last["fc.weight"])
    export.main([str(recipe.run_dir), "--output", str(tmp_path / "again")])
    again = load_file(tmp_path / "again/model.safetensors")
    assert all(torch.equal(again[name], last[name]) for name in last)


def test_a_checkpoint_of_an_online_run(trained, tmp_path):
    """train.features: online leaves no states on disk: the target runs once more for the comparison."""
    _, out = trained
    (tmp_path / "features").mkdir()
    for file in (out / "features").glob("answers.jsonl*"):
        shutil.copy(file, tmp_path / "features")
    overrides = [f"features.dir={tmp_path}/features", f"train.dir={tmp_path}/run", f"export.dir={tmp_path}/export", "train.features=online"]
    assert data_prep([DEBUG, *overrides]) == 0
    recipe = load_recipe(DEBUG, [*overrides, "train.max_steps=1"])
    fit(recipe, Eagle3Objective)
    export.main([str(recipe.run_dir), "--output", str(tmp_path / "again")])
    last, again = (load_file(folder / "model.safetensors") for folder in (recipe.export_dir, tmp_path / "again"))
    assert all(torch.equal(again[name], last[name]) for name in last)


def test_rows_of_the_lm_head_keep_their_meaning(trained, tmp_path, monkeypatch):
    """B13: other counts in the store choose other draft ids: a resume stops, an export has those that were trained."""
    recipe, _ = trained

    def of(steps):
        train = recipe.train.model_copy(update={"dir": str(tmp_path / "run"), "max_steps": steps, "trackers": []})
        own = recipe.export.model_copy(update={"dir": str(tmp_path / "export")})
        return recipe.model_copy(update={"train": train, "export": own})

    fit(of(1), Eagle3Objective)
    trained_ids = load_file(tmp_path / "run/draft_vocab.safetensors")["ids"]
    counts = (~torch.isin(torch.arange(260), trained_ids)).long()
    monkeypatch.setattr(FeatureStore, "token_counts", property(lambda _: counts))
    with pytest.raises(RecipeError, match=r"vocabulary of 128 tokens, .* replace 128: .*folder of its own \(train\.dir=runs/NAME\)"):
        fit(of(2), Eagle3Objective)
    export.main([str(tmp_path / "run"), "--output", str(tmp_path / "again")])
    before, again = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "again"))
    assert all(torch.equal(again[name], before[name]) for name in before) and "d2t" in before
    (tmp_path / "run/draft_vocab.safetensors").unlink()  # a run of an earlier version
    fit(of(2), Eagle3Objective)


def test_the_folder_says_what_it_is(trained):
    """B27, B31: recipe, target, layers and trained length stand beside the weights; nothing has to be guessed."""
    recipe, _ = trained
    meta, config = (json.loads((recipe.export_dir / name).read_text()) for name in ("headstart.json", "config.json"))
    assert meta["layers"] == config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert meta["trained_max_length"] == 256 and config["max_position_embeddings"] == 512
    assert meta["speculative_config"] == {"method": "eagle3"} and meta["training"]["step"] == 2
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size", "head_dim", "rope_parameters"):
        assert key in config
    assert "vllm serve" in (recipe.export_dir / "README.md").read_text()


def test_trackers_are_fed(trained):
    recipe, _ = trained
    assert list(recipe.run_dir.rglob("events.out.tfevents.*"))


def test_wandb_offline(trained, tmp_path, monkeypatch):
    """A tracker by name, with no network: the run lies on disk, to be sent later."""
    recipe, _ = trained
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    changes = {"dir": str(tmp_path / "run"), "max_steps": 1, "trackers": ["wandb"]}
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
    fit(recipe.model_copy(update={"export": recipe.export.model_copy(update={"dir": str(tmp_path / "export")})}), Eagle3Objective)
    (file,) = tmp_path.rglob("*.wandb")
    assert file.parent.name.startswith("offline-run-") and file.stat().st_size > 0
    assert (tmp_path / "run/metrics.jsonl").is_file()  # always written


def test_another_target_is_refused(trained, tmp_path):
    """A head for another target: fingerprint or width."""
    recipe, _ = trained
    target = read_target(recipe.target)
    meta = json.loads((recipe.export_dir / "headstart.json").read_text())
    for key, value, message in (("fingerprint", "other", "fingerprint other"), ("hidden_size", 32, "width 32")):
        folder = tmp_path / key
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_bytes((recipe.export_dir / name).read_bytes())
        (folder / "headstart.json").write_text(json.dumps(meta | {"target": meta["target"] | {key: value}}))
        with pytest.raises(ExportError, match=message):
            load_exported_head(folder, target)


def test_a_checkpoint_without_weights_is_one_line(trained, tmp_path, capsys):
    """As DeepSpeed leaves one: pieces of its own, and no model.safetensors."""
    recipe, _ = trained
    shutil.copytree(recipe.run_dir, tmp_path / "run")
    (tmp_path / "run/step_000002/model.safetensors").unlink()
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / "run"), "--output", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert "step_000002 holds no model.safetensors" in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_rounding_is_no_fault(trained, tmp_path):
    """An untrained head is full of near ties: written in bfloat16 it drafts what the trained head, rounded alike, drafts."""
    recipe, _ = trained
    target, source = read_target(recipe.target), open_source(recipe)
    half = recipe.model_copy(update={"target": recipe.target.model_copy(update={"dtype": "bfloat16"})})
    head = load_exported_head(recipe.export_dir, target)[0]
    for p in head.parameters():
        p.data.add_(1e-3 * torch.randn(p.shape))
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    folder = export.export_head(half, head, target, source, {}, tmp_path / "half")
    written = load_exported_head(folder, target)[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
    with export.rounded_as(head, written, torch.bfloat16):
        assert all(torch.equal(p, q.float()) for p, q in zip(head.parameters(), written.parameters(), strict=True))
        assert export.compare(head, written, source, recipe.head.feature_layers(target.num_layers), rows=12) == 1.0
    assert export.compare(head, written, source, recipe.head.feature_layers(target.num_layers), rows=12) < 1.0


def test_an_export_that_drafts_otherwise_is_not_called_done(trained, tmp_path, monkeypatch):
    """The export is compared with the trained head through the served names."""
    recipe, _ = trained

    def spoilt(tensors, file, metadata=None):
        save_file(tensors | {"fc.weight": -tensors["fc.weight"]}, file, metadata=metadata)

    monkeypatch.setattr(export, "save_file", spoilt)
    with pytest.raises(SystemExit):
        export.main([str(recipe.run_dir), "--output", str(tmp_path / "bad")])
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "holds no recipe.yaml"),
        (["RUN", "--step", "77"], "no checkpoint .*step_000077.* there are: step_000001, step_000002"),
        ([], "give a run folder"),
        (["--from", "x"], "--from needs --recipe"),
        (["--from", "x", "--recipe", DEBUG, "head.unrol_steps=1"], "did you mean unroll_steps"),
    ],
)
def test_errors_are_one_line(trained, arguments, message, capsys):
    recipe, _ = trained
    with pytest.raises(SystemExit) as stopped:
        export.main([str(recipe.run_dir) if a == "RUN" else a for a in arguments])
    assert stopped.value.code == 2

    assert re.search(message, capsys.readouterr().err)

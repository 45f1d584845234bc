"""Exports that hold the whole target: the head's tensors in place, every other byte as it was, the target's own logits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.embedded import resolve_target
from heads.exported import load_exported_head, read_tensors
from heads.mtp import MtpHead
from heads.mtp_native import MtpNativeHead
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError
from recipes.head_blocks import MtpNativeHead as NativeBlock
from recipes.schema import Target, load_recipe
from tests.heads.native_targets import CONFIGS, H, make_target, mtp_shapes
from tests.train.stored import stored_row
from train.export import export_head
from train.inside_target import check_nothing_else_changed, prove_same_logits, write_inside_target
from train.mtp import MtpObjective

FULL = DraftVocab(torch.arange(50), 50)


def recipe_for(path, method, dtype="float32", **head):
    text = [f"target.path={path}", f"target.dtype={dtype}", f"method={method}", "head={}", "objective={}", "eval.max_prompts=1"]
    return load_recipe("recipes/debug/mtp.yaml", text + [f"head.{key}={value}" for key, value in head.items()])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_step_and_back_into_the_targets_files(tmp_path, packed_batch, family, sharded):
    """Train a native MTP layer for a step, export, read back: its tensors differ, all others are the same bytes, no key is new."""
    folder = make_target(family, tmp_path / "target", dtype=torch.bfloat16, sharded=sharded)
    (folder / "tokenizer.json").write_text("{}")
    recipe = recipe_for(folder, "mtp_native", "bfloat16", unroll_steps=2)
    target = read_target(recipe.target)
    head = MtpNativeHead(recipe.head, target, FULL)
    objective = MtpObjective(head, target, recipe.objective)
    before = objective(packed_batch((4, 12), width=H))
    before.loss_sum.backward()
    torch.optim.SGD([p for p in objective.parameters() if p.grad is not None], lr=0.5).step()
    export = export_head(recipe, head, target, stored_row(folder, 50), {}, tmp_path / "export")

    old, new = read_tensors(folder), read_tensors(export)
    mine = mtp_shapes(family).keys()
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name].view(-1).view(torch.uint8), new[name].view(-1).view(torch.uint8))}
    assert changed and changed <= mine and all(old[name].dtype == new[name].dtype for name in old)
    assert len(changed) > len(mine) // 2
    assert not any(name.endswith("e_score_correction_bias") for name in changed)  # float32 among bfloat16; no loss trains it
    assert json.loads((export / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (export / "tokenizer.json").read_text() == "{}"
    if sharded:
        assert (export / "model-00001-of-00003.safetensors").samefile(folder / "model-00001-of-00003.safetensors")
        assert json.loads((export / "model.safetensors.index.json").read_text()) == json.loads(
            (folder / "model.safetensors.index.json").read_text()
        )
    again, _ = load_exported_head(export, target)
    assert all(torch.equal(tensor, new[name].float()) for name, tensor in again.served_tensors().items())


def test_target_rewritten_as_mimo(tmp_path):
    """VLLM_FORMATS §6a: a Llama target as MiMo gives its own logits on stored features; the head drafts the same from it."""
    tiny = resolve_target("tiny:llama-2-heads", root=tmp_path)
    recipe = recipe_for(tiny, "mtp", layout="mimo", unroll_steps=2)
    target = read_target(recipe.target)
    head = MtpHead(recipe.head, target, DraftVocab(torch.arange(260), 260))
    source = stored_row(tiny, 260)
    export = export_head(recipe, head, target, source, {}, tmp_path / "export")
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_hidden_layers"] == 4 and config["num_nextn_predict_layers"] == 1
    old, new = read_tensors(tiny), read_tensors(export)
    assert all(torch.equal(old[name], new[name]) for name in old)
    added = new.keys() - old.keys()
    assert sum(".bias" in name and "mtp" not in name for name in added) == 12 and sum("mtp_layers.0" in name for name in added) == 16
    assert (export / "tokenizer_config.json").is_file()
    again, _ = load_exported_head(export, target)
    assert torch.equal(again.stack[0].input_proj.weight, head.stack[0].input_proj.weight)

    # The proof sees a config that says something else of the target's layers.
    (export / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}))
    with pytest.raises(ExportError, match="config.json does not describe the target's layers"):
        prove_same_logits(export, source, torch.float32)
    # And the rewritten target is itself a target whose own MTP layer can be read.
    (export / "config.json").write_text(json.dumps(config))
    native = MtpNativeHead(NativeBlock(), read_target(Target(path=str(export), dtype="float32")), DraftVocab(torch.arange(260), 260))
    assert torch.equal(native.projection.weight, head.stack[0].input_proj.weight)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_index_is_kept_and_none_is_made_up(tmp_path, sharded):
    """Several weight files without an index, and a single one with: tensors that the target lacks are found in both."""
    target, folder, name = make_target("mimo", tmp_path / "target", sharded=sharded), tmp_path / "export", "model.safetensors.index.json"
    folder.mkdir()
    index = {"metadata": {"total_size": 8}, "weight_map": dict.fromkeys(read_tensors(target), "model.safetensors")}
    if sharded:
        (target / name).unlink()
    else:
        (target / name).write_text(json.dumps(index))
    write_inside_target(target, folder, {"new.weight": torch.ones(3)}, json.loads((target / "config.json").read_text()))
    assert torch.equal(read_tensors(folder)["new.weight"], torch.ones(3))
    if sharded:
        assert not (folder / name).exists()
    else:
        index["weight_map"]["new.weight"] = "model.safetensors"
        assert json.loads((folder / name).read_text()) == {"metadata": {"total_size": 20}, "weight_map": index["weight_map"]}


@pytest.mark.parametrize("sharded", [False, True])
def test_changes_are_found(tmp_path, sharded):
    """The check names a tensor of other bytes, a missing one and a new one; a wrong shape is refused at writing."""
    target = make_target("mimo", tmp_path / "target", sharded=sharded)
    name = next(iter(mtp_shapes("mimo")))
    folder = tmp_path / "export"
    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    assert not write_inside_target(target, folder, {name: torch.ones(H)}, config)
    check_nothing_else_changed(target, folder, {name})
    with pytest.raises(ExportError, match=f"changed {name}"):
        check_nothing_else_changed(target, folder, set())
    file = folder / ("model-00001-of-00003.safetensors" if sharded else "model.safetensors")
    tensors = load_file(file)
    lost, *_, touched = [key for key in tensors if "mtp" not in key]
    tensors[touched] = tensors[touched] + 1
    del tensors[lost]
    file.unlink()  # a linked shard is the target's own file
    save_file(tensors | {"extra": torch.zeros(1)}, file)
    with pytest.raises(ExportError, match=rf"(?s)missing {lost}.*unexpected extra.*changed {touched}"):
        check_nothing_else_changed(target, folder, {name})
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(ExportError, match=r"\(3,\) cannot replace one of \(64,\)"):
        write_inside_target(target, again, {name: torch.ones(3)}, config)

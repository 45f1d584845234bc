"""`python -m train.export --from`: published drafts become our exports, and a start for fine-tuning."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads import LAST_HIDDEN, head_class
from heads.exported import load_exported_head
from heads.pard import PROJECTION_FILES
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError, TargetError
from recipes.schema import load_recipe
from train.convert import convert
from train.export import load_export_into, main

GREEDY = lambda logits: logits.argmax(-1)  # noqa: E731


def trained(recipe_name, tiny_target, *overrides):
    """Recipe, target, and a head with random weights."""
    recipe = load_recipe(f"recipes/debug/{recipe_name}.yaml", [f"target.path={tiny_target}", *overrides])
    target = read_target(recipe.target)
    size = getattr(recipe.head, "draft_vocab_size", None) or target.vocab_size
    head = head_class(recipe.method)(recipe.head, target, DraftVocab(torch.arange(size) * (target.vocab_size // size), target.vocab_size))
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return recipe, target, head.eval()


def published_eagle(head, folder, rename=lambda name: name, **config):
    """pytorch_model.bin and the config.json of an EAGLE draft as its authors write it."""
    folder.mkdir()
    torch.save({rename(name): tensor.clone() for name, tensor in head.served_tensors().items()}, folder / "pytorch_model.bin")
    ours = head.served_config()
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size")
    theirs = {key: ours[key] for key in keys} | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(theirs | config))


def same_drafts(head, folder, target, layers=()):
    other, recipe = load_exported_head(folder, target)
    hidden = {layer: torch.randn(7, 64) for layer in (*layers, LAST_HIDDEN)}
    ids = torch.randint(260, (7,))
    ours, theirs = (h.propose(hidden, ids, torch.arange(7), h.new_cache(), 3, GREEDY) for h in (head, other))
    assert torch.equal(ours, theirs)
    return recipe


def test_eagle1(tiny_target, tmp_path):
    """METHODS §14: the embedding of the target in the file is left out, the rest is taken by its names."""
    recipe, target, head = trained("eagle1", tiny_target)
    published_eagle(head, tmp_path / "published")
    tensors = torch.load(tmp_path / "published" / "pytorch_model.bin", weights_only=True) | {"embed_tokens.weight": target.embed_tokens}
    torch.save(tensors, tmp_path / "published" / "pytorch_model.bin")
    folder = convert(tmp_path / "published", recipe, tmp_path / "export")
    same_drafts(head, folder, target)
    fresh = head_class("eagle1")(recipe.head, target, head.vocab)
    load_export_into(fresh, folder)
    assert torch.equal(fresh.fc.weight, head.fc.weight)


def test_eagle3_midlayer(tiny_target, tmp_path):
    """METHODS §14: `midlayer.`, d2t and t2d."""
    recipe, target, head = trained("eagle3", tiny_target)
    published_eagle(head, tmp_path / "published", lambda name: name.replace("layers.0.", "midlayer."), draft_vocab_size=128)
    same_drafts(head, convert(tmp_path / "published", recipe, tmp_path / "export"), target, head.aux_layers)


def test_the_drafts_own_rope_is_kept(tiny_target, tmp_path):
    """METHODS §15.16: honour what training used, not what the target has."""
    theta = {"rope_type": "default", "rope_theta": 777.0}
    recipe, target, head = trained("eagle1", tiny_target, "head.rope={rope_type: default, rope_theta: 777.0}")
    assert recipe.head.rope == theta
    published_eagle(head, tmp_path / "published", rope_theta=777.0)
    plain = load_recipe("recipes/debug/eagle1.yaml", [f"target.path={tiny_target}"])
    read_back = same_drafts(head, convert(tmp_path / "published", plain, tmp_path / "export"), target)
    assert read_back.head.rope["rope_theta"] == 777.0
    assert json.loads((tmp_path / "export" / "config.json").read_text())["rope_parameters"]["rope_theta"] == 777.0


@pytest.mark.parametrize("legacy", [False, True])
def test_medusa(tiny_target, tmp_path, legacy):
    """METHODS §14, §15.18: medusa_lm_head.pt; the head count of config.json is wrong in published files and not read."""
    recipe, target, head = trained("medusa", tiny_target, "head.num_heads=3", "eval.k=[3]")
    if legacy:
        with torch.no_grad():
            for lm_head in head.lm_heads:
                lm_head.weight.copy_(target.lm_head)
    names = {f"{i}.0.linear.{kind}": f"blocks.{i}.layers.0.{kind}" for i in range(3) for kind in ("weight", "bias")}
    names |= {} if legacy else {f"{i}.1.weight": f"lm_heads.{i}.weight" for i in range(3)}
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save({theirs: head.served_tensors()[ours].clone() for theirs, ours in names.items()}, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    same_drafts(head, convert(folder, recipe, tmp_path / "export"), target)


def test_peagle(tiny_target, tmp_path):
    """VLLM_FORMATS §5: EAGLE-3's layout, `mask_hidden` in any shape, and the mask token under its own key."""
    recipe, target, head = trained("peagle", tiny_target)
    published_eagle(
        head, tmp_path / "published", lambda name: name.replace("layers.0.", "midlayer."), ptd_token_id=254, draft_vocab_size=128
    )
    file = tmp_path / "published" / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    torch.save(tensors | {"mask_hidden": tensors["mask_hidden"].view(3, -1)}, file)
    folder = convert(tmp_path / "published", recipe, tmp_path / "export")
    same_drafts(head, folder, target, head.aux_layers)
    assert json.loads((folder / "config.json").read_text())["ptd_token_id"] == 254


def published_dflash(head, folder, **config):
    """A DFlash draft as z-lab writes it: Qwen3's fields, layer outputs counted from 0, and the target's embedding in the file."""
    extra = {"embed_tokens.weight": head.embed_tokens}
    ours = head.served_config()
    settings = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    settings |= {
        "block_size": 5,
        "num_target_layers": 4,
        "rope_scaling": None,
        "dflash_config": {"mask_token_id": 254, "target_layer_ids": [0, 1, 2]},
    }
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size")
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in (head.served_tensors() | extra).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({key: ours[key] for key in keys} | {"rope_theta": 777.0} | settings | config))
    return folder


@pytest.mark.parametrize("draft_vocab", [260, 128])
def test_dflash(tiny_target, tmp_path, draft_vocab):
    """VLLM_FORMATS §7, METHODS §15.16: no LM head or the target's rows of a draft vocabulary; the draft's own rope is kept."""
    sizes = [] if draft_vocab == 260 else [f"head.draft_vocab_size={draft_vocab}"]
    recipe, target, head = trained("dflash", tiny_target, "head.rope={rope_type: default, rope_theta: 777.0}", *sizes)
    published = published_dflash(head, tmp_path / "published", draft_vocab_size=draft_vocab)
    assert ("lm_head.weight" in load_file(published / "model.safetensors")) == (draft_vocab < 260)
    plain = load_recipe("recipes/debug/dflash.yaml", [f"target.path={tiny_target}", *sizes])
    folder = convert(published, plain, tmp_path / "export")
    assert same_drafts(head, folder, target, head.aux_layers).head.rope["rope_theta"] == 777.0
    config = json.loads((folder / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 254, "target_layer_ids": [0, 1, 2], "causal": False}
    (published / "mask_embedding.pt").touch()
    with pytest.raises(ExportError, match="mask embedding of its own"):
        convert(published, plain, tmp_path / "again")


def published_model(head, folder):
    """A causal LM with its tokenizer; PARD-2's projection in a pickle beside it, as its authors write it."""
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in head.served_tensors().items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.served_config()))
    head.save_extra(folder)
    ours, theirs = (folder / name for name in PROJECTION_FILES)
    if ours.is_file():
        torch.save(load_file(ours), theirs)
        ours.unlink()
    return folder


def test_pard2(tiny_target, tmp_path):
    """METHODS §14: the projection lies beside the weights, in a file of its own, and comes along."""
    recipe, target, head = trained("pard", tiny_target, "head.aux_layers=[1,3]", "objective.feature_drop=0.2")
    folder = convert(published_model(head, tmp_path / "published"), recipe, tmp_path / "export")
    same_drafts(head, folder, target)
    again, _ = load_exported_head(folder, target)
    assert torch.equal(again.target_proj.weight, head.target_proj.weight)
    (tmp_path / "published" / PROJECTION_FILES[1]).unlink()
    with pytest.raises(ExportError, match="without its projection"):
        convert(tmp_path / "published", recipe, tmp_path / "again")


def test_pard(tiny_target, tmp_path):
    """VLLM_FORMATS §4: an ordinary model with `pard_token`; the buffers that old checkpoints hold are left out."""
    _, target, head = trained("pard", tiny_target, "head.num_layers=3")
    published = published_model(head, tmp_path / "published")
    tensors, config = load_file(published / "model.safetensors"), json.loads((published / "config.json").read_text())
    assert config["pard_token"] == 254
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, published / "model.safetensors", {"format": "pt"})
    settings = [f"target.path={tiny_target}", "head.num_layers=null", "head.keep_layers=first", f"head.init_from={published}"]
    folder = convert(published, load_recipe("recipes/debug/pard.yaml", settings), tmp_path / "export")
    same_drafts(head, folder, target)
    assert json.loads((folder / "config.json").read_text())["pard_token"] == 254


@pytest.mark.parametrize(
    ("method", "said", "message"),
    [
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, r"hidden_state_layer_ids=\[0, 2, 3\], .* has \[1, 2, 3\]"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}, r"hidden_state_layer_ids=\[0, 2, 3\]"),
        ("eagle3", {"norm_before_residual": True}, "norm_before_residual=True, .* has False"),
        ("eagle3", {"logit_scale": 0.5}, r"logit_scale=0\.5, .* has 1\.0"),
        ("peagle", {"ptd_token_id": 253}, "mask_token_id=253, .* has 254"),
        ("dflash", {"dflash_config": {"mask_token_id": 254, "target_layer_ids": [0, 1, 3]}}, r"layer_ids=\[1, 2, 4\], .* has \[1, 2, 3\]"),
        ("dflash", {"dflash_config": {"mask_token_id": 253, "target_layer_ids": [0, 1, 2]}}, "mask_token_id=253, .* has 254"),
        ("dflash", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
    ],
    ids=str,
)
def test_what_no_shape_tells(tiny_target, tmp_path, method, said, message):
    """METHODS §15.14: tensors fit, and the draft would accept next to nothing."""
    recipe, _, head = trained(method, tiny_target)
    (published_dflash if method == "dflash" else published_eagle)(head, tmp_path / "published", **said)
    with pytest.raises(ExportError, match=message):
        convert(tmp_path / "published", recipe, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash"])
def test_speculators_format(tiny_target, tmp_path, method):
    """VLLM_FORMATS §2, §5, §7: dimensions and rope are nested, layers and mask token at the top; all of it is read and compared."""
    recipe, target, head = trained(method, tiny_target, "head.rope={rope_type: default, rope_theta: 777.0}")
    publish = published_dflash if method == "dflash" else published_eagle
    publish(head, tmp_path / "published", **({"norm_before_residual": False} if method == "eagle3" else {}))
    file = tmp_path / "published" / "config.json"
    plain = json.loads(file.read_text()) | {"model_type": "qwen3" if method == "dflash" else "llama", "rope_theta": 777.0}
    inner = {k: v for k, v in plain.items() if k not in ("architectures", "dflash_config", "block_size", "norm_before_residual")}
    layers = "aux_hidden_state_layer_ids" if method == "dflash" else "eagle_aux_hidden_state_layer_ids"
    outer = {"speculators_model_type": method, "transformer_layer_config": inner, layers: head.aux_layers, "target_hidden_size": None}
    outer |= {} if method == "eagle3" else {"mask_token_id": 254}
    plain_recipe = load_recipe(f"recipes/debug/{method}.yaml", [f"target.path={tiny_target}"])

    def converted(**said):
        file.write_text(json.dumps(outer | said))
        return convert(tmp_path / "published", plain_recipe, tmp_path / "export")

    if method == "eagle3":
        with pytest.raises(ExportError, match="norm_before_residual=True, .* has False"):
            converted()
        outer["norm_before_residual"] = False
    with pytest.raises(ExportError, match=r"layer_ids=\[0, 2, 3\], .* has \[1, 2, 3\]"):
        converted(**{layers: [0, 2, 3]})
    with pytest.raises(ExportError, match="intermediate_size=96, .* has 128"):
        converted(transformer_layer_config=inner | {"intermediate_size": 96})
    read_back = same_drafts(head, converted(), target, head.aux_layers)
    assert read_back.head.rope["rope_theta"] == 777.0


def test_draft_model(tiny_target, tmp_path):
    """A model of any shape, named by `head.init_from`; without a tokenizer nothing tells what its ids mean."""
    _, target, head = trained("draft_model", tiny_target, "head.num_layers=3")
    published = published_model(head, tmp_path / "published")
    settings = [f"target.path={tiny_target}", "head.num_layers=null", f"head.init_from={published}"]
    recipe = load_recipe("recipes/debug/draft_model.yaml", settings)
    same_drafts(head, convert(published, recipe, tmp_path / "export"), target)
    for file in published.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TargetError, match="published holds no tokenizer"):
        convert(published, recipe, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_another_shape_than_the_recipes(tiny_target, tmp_path):
    """The message names the file, both values, and the command ends with one line."""
    recipe, _, head = trained("eagle1", tiny_target)
    published_eagle(head, tmp_path / "published", num_key_value_heads=4)
    with pytest.raises(ExportError, match=r"published/config\.json says num_key_value_heads=4, .* has 2"):
        convert(tmp_path / "published", recipe, tmp_path / "export")


def test_a_tensor_in_two_files(tiny_target, tmp_path, capsys):
    """A doubled tensor is an error naming both files; nothing is written."""
    recipe, _, head = trained("eagle1", tiny_target)
    published_eagle(head, tmp_path / "published")
    for name in "ab":
        save_file({"fc.weight": head.fc.weight.detach()}, tmp_path / "published" / f"{name}.safetensors")
    with pytest.raises(SystemExit) as exit:
        main(["--from", str(tmp_path / "published"), "--recipe", "recipes/debug/eagle1.yaml", "--output", str(tmp_path / "export")])
    assert exit.value.code == 2
    assert "fc.weight is in a.safetensors and in b.safetensors" in capsys.readouterr().err and not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [("head.norm_output=true", "norm_output=False"), ("head.aux_layers=[0,2,3]", "eagle_aux_hidden_state_layer_ids=")],
)
def test_equal_shapes_that_compute_something_else_are_refused(tiny_target, tmp_path, override, key):
    """`head.init_from`: no tensor tells which layers were tapped or what was fed back; config.json does."""
    _, _, head = trained("eagle3", tiny_target)
    folder = tmp_path / "export"
    folder.mkdir()
    save_file({name: t.clone() for name, t in head.served_tensors().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.served_config(), default=str))
    load_export_into(trained("eagle3", tiny_target)[2], folder)
    with pytest.raises(ExportError, match=rf"config.json says {key}.*Set head\.\* to what was trained"):
        load_export_into(trained("eagle3", tiny_target, override)[2], folder)


@pytest.mark.parametrize(
    ("method", "said", "message"),
    [
        ("dflash", {"dflash_config": {"mask_token_id": 254, "target_layer_ids": [0, 1, 3]}}, r"layer_ids=\[1, 2, 4\], .* has \[1, 2, 3\]"),
        ("dflash", {"dflash_config": {"mask_token_id": 253, "target_layer_ids": [0, 1, 2]}}, "mask_token_id=253, .* has 254"),
        ("dflash", {"rope_theta": 778.0}, r"rope_parameters=.*778\.0.* has .*777\.0.* Set head\.rope to"),
        ("eagle3", {"rope_theta": None}, r"rope_parameters=.*10000\.0.* has .*777\.0"),
        ("eagle3", {"aux_hidden_state_layer_ids": [0, 2, 3]}, r"layer_ids=\[0, 2, 3\], .* has \[1, 2, 3\]"),
        ("eagle3", {"norm_before_residual": None}, "norm_before_residual=True, .* has False"),
    ],
    ids=str,
)
def test_a_start_from_a_published_draft_reads_its_own_format(tiny_target, tmp_path, method, said, message):
    """`head.init_from`: DFlash's nested settings, speculators' format (its EAGLE-3 has the switch on unless it says no), and rope."""
    rope = "head.rope={rope_type: default, rope_theta: 777.0}"
    _, _, head = trained(method, tiny_target, rope)
    publish = published_dflash if method == "dflash" else published_eagle
    publish(head, tmp_path / "published", rope_theta=777.0)
    file = tmp_path / "published" / "config.json"
    config = json.loads(file.read_text())

    def started(**said):
        new = {key: value for key, value in (config | said).items() if value is not None}
        if method == "eagle3":
            outer = {key: new.pop(key) for key in ("aux_hidden_state_layer_ids", "norm_before_residual") if key in new}
            new = {"speculators_model_type": "eagle3", "transformer_layer_config": new, **outer}
        file.write_text(json.dumps(new))
        fresh = trained(method, tiny_target, rope)[2]
        load_export_into(fresh, tmp_path / "published")
        assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in head.state_dict().items())

    as_trained = {"aux_hidden_state_layer_ids": head.aux_layers, "norm_before_residual": False} if method == "eagle3" else {}
    started(**as_trained)
    with pytest.raises(ExportError, match=message):
        started(**as_trained | said)

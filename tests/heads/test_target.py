"""What a head borrows equals what the target itself computes, for every family and file layout."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from heads.target import ROUNDED_PROBE, check_probe, load_tokenizer, read_target
from recipes.errors import TargetError
from recipes.schema import Target

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-head-dim": LlamaConfig(**SMALL | {"head_dim": 16}),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL | {"head_dim": 16}),
    "mistral": MistralConfig(**SMALL | {"head_dim": 8}),
    "gemma2-softcap": Gemma2Config(**SMALL | {"head_dim": 8}, final_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**SMALL | {"head_dim": 8}),
    "cohere-scale": CohereConfig(**SMALL, logit_scale=0.3),
    "granite-scale": GraniteConfig(**SMALL, logits_scaling=4.0),
}


def save(config, folder: Path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # trained norms are not at their start, which would hide a wrong convention
        for name, p in model.named_parameters():
            if "norm" in name:
                p.normal_(std=0.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_borrowed_parts_give_the_targets_own_logits(family, tmp_path):
    """B18, PEERS §4.4: the family's norm, scale and soft-cap; applied once, in its own convention."""
    model = save(FAMILIES[family], tmp_path)
    target = read_target(Target(path=str(tmp_path), dtype="float32"))
    ids = torch.randint(64, (1, 9))
    with torch.no_grad():
        logits = model(ids).logits[0]
        last_hidden = model.get_decoder()(ids).last_hidden_state[0]
        residual = []
        handle = (
            model.get_decoder()
            .layers[-1]
            .register_forward_hook(lambda module, args, output: residual.append(output if isinstance(output, torch.Tensor) else output[0]))
        )
        model(ids)
        handle.remove()
    torch.testing.assert_close(target.logits(last_hidden), logits, rtol=1e-5, atol=1e-5)
    rows = torch.tensor([3, 60, 7])
    torch.testing.assert_close(target.logits(last_hidden, rows), logits[:, rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.norm(residual[0][0]), last_hidden, rtol=1e-5, atol=1e-5)
    assert torch.equal(target.lm_head, model.get_output_embeddings().weight) and torch.equal(
        target.embed_tokens, model.get_input_embeddings().weight
    )
    assert check_probe(target, last_hidden, logits.argmax(-1), "store") == 1.0


def test_states_before_the_norm_are_told(tmp_path):
    """B18: the final norm missing or applied twice stops training before it starts."""
    model = save(FAMILIES["llama"], tmp_path)
    target = read_target(Target(path=str(tmp_path), dtype="float32"))
    ids = torch.randint(64, (1, 60))
    with torch.no_grad():
        argmax, last_hidden = model(ids).logits[0].argmax(-1), model.get_decoder()(ids).last_hidden_state[0]
    with pytest.raises(TargetError, match=r"store: lm_head\(last_hidden\) gives the target's own next token at \d"):
        check_probe(target, target.norm(last_hidden), argmax, "store")
    with pytest.raises(TargetError, match="needed: 90.0%"):
        check_probe(target, target.norm(last_hidden), argmax, "store", ROUNDED_PROBE)


def repack(folder: Path, change) -> None:
    """Rewrite the folder's tensors through `change`."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    change(tensors)


def test_sharded_and_tied(tmp_path):
    """B22 b: an index, tied embeddings, no lm_head."""
    model = save(FAMILIES["llama-tied"], tmp_path)

    def shard(tensors):
        names = sorted(tensors)
        files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: tensors[n].clone() for n in names if files[n] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    repack(tmp_path, shard)
    target = read_target(Target(path=str(tmp_path), dtype="float32"))
    assert torch.equal(target.lm_head, model.get_output_embeddings().weight) and target.lm_head is target.embed_tokens


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_nested_below_a_vision_model(prefix, tmp_path):
    """B22 c."""
    model = save(FAMILIES["llama-tied"], tmp_path)
    repack(tmp_path, lambda t: save_file({k.replace("model.", prefix, 1): v.clone() for k, v in t.items()}, tmp_path / "model.safetensors"))
    target = read_target(Target(path=str(tmp_path), dtype="float32"))
    assert torch.equal(target.embed_tokens, model.get_input_embeddings().weight)


def test_untied_without_a_head_names_file_and_keys(tmp_path):
    """B22 d."""
    save(FAMILIES["llama"], tmp_path)
    repack(tmp_path, lambda t: save_file({k: v.clone() for k, v in t.items() if k != "lm_head.weight"}, tmp_path / "model.safetensors"))
    with pytest.raises(TargetError, match=r"no tensor lm_head\.weight; nearest keys: .*tie_word_embeddings: true"):
        read_target(Target(path=str(tmp_path), dtype="float32"))


@pytest.mark.parametrize(("damage", "says"), [("gone", "is missing, and model.norm.weight"), ("cut", "cannot be read")])
def test_a_shard_that_is_not_whole_is_named(tmp_path, damage, says):
    """A download that stopped: the index names a shard that is not there, or not all of it (B22)."""
    save(FAMILIES["llama-tied"], tmp_path)

    def shard(tensors):
        files = {name: "a.safetensors" if "norm" not in name else "b.safetensors" for name in tensors}
        for file in set(files.values()):
            save_file({n: t.clone() for n, t in tensors.items() if files[n] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    repack(tmp_path, shard)
    raw = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").unlink()
    if damage == "cut":
        (tmp_path / "b.safetensors").write_bytes(raw[:-9])
    with pytest.raises(TargetError, match=rf"b\.safetensors {says}.*the target is not whole"):
        read_target(Target(path=str(tmp_path), dtype="float32"))


def test_no_weight_files(tmp_path):
    save(FAMILIES["llama"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="holds no"):
        read_target(Target(path=str(tmp_path), dtype="float32"))


def test_width_against_config(tmp_path):
    """B29: names both widths."""
    save(FAMILIES["llama"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5}))
    with pytest.raises(TargetError, match=r"\(64, 32\) but config\.json says hidden_size=40"):
        read_target(Target(path=str(tmp_path), dtype="float32"))


def test_a_folder_without_a_tokenizer_is_one_line(tiny_target, tmp_path):
    """What transformers raises names the recipe key."""
    for file in tiny_target.iterdir():
        if "token" not in file.name:
            shutil.copy(file, tmp_path)
    with pytest.raises(TargetError, match=f"target.path={tmp_path}: transformers cannot load its tokenizer: .*look at its files"):
        load_tokenizer(Target(path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows"}')
    with pytest.raises(TargetError, match=f"target.path={tmp_path}: transformers cannot load its config.json: .*nobody knows"):
        read_target(Target(path=str(tmp_path)))

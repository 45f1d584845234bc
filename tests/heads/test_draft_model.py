"""The independent draft: cut from the target or an existing model, packed without padding, an ordinary Hugging Face folder."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from heads.draft_model import DraftModelHead, base_config, build
from heads.exported import check_served
from heads.packed import Packed, check_packable
from heads.target import TargetParts, read_target
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError, TargetError
from recipes.head_blocks import DraftModelHead as Block
from recipes.schema import Target

V = 260
SHAPE = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
FAMILIES = {
    "llama": LlamaConfig(**SHAPE, vocab_size=V, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, vocab_size=V, tie_word_embeddings=False),  # biases on q, k, v
    "qwen3": Qwen3Config(**SHAPE, vocab_size=V, tie_word_embeddings=True),  # norms on q and k
    "mistral": MistralConfig(**SHAPE, vocab_size=V, sliding_window=None),
}


@pytest.fixture(scope="module")
def parts(tiny_target: Path) -> TargetParts:
    """The tiny target: L = 4, H = 64, V = 260."""
    return read_target(Target(path=str(tiny_target), dtype="float32"))


def make(parts, **block) -> DraftModelHead:
    return DraftModelHead(Block(**({"num_layers": 2} | block)), parts, DraftVocab(torch.arange(V), V)).eval()


def model_folder(folder: Path, config, tokenizer) -> Path:
    """An existing draft model with random weights, as another tool would have saved it."""
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def written(head: DraftModelHead, folder: Path) -> Path:
    """What the export writes of a draft model."""
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in head.served_tensors().items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.served_config()))
    head.save_extra(folder)
    return folder


def greedy_chain(model, tokens: list[int], k: int) -> list[int]:
    """What transformers itself continues with, without a cache."""
    tokens = list(tokens)
    for _ in range(k):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[-k:]


@pytest.mark.parametrize(
    ("keep", "kept"), [("first", [0, 1]), ("spread", [0, 3]), ([1, 2], [1, 2])], ids=["the first", "evenly spread", "these"]
)
def test_made_of_the_targets_layers(parts, tiny_target, keep, kept):
    target = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    head = make(parts, keep_layers=keep)
    theirs = {name.removeprefix("model."): tensor for name, tensor in target.state_dict().items()}
    for name, tensor in head.decoder.state_dict().items():
        source = name
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            source = f"layers.{kept[int(number)]}.{rest}"
        assert torch.equal(tensor, theirs[source]), name
    assert torch.equal(head.head_weight, target.lm_head.weight)
    assert head.config.num_hidden_layers == 2 and parts.config.num_hidden_layers == 4  # E09; the target's own is not touched


def test_all_layers_of_the_target_are_the_target(parts, tiny_target):
    head, ids = make(parts, num_layers=4), torch.randint(V, (30,))
    target = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with torch.no_grad():
        ours = head.logits(head.states(head.embed(ids), torch.arange(30), packed=Packed(torch.zeros(30, dtype=torch.long))))
        torch.testing.assert_close(ours, target(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_each_alone(family):
    """transformers' own layers, of any family: a packed document's states are those of a plain forward over it."""
    torch.manual_seed(0)
    config = FAMILIES[family]
    ours = build(copy.deepcopy(config)).eval()
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    theirs.load_state_dict(ours.state_dict())
    lengths = [7, 1, 12]
    ids, document = torch.randint(V, (20,)), torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        states = ours.get_decoder()(ids[None], position_ids=positions[None], packed=Packed(document), use_cache=False).last_hidden_state[0]
        for part, row in zip(states.split(lengths), ids.split(lengths), strict=True):
            torch.testing.assert_close(part, theirs.get_decoder()(row[None]).last_hidden_state[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [1, 4])
def test_proposes_what_transformers_would_write(parts, tmp_path, k):
    """Round after round, with the first token of all (B34: it is not dropped), and only committed entries stay in the cache."""
    head = make(parts)
    model = AutoModelForCausalLM.from_pretrained(written(head, tmp_path / "draft"), dtype=torch.float32).eval()
    ids, cache, end = torch.randint(V, (14,)), head.new_cache(), 0
    for known in (6, 7, 11, 14):  # tokens committed by then
        begin = 0 if end == 0 else end
        drafted = head.propose({}, ids[begin:known], torch.arange(max(end - 1, 0), known - 1), cache, k, lambda logits: logits.argmax(-1))
        assert drafted.tolist() == greedy_chain(model, ids[:known].tolist(), k)
        assert cache.get_seq_length() == known
        end = known


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_is_an_ordinary_model(parts, tmp_path, tiny_tokenizer, tied):
    """It loads in transformers with every tensor in place, tied or not, with the target's tokenizer."""
    base = model_folder(tmp_path / "base", LlamaConfig(**SHAPE, vocab_size=V, tie_word_embeddings=tied), tiny_tokenizer)
    head = make(parts, num_layers=None, init_from=str(base))
    head.load_served(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict())
    check_served(DraftModelHead.served_shapes(head.served_config()), head.served_tensors(), "export")
    assert ("lm_head.weight" in head.served_tensors()) == (not tied)
    folder = written(head, tmp_path / "draft")
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tiny_tokenizer.get_vocab()
    ids = torch.randint(V, (9,))
    with torch.no_grad():
        ours = head.logits(head.states(head.embed(ids), torch.arange(9), packed=Packed(torch.zeros(9, dtype=torch.long))))
        torch.testing.assert_close(model(ids[None]).logits[0], ours, rtol=1e-4, atol=1e-4)


def test_an_existing_model_of_another_shape_and_a_smaller_vocabulary(parts, tmp_path, tiny_tokenizer):
    """Its own width, layers and rope; rows that its embedding lacks are padded and never drafted."""
    config = Qwen3Config(**SHAPE, vocab_size=V - 3, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    base = model_folder(tmp_path / "base", config, tiny_tokenizer)
    head = make(parts, num_layers=None, init_from=str(base))
    state = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    head.load_served({name: tensor for name, tensor in state.items() if name != "lm_head.weight"})
    head.load_extra(base)
    assert head.config.hidden_size == 48 and head.config.rope_parameters["rope_theta"] == 5e5
    assert head.head_weight.shape == (V, 48) and head.served_config()["vocab_size"] == V
    assert torch.equal(head.head_weight[: V - 3], state["model.embed_tokens.weight"])
    ids = torch.randint(V - 3, (50,))
    with torch.no_grad():
        states = head.states(head.embed(ids), torch.arange(50), packed=Packed(torch.zeros(50, dtype=torch.long)))
    assert bool((head.logits(states).argmax(-1) < V - 3).all())


def test_what_does_not_fit_the_target_is_refused(parts, tmp_path, tiny_tokenizer):
    larger = model_folder(tmp_path / "larger", LlamaConfig(**SHAPE, vocab_size=V + 1), tiny_tokenizer)
    with pytest.raises(TargetError, match=f"has a vocabulary of {V + 1}, larger than the {V}"):
        make(parts, num_layers=None, init_from=str(larger))
    other = copy.deepcopy(tiny_tokenizer)
    text = json.loads(other.backend_tokenizer.to_str())
    vocab = text["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    folder = model_folder(tmp_path / "other", LlamaConfig(**SHAPE, vocab_size=V), tiny_tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(text))
    head = make(parts, num_layers=None, init_from=str(folder))
    with pytest.raises(TargetError, match="id 97 is 'b' in the draft and 'a' in the target"):
        head.load_extra(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TargetError, match="holds no tokenizer"):
        head.load_extra(folder)
    with pytest.raises(ExportError, match="missing model.layers.1"):
        make(parts).load_served({name: t for name, t in make(parts).served_tensors().items() if "layers.1" not in name})


def test_rebuilt_without_the_model_it_started_from(parts, tmp_path, tiny_tokenizer):
    base = model_folder(tmp_path / "base", FAMILIES["qwen3"], tiny_tokenizer)
    block = Block(init_from=str(base))
    head = DraftModelHead(block, parts, DraftVocab(torch.arange(V), V))
    architecture = json.loads(json.dumps(head.architecture()))
    shutil.rmtree(base)
    again = DraftModelHead(block, parts, DraftVocab(torch.arange(V), V), architecture=architecture)
    again.load_served({name: tensor.clone() for name, tensor in head.served_tensors().items()})
    assert again.served_config() == head.served_config()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with pytest.raises(TargetError, match="head.init_from"):
        base_config(str(base))


def test_only_full_attention_and_a_plain_lm_head():
    for config, what in (
        (MistralConfig(**SHAPE, vocab_size=V, sliding_window=16), "a sliding window"),
        (Gemma2Config(**SHAPE, vocab_size=V), "sliding_attention"),
    ):
        with pytest.raises(TargetError, match=what):
            check_packable(config, "draft")
    for config in FAMILIES.values():
        check_packable(config, "draft")


def test_frozen_embeddings(parts):
    head = make(parts, train_embeddings=False)
    frozen = {name for name, p in head.named_parameters() if not p.requires_grad}
    assert frozen == {"decoder.embed_tokens.weight", "lm_head.weight"}


def test_bad_blocks(parts):
    with pytest.raises(RecipeError, match="head.num_layers=None and head.init_from=None: give one of them"):
        Block()
    with pytest.raises(RecipeError, match="head.num_layers=2 and head.init_from=x"):
        Block(num_layers=2, init_from="x")
    with pytest.raises(RecipeError, match="head.keep_layers=spread has no effect"):
        Block(init_from="x", keep_layers="spread")
    for keep, n in (([0, 4], 2), ([1, 1], 2), ([0, 1, 2], 2), ("first", 5)):
        with pytest.raises(RecipeError, match="of a target that has 0..3"):
            make(parts, num_layers=n, keep_layers=keep)

"""Independent draft: a small causal LM with the target's tokenizer, which drafts token by token (arXiv 2211.17192, 2302.01318).

It reads no feature of the target, only tokens, and all of them from the first one on. Timeline at index t, where the target
has processed x[0..t] and chosen x[t+1]:

    depth    token eaten   position    sees           predicts
    0        x[t+1]        t + 1       x[0..t+1]      x[t+2]
    i >= 1   x[t+1+i]      t + 1 + i   x[0..t+1+i]    x[t+2+i]

So depth i at index t is what the model puts out at t + 1 + i, where the target's own state for the same prediction stands:
one causal pass over a row trains every depth.

The model is transformers' own, of any family with full attention. It is an existing one (`head.init_from`), or is cut from the
target: some of its layers, with its embedding, final norm and LM head as initial weights. The export is an ordinary
Hugging Face folder with the target's tokenizer.

Shapes: N packed tokens, n entries of one request, H the draft's hidden size, V the target's vocabulary, k drafts.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PretrainedConfig, PreTrainedModel

from heads.autoregressive import Choose
from heads.compat import check_same_tokenizer, check_vocab_size, pad_vocab
from heads.exported import copy_tensors, resolve_draft
from heads.packed import PACKED, Packed, check_packable
from heads.target import TargetParts, TensorFiles
from heads.vocab import DraftVocab
from recipes.errors import TargetError
from recipes.head_blocks import DraftModelHead as DraftModelBlock

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
VOCAB_TENSORS = ("embed_tokens.weight", "lm_head.weight")  # ends of the names of tensors with a row a token


class DraftModelHead(nn.Module):
    """The draft model."""

    eats_first_token = True  # x[0] too: the heads that read features begin with x[1]

    def __init__(self, block: DraftModelBlock, target: TargetParts, vocab: DraftVocab, architecture: dict[str, Any] | None = None):
        """
        Args:
            architecture: the config of a draft model that was exported, whose weights `load_served` will bring; None: of the
                model that the block starts from.
        """
        super().__init__()
        self.block, self.target_path = block, target.path
        self.vocab = DraftVocab(torch.arange(vocab.size, device=vocab.ids.device), vocab.size)  # drafts are over all tokens
        self.trained_vocab = vocab  # what training compares
        self.target_hidden_size = target.hidden_size
        if architecture is not None:
            config = AutoConfig.for_model(**architecture)
        elif block.init_from is not None:
            config = base_config(block.init_from)
            check_vocab_size(vocab.size, config.vocab_size, str(target.path), block.init_from)
        else:
            config = cut_config(target, block.kept_layers(target.num_layers))
        check_packable(config, block.init_from or str(target.path))
        config.vocab_size = vocab.size
        model = build(config)
        self.config, self.architecture_name, self.prefix = model.config, type(model).__name__, model.base_model_prefix + "."
        self.decoder = model.get_decoder()
        self.decoder.get_input_embeddings().padding_idx = None  # type: ignore[assignment]  # the padding token's row learns too: it may be PARD's mask token
        self.lm_head: nn.Linear | None = None if config.tie_word_embeddings else model.get_output_embeddings()  # type: ignore[assignment]
        if not block.train_embeddings:
            for weight in (self.embedding, self.head_weight):
                weight.requires_grad_(False)
        if architecture is None and block.init_from is None and not target.lm_head.is_meta:
            self.take_layers(target, block.kept_layers(target.num_layers))

    def take_layers(self, target: TargetParts, kept: list[int]) -> None:
        """Initial weights of a model cut from the target: its layers `kept`, and everything around them."""
        files, numbered, tensors = TensorFiles(target.path), f"{self.prefix}layers.", {}
        for name in self.served_tensors():
            source = name
            if name.startswith(numbered):
                number, rest = name.removeprefix(numbered).split(".", 1)
                source = f"{numbered}{kept[int(number)]}.{rest}"
            tensors[name] = target.lm_head if name == "lm_head.weight" else files.get(source)
        self.load_served(tensors)

    # ---- the model ---------------------------------------------------------------------------------------------

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        return self.decoder.get_input_embeddings().weight  # type: ignore[return-value]

    @property
    def head_weight(self) -> Tensor:
        """[V, H] the LM head; the embedding where they are tied."""
        return self.embedding if self.lm_head is None else self.lm_head.weight

    def embed(self, ids: Tensor) -> Tensor:
        """Ids [n] → [n, H]."""
        return self.decoder.get_input_embeddings()(ids)

    def states(self, embeddings: Tensor, positions: Tensor, *, packed: Packed | None = None, cache: DynamicCache | None = None) -> Tensor:
        """Entries [n, H] at positions [n] → post-norm states [n, H]; in packed documents, or behind the entries of a cache."""
        out = self.decoder(
            inputs_embeds=embeddings[None], position_ids=positions[None], past_key_values=cache, use_cache=cache is not None, packed=packed
        )
        return out.last_hidden_state[0]

    def logits(self, state: Tensor) -> Tensor:
        """States [n, H] → [n, V]."""
        return F.linear(state, self.head_weight)

    # ---- drafting ----------------------------------------------------------------------------------------------

    def new_cache(self) -> DynamicCache:
        """An empty draft cache for one request."""
        return DynamicCache()

    @torch.no_grad()
    def propose(self, hidden: dict[int, Tensor], tokens: Tensor, positions: Tensor, cache: DynamicCache, k: int, choose: Choose) -> Tensor:
        """Draft a chain of k tokens after committed ones; their entries are dropped again.

        Args:
            hidden: not read. tokens: [n], x[t+1] for each of the n positions t committed since the last round; in the first round
                [n + 1], x[0] before them. positions: [n].
            choose: logits [1, V] → id [1].

        Returns:
            [k] target ids.
        """
        state = self.states(self.embed(tokens), entry_positions(tokens, positions), cache=cache)[-1:]
        drafted: list[Tensor] = []
        for depth in range(k):
            drafted.append(choose(self.logits(state)))
            if depth + 1 < k:
                state = self.states(self.embed(drafted[-1]), positions[-1:] + 2 + depth, cache=cache)
        cache.crop(1 - k)
        return torch.cat(drafted)

    # ---- export: an ordinary Hugging Face folder (VLLM_FORMATS §4) ----------------------------------------------

    def architecture(self) -> dict[str, Any]:
        """What headstart.json keeps, so that the model can be rebuilt without the one it started from."""
        config = json.loads(json.dumps(self.config.to_dict(), default=str))
        config.pop("_name_or_path", None)
        return config

    def served_config(self) -> dict[str, Any]:
        """config.json."""
        return self.architecture() | {"architectures": [self.architecture_name]}

    def served_tensors(self) -> dict[str, Tensor]:
        """Our parameters under transformers' names; a tied LM head is the embedding and in no file (E07)."""
        tensors = {self.prefix + name: tensor for name, tensor in self.decoder.state_dict().items()}
        return tensors if self.lm_head is None else tensors | {"lm_head.weight": self.lm_head.weight}

    @torch.no_grad()
    def load_served(self, tensors: dict[str, Tensor]) -> None:
        """Take over the weights of a causal LM, its vocabulary padded to the target's.

        Raises:
            ExportError: a tensor is missing, unknown, or of another shape.
        """
        tensors = {
            name: pad_vocab(tensor, self.vocab.size) if name.endswith(VOCAB_TENSORS) else tensor
            for name, tensor in tensors.items()
            if not name.endswith("rotary_emb.inv_freq")  # old checkpoints hold it; the config says it all
        }
        copy_tensors(self.served_tensors(), tensors, {"lm_head.weight"} if self.lm_head is None else ())

    def save_extra(self, folder: Path) -> None:
        """The target's tokenizer: with it the folder is whole, and who reads it can tell whose draft it is."""
        AutoTokenizer.from_pretrained(self.target_path).save_pretrained(folder)

    def load_extra(self, folder: Path) -> None:
        """Raise TargetError where a folder to load from has no tokenizer, or another one than the target."""
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise TargetError(
                f"{folder} holds no tokenizer ({', '.join(TOKENIZER_FILES)}), so nothing tells whether its ids mean what those of "
                f"{self.target_path} mean; copy the tokenizer files of the model it was trained as."
            )
        draft, target = (AutoTokenizer.from_pretrained(path) for path in (folder, self.target_path))
        check_same_tokenizer(target, draft, str(self.target_path), str(folder))

    @staticmethod
    def served_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Every tensor that must exist for a config.json, with its shape, as transformers' own class has it."""
        with torch.device("meta"):
            model = build(AutoConfig.for_model(**config))
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}

    @staticmethod
    def speculative_config() -> dict:
        """What the user passes to vLLM besides `model` and `num_speculative_tokens`."""
        return {"method": "draft_model"}


def entry_positions(tokens: Tensor, positions: Tensor) -> Tensor:
    """Positions of the entries of one round: x[t+1] stands at t + 1, and in the first round x[0] before them.

    >>> entry_positions(torch.tensor([10, 11, 12]), torch.tensor([0, 1])).tolist()
    [0, 1, 2]
    >>> entry_positions(torch.tensor([13]), torch.tensor([2])).tolist()
    [3]
    """
    end = int(positions[-1]) + 2
    return torch.arange(end - len(tokens), end, device=tokens.device)


def base_config(init_from: str) -> PretrainedConfig:
    """The text config of the model that a draft starts from."""
    return AutoConfig.from_pretrained(resolve_draft(init_from)).get_text_config()


def cut_config(target: TargetParts, kept: list[int]) -> PretrainedConfig:
    """The target's config with its own layer count (E09)."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[layer] for layer in kept]
    return config


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A causal LM in float32 with packed attention and random weights."""
    return AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=torch.float32)

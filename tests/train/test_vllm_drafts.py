"""Export → vLLM → the same draft tokens as the training module's `propose`, round by round, and the target's own answers.

Heads are random, so nothing is accepted by luck of training: what is compared is every drafted token. One process, one
engine a head.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.prepare import llm_arguments
from heads import LAST_HIDDEN, head_class
from heads.embedded import resolve_target
from heads.target import read_target
from heads.vocab import DraftVocab
from recipes.schema import Recipe, load_recipe
from tests.heads.native_targets import make_target
from tests.train.stored import states_of, stored_row
from train.export import export_head

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
K, MAX_TOKENS = 4, 12
PROMPTS = [list(b"The first prompt of three"), list(b"Another one"), list(b"!")]
CASES = {  # name → recipe, target, overrides
    "eagle1": ("debug/eagle1", "tiny:llama", []),
    "eagle1, two layers": ("debug/eagle1", "tiny:llama", ["head.num_layers=2"]),
    "medusa": ("debug/medusa", "tiny:llama", ["head.num_layers=2"]),
    "medusa, one LM head": ("debug/medusa", "tiny:llama", ["head.shared_lm_head=true"]),
    "medusa, the target's LM head": ("debug/medusa", "tiny:llama", ["head.shared_lm_head=true", "head.train_lm_head=false"]),
    "mtp": ("debug/mtp", "tiny:llama-2-heads", []),
    "mtp in a MiMo target": ("debug/mtp", "tiny:llama-2-heads", ["head.layout=mimo"]),
    "peagle": ("debug/peagle", "tiny:llama", ["head.num_layers=2"]),
    "peagle over all tokens": (
        "debug/peagle",
        "tiny:llama",
        ["head.draft_vocab_size=null", "head.fc_norm=true"],
    ),
    "dflash": ("debug/dflash", "tiny:llama", []),
    "dflash over a draft vocabulary": ("debug/dflash", "tiny:llama", ["head.draft_vocab_size=128", "head.num_layers=3"]),
    "draft model": ("debug/draft_model", "tiny:llama", ["head.num_layers=2"]),
    "pard": ("debug/pard", "tiny:llama", []),
    "pard with a frozen embedding": ("debug/pard", "tiny:llama", ["head.train_embeddings=false"]),
    "pard-2, without the target's states": ("debug/pard", "tiny:llama", ["head.aux_layers=[1,3]", "objective.feature_drop=0.2"]),
}


NATIVE = [f"native {family}" for family in ("deepseek_v3", "glm4_moe", "mimo")]  # Qwen's main layers need bfloat16 on a CPU


def case(name: str, root: Path) -> tuple[Path, Recipe]:
    """The target's folder and the recipe of a case."""
    if name in NATIVE:
        family = name.split()[1]
        path = make_target(family, root / family)
        return path, load_recipe("recipes/debug/mtp.yaml", [f"target.path={path}", "method=mtp_native", "head={}"])
    recipe_name, target_name, overrides = CASES[name]
    path = resolve_target(target_name, root=root)
    return path, load_recipe(f"recipes/{recipe_name}.yaml", [f"target.path={path}", *overrides])


@pytest.fixture(scope="module")
def drafted(request, tmp_path_factory):
    """name → (head, target model, what vLLM did), for the cases that were picked."""
    root = tmp_path_factory.mktemp("drafts")
    picked = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    heads, jobs = {}, []
    for number, name in enumerate(name for name in (*CASES, *NATIVE) if name in picked):
        path, recipe = case(name, root)
        target = read_target(recipe.target)
        torch.manual_seed(number)
        size = getattr(recipe.head, "draft_vocab_size", None) or target.vocab_size
        vocab = DraftVocab(torch.randperm(target.vocab_size)[:size].sort().values, target.vocab_size)
        head = head_class(recipe.method)(recipe.head, target, vocab)
        with torch.no_grad():
            for p in head.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        layers = recipe.head.feature_layers(target.num_layers)
        folder = export_head(
            recipe, head, target, stored_row(path, min(256, target.vocab_size), tuple(layers)), {}, root / f"export-{number}"
        )
        meta = json.loads((folder / "headstart.json").read_text())
        llm = llm_arguments(path, target.config, "float32", 64, 1, True) | meta["llm_kwargs"]
        speculative = meta["speculative_config"] | {"num_speculative_tokens": K}
        if name in NATIVE:
            llm["skip_tokenizer_init"] = True
        (llm if recipe.head.inside_target else speculative)["model"] = str(folder)
        prompts = [[token % target.vocab_size for token in prompt] for prompt in PROMPTS]
        jobs.append({"llm": llm | {"speculative_config": speculative}, "prompts": prompts, "max_tokens": MAX_TOKENS})
        heads[name] = head.eval(), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), layers
    (root / "job.json").write_text(json.dumps(jobs))
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_MLA_DISABLE": "1",  # plain attention instead: CPU kernels of latent attention take bfloat16, or DeepSeek's own sizes
    }
    command = [sys.executable, str(Path(__file__).with_name("vllm_drafts.py")), str(root / "job.json"), str(root / "out.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert (root / "out.json").is_file(), done.stderr[-4000:]
    results = json.loads((root / "out.json").read_text())
    return {name: (*heads[name], result) for name, result in zip(heads, results, strict=True)}


@pytest.mark.parametrize("name", [*CASES, *NATIVE])
def test_same_draft_tokens(drafted, name):
    """VLLM_FORMATS §5–7: input order, norms, positions, masks and the export, all at once."""
    head, model, layers, result = drafted[name]
    assert "error" not in result, result
    first = 0 if getattr(head, "eats_first_token", False) else 1
    for prompt, output, rounds in zip(PROMPTS, result["outputs"], result["rounds"], strict=True):
        ids = torch.tensor([token % head.vocab.size for token in prompt] + output)
        hidden, last = states_of(model, ids, layers)
        with torch.no_grad():
            greedy = model.lm_head(last).argmax(-1)[len(prompt) - 1 : -1]
        assert torch.equal(greedy, torch.tensor(output)), "not the target's greedy answer"
        written = 1  # tokens of the answer at the time of a round; the prefill gave the first
        for drafts in rounds:
            processed = len(prompt) + written - 1
            states = {layer: h[:processed] for layer, h in (hidden | {LAST_HIDDEN: last}).items()}
            expected = head.propose(
                states, ids[first : processed + 1], torch.arange(processed), head.new_cache(), K, lambda logits: logits.argmax(-1)
            )
            assert drafts == expected.tolist(), f"after {processed} tokens"
            right = [draft == token for draft, token in zip(drafts, output[written:], strict=False)]
            written += (right + [False]).index(False) + 1
        assert written >= MAX_TOKENS and len(rounds) > MAX_TOKENS // (K + 1)

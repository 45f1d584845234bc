"""MTP: the rollout is real drafting for a shared module and for a chain, and the served layouts are complete."""

import pytest
import torch
from transformers import LlamaConfig

from heads import LAST_HIDDEN, shift
from heads.exported import check_served
from heads.layers import RMSNorm, document_starts
from heads.mtp import MtpHead
from heads.target import TargetParts
from heads.vocab import DraftVocab
from recipes.errors import ExportError, RecipeError
from recipes.head_blocks import MtpHead as Block

FULL = DraftVocab(torch.arange(50), 50)
KINDS = [{"shared": True}, {"shared": False}, {"shared": True, "layout": "mimo"}]


def make(parts, depths=4, **fields) -> MtpHead:
    torch.manual_seed(1)
    parts.norm.weight.data.uniform_(0.5, 1.5)
    head = MtpHead(Block(unroll_steps=depths, **fields), parts, FULL)
    with torch.no_grad():
        for p in head.parameters():
            p.normal_(std=0.3)
    return head.eval()


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_rollout_is_sequential_drafting(parts, fields):
    """METHODS §16.8: depth i at index t equals drafting from the prefix <= t with the answer's tokens, in one round or several."""
    head, depths, lengths = make(parts, **fields), 4, [9, 1, 6, 2]
    ids = torch.randint(50, (sum(lengths),))
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    mask, last = torch.rand(len(ids)) < 0.7, torch.randn(len(ids), 32)
    rows = [m.nonzero()[:, 0] for m in shift.rollout_rows([shift.draft_weight(mask, document, i) for i in range(depths)])]
    tokens = [shift.draft_inputs(ids, i) for i in range(depths)]
    compared = 0
    with torch.no_grad():
        states = head.rollout(head.fuse({LAST_HIDDEN: last}), tokens, positions, document_starts(document), rows)
        for depth in range(depths):
            for place, t in enumerate(rows[depth].tolist()):
                start = int((document == document[t]).nonzero()[0])
                for cut in {start + 1, t + 1}:  # all at once, or in two rounds
                    cache, seen = head.new_cache(), []
                    for a, b in ((start, cut), (cut, t + 1)):
                        if a < b:
                            seen.clear()
                            answer = iter(shift.draft_inputs(ids, 1)[b - 1 : b + depth].tolist())
                            head.propose(
                                {LAST_HIDDEN: last[a:b]}, shift.draft_inputs(ids, 0)[a:b], positions[a:b], cache, depth + 1,
                                lambda logits, seen=seen, answer=answer: seen.append(logits[0]) or torch.tensor([next(answer)]),
                            )  # fmt: skip
                    torch.testing.assert_close(head.logits(states[depth][place]), seen[depth], rtol=1e-4, atol=1e-3)
                    compared += 1
    assert compared > 30


def test_shared_module_matches_the_server_step_by_step(parts):
    """VLLM_FORMATS §6a, written out: state first, zero embedding at position 0, biases, the normed state handed on."""
    head, k = make(parts), 3
    module, n = head.stack[0], 5
    last, ids = torch.randn(n, 32), torch.randint(50, (n + k,))

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def run(states, tokens, position, keys, values):
        embedding = parts.embed_tokens[tokens].clone()
        embedding[position == 0] = 0
        mixed = (
            torch.cat([norm(states, module.hidden_layernorm.weight), norm(embedding, module.token_layernorm.weight)], -1)
            @ module.input_proj.weight.T
        )
        x, attention = norm(mixed, module.input_layernorm.weight), module.self_attn
        q, key, value = (torch.nn.functional.linear(x, p.weight, p.bias) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        angle = position[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

        def turn(y):
            y = y.unflatten(-1, (-1, 8))
            return y * cos[:, None] + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin[:, None]

        keys, values = torch.cat([keys, turn(key)]), torch.cat([values, value.unflatten(-1, (-1, 8))])
        out = []
        for place, query in enumerate(turn(q)):
            seen = len(keys) - len(q) + place + 1
            scores = torch.einsum("ad,sad->as", query, keys[:seen].repeat_interleave(2, 1)) / 8**0.5
            out.append(torch.einsum("as,sad->ad", scores.softmax(-1), values[:seen].repeat_interleave(2, 1)).flatten())
        y = mixed + torch.stack(out) @ attention.o_proj.weight.T
        z = norm(y, module.post_attention_layernorm.weight)
        mlp = module.mlp
        y = y + (torch.nn.functional.silu(z @ mlp.gate_proj.weight.T) * (z @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
        return norm(y, module.final_layernorm.weight), keys, values

    with torch.no_grad():
        state, keys, values = run(last, ids[1 : n + 1], torch.arange(n), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8))
        expected = [state[-1:] @ parts.lm_head.T]
        for i in range(1, k):
            state, keys, values = run(state[-1:], ids[n + i : n + i + 1], torch.tensor([n - 1 + i]), keys, values)
            expected.append(state @ parts.lm_head.T)
        seen, answer = [], iter(ids[n + 1 :].tolist() + [0])
        head.propose(
            {LAST_HIDDEN: last}, ids[1 : n + 1], torch.arange(n), head.new_cache(), k,
            lambda logits: seen.append(logits) or torch.tensor([next(answer)]),
        )  # fmt: skip
    torch.testing.assert_close(torch.cat(seen), torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_layout_mimo_reads_the_state_before_the_final_norm(parts):
    """VLLM_FORMATS §6a: from the stored post-norm state, depth 0 makes what the module makes of the pre-norm one."""
    head = make(parts, layout="mimo")
    before = torch.randn(6, 32) * 30
    mine = head.stack[0].hidden_layernorm(head.fuse({LAST_HIDDEN: parts.norm(before)}))
    torch.testing.assert_close(mine, head.stack[0].hidden_layernorm(before), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_served_layout_round_trip(parts, fields):
    """E07, B31: MiMo's names, nothing borrowed; a MiMo target needs biases that a Llama target lacks."""
    head = make(parts, depths=3, **fields)
    tensors, config = {k: v.clone() for k, v in head.served_tensors().items()}, head.served_config()
    check_served(head.served_shapes(config), tensors, "export")
    modules = 1 if head.block.shared else 3
    assert config["num_nextn_predict_layers"] == modules and config["architectures"] == ["MiMoForCausalLM"]
    assert not any("embed_tokens" in name or "lm_head" in name for name in tensors)
    biases = {name for name in tensors if name.startswith("model.layers.")}
    assert len(biases) == (18 if head.block.layout == "mimo" else 0) and not any(tensors[name].any() for name in biases)
    assert head.llm_kwargs() == ({} if head.block.layout == "mimo" else {"hf_overrides": {"num_nextn_predict_layers": modules}})
    other = MtpHead(head.block, parts, FULL)
    other.load_served(tensors)
    for name, value in head.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    del tensors["model.mtp_layers.0.input_proj.weight"]
    with pytest.raises(ExportError, match=r"missing model\.mtp_layers\.0\.input_proj\.weight"):
        other.load_served(tensors)


def test_initial_state(parts):
    """No bias, and the target's final norm, so that the LM head fits from the start."""
    parts.norm.weight.data.uniform_(0.5, 1.5)
    module = MtpHead(Block(), parts, FULL).stack[0]
    assert not module.self_attn.q_proj.bias.any()
    torch.testing.assert_close(module.final_layernorm.weight, parts.norm.weight, rtol=1e-4, atol=1e-4)


def test_bad_targets(parts):
    """Targets whose dimensions the server's module cannot have, families that cannot be rewritten, a chain asked for trees."""
    config = LlamaConfig(**{**parts.config.to_dict(), "head_dim": 16})
    wide = TargetParts(parts.path, config, parts.embed_tokens, parts.lm_head, None, parts.norm, "random")
    with pytest.raises(RecipeError, match="head_dim=16 with 4 heads and hidden_size=32"):
        MtpHead(Block(), wide, FULL)
    parts.norm.weight.data[3] = 0
    with pytest.raises(RecipeError, match="zero weights"):
        MtpHead(Block(layout="mimo"), parts, FULL)
    chain = make(parts, depths=2, shared=False)
    with pytest.raises(RecipeError, match="drafts chains only"):
        chain.advance(torch.zeros(1, 32), torch.tensor([1]), torch.tensor([0]), chain.new_cache())
    other = LlamaConfig(**{**parts.config.to_dict()})
    other.model_type = "gemma2"
    windowed = LlamaConfig(**parts.config.to_dict(), use_sliding_window=True)
    sliding = TargetParts(parts.path, windowed, parts.embed_tokens, parts.lm_head, None, RMSNorm(32, 1e-6), "random")
    with pytest.raises(RecipeError, match="use_sliding_window=True; set head.layout: head"):
        MtpHead(Block(layout="mimo"), sliding, FULL)
    gemma = TargetParts(parts.path, other, parts.embed_tokens, parts.lm_head, None, RMSNorm(32, 1e-6), "random")
    with pytest.raises(RecipeError, match="families llama, qwen2"):
        MtpHead(Block(layout="mimo"), gemma, FULL)

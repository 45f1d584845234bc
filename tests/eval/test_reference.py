"""`eval.engine=reference`: its records and report, Medusa's calibration, and the comparison with vLLM request by request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eval.reference as reference
from eval.__main__ import main
from eval.bench import bench
from eval.decode import Request, Round, Settings, decode
from eval.drafters import Eagle2Drafter, HeadDrafter, NoDrafter
from eval.greedy import not_argmax
from eval.metrics import count
from eval.parity import compare_engines, compare_requests, logit_margin
from eval.report import rounds_of
from eval.verify import TorchDice
from heads.exported import load_exported_head
from heads.medusa import MedusaHead
from heads.target import load_target_model, load_tokenizer, read_target
from heads.vocab import DraftVocab
from recipes.errors import RecipeError
from recipes.head_blocks import MedusaHead as MedusaBlock
from recipes.schema import load_recipe

Arguments = Callable[..., list[str]]


# --- From the command line to the report -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arguments(recipe_arguments: Arguments, trained_export: Path) -> list[str]:
    """Chains of 2 and 4 and EAGLE-2's tree, greedy and sampled, on four prompts."""
    sizes = ["eval.k=[2,4]", "eval.tree_nodes=12", "eval.tree_depth=3", "eval.tree_top_k=3", "eval.max_tokens=12"]
    asked = ["eval.methods=[baseline,ngram,suffix,head]", "eval.temperature=[0.0,1.0]", "eval.tree=eagle2", "eval.concurrency=[3]"]
    where = ["eval.engine=reference", f"export.dir={trained_export}"]
    return recipe_arguments(*where, "eval.draft_sample_method=probabilistic", *asked, *sizes)


@pytest.fixture(scope="module")
def report(arguments: list[str]) -> dict[str, Any]:
    assert main(arguments) == 0
    recipe = load_recipe(arguments[0], arguments[1:])
    return json.loads((recipe.report_dir / "report.json").read_text())


def test_every_method_stands_in_the_report_and_leaves_greedy_answers_alone(report):
    greedy = [(r["method"], r["k"], r.get("identical_to_baseline")) for r in report["runs"] if r["temperature"] == 0]
    assert greedy == [
        ("baseline", 0, None),
        ("eagle3", 2, "4/4"),
        ("eagle3", 4, "4/4"),
        ("eagle3, eagle2 tree", 3, "4/4"),
        ("suffix", 2, "4/4"),
        ("suffix", 4, "4/4"),
        ("ngram", 2, "4/4"),
        ("ngram", 4, "4/4"),
    ]


def test_the_report_says_what_only_this_engine_knows(report):
    for run in report["runs"]:
        if "error" in run:
            continue
        assert run["lossless"] is True and run["round_seconds"]["verify"] > 0
        if run["method"].startswith("eagle3"):
            assert 0 <= run["candidate_coverage"] <= 1 and 0 < run["draft_vocab_coverage"] <= 1
            assert run["round_seconds"]["draft"] > 0
    # Sampled answers are lossless by rule, not by chance: the note says which rule was at work.
    assert any("speculative sampling" in note for note in report["notes"]) and any("argmax" in note for note in report["notes"])
    assert {"candidate_coverage", "draft_vocab_coverage", "round_seconds"} <= set(report["definitions"])


def test_greedy_answers_are_held_against_the_target(report):
    """Every greedy token of every method is the argmax of a forward without cache, drafts or tree; sampled ones are not asked."""
    greedy, sampled = ([r for r in report["runs"] if r["temperature"] == t] for t in (0.0, 1.0))
    assert [run["not_argmax"] for run in greedy] == [[]] * len(greedy) and not any("not_argmax" in run for run in sampled)
    tokens = sum(run["num_new_tokens"] for run in greedy)
    assert any(f"{tokens} of {tokens} tokens are the argmax" in note for note in report["notes"])


def test_a_token_that_the_target_would_not_write_is_found(model, greedy, prompts):
    answer = greedy(prompts[0], 8)
    with torch.no_grad():
        logits = model(torch.tensor([prompts[0] + answer[:5]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    rest = greedy(prompts[0] + answer[:5] + [second], 2)  # greedy again after the wrong token
    (miss,) = not_argmax(model, [prompts[1], prompts[0]], [greedy(prompts[1], 6), [*answer[:5], second, *rest]])
    assert (miss["request"], miss["token"]) == (1, 5)
    assert miss["gap"] == pytest.approx((logits.max() - logits[second]).item(), rel=1e-3)


def test_the_ledger_compares_every_k_with_the_baseline(report):
    (greedy,) = (ledger for ledger in report["ledger"] if ledger["temperature"] == 0)
    assert [(entry["concurrency"], entry["k"]) for entry in greedy["entries"]] == [(3, 0), (3, 2), (3, 4)]
    assert greedy["entries"][0]["speedup"] == 1 and greedy["best_k"].keys() == {"3"}
    assert greedy["num_speculative_tokens_per_batch_size"] == [[1, 3, greedy["best_k"]["3"]]]


def test_the_same_command_again_measures_nothing(report, arguments, monkeypatch):
    monkeypatch.setattr(reference, "measure", lambda *_: pytest.fail("measured again"))
    assert main(arguments) == 0
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        main([*arguments, "eval.max_tokens=13"])


def test_typical_acceptance_is_marked_as_not_lossless(arguments, tmp_path, capsys):
    changes = [
        "eval.verification=typical",
        f"eval.dir={tmp_path}",
        "eval.max_prompts=1",
        "eval.temperature=[1.0]",
        "eval.methods=[head]",
        "eval.k=[2]",
    ]
    assert main([*arguments, *changes, "eval.tree=chain"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(run["method"], run["lossless"]) for run in report["runs"]] == [("baseline", True), ("eagle3", False)]
    assert any("NOT lossless" in note for note in report["notes"])
    (warning,) = (line for line in report["findings"] if "NOT lossless" in line)
    assert warning.startswith("eagle3 k=2") and "NOT lossless" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["eval.verification=block", "eval.draft_sample_method=greedy"], "draft_sample_method=probabilistic"),
        (["eval.engine=vllm", "eval.verification=typical", "eval.tree=chain"], "set eval.engine=reference"),
        (["eval.tree=static"], "tree_paths"),
        (["eval.tree=chain", "eval.tree_paths=[[0]]"], "tree_paths"),
        (["eval.tree=static", "eval.tree_paths=[[0], [1, 0]]"], "orphan"),
        (["eval.tree_top_k=201"], "wider than the head's vocabulary of 200"),
        (["eval.tree_nodes=1"], "leaves no room"),
        (["eval.k=[0]"], "greater than 0"),
        (["eval.max_model_len=20"], "the longest prompt"),
        (["eval.tree=medusa"], "lower eval.max_prompts"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_measured(changes, says, arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(reference, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(reference, "calibrate", lambda *_: pytest.fail("calibrated"))
    assert main([*arguments, f"eval.dir={tmp_path}", "eval.max_prompts=null", *changes]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["eval.tree_top_k=129"], "wider than the head's vocabulary of 128"),
        (["eval.tree_nodes=1"], "leaves no room"),
        (["eval.max_prompts=null"], "lower eval.max_prompts"),
    ],
)
def test_a_medusa_tree_that_does_not_fit_is_refused_before_the_target_runs(changes, says, recipe_arguments, exported, capsys, monkeypatch):
    monkeypatch.setattr(reference, "decode", lambda *_, **__: pytest.fail("decoded"))
    asked = ["eval.engine=reference", "eval.tree=medusa", f"export.dir={exported}"]
    assert main(recipe_arguments(*asked, *changes)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["tokenwise", "typical"])
def test_medusas_tree_from_calibration_to_report(rule, recipe_arguments, exported):
    """Calibrated, grown and verified by the command that users run; typical acceptance is told to be not lossless."""
    sizes = ["eval.tree_depth=3", "eval.tree_nodes=8", "eval.tree_top_k=3", "eval.k=[2]", "eval.max_tokens=6", "eval.max_prompts=2"]
    asked = [
        "eval.engine=reference",
        "eval.tree=medusa",
        f"eval.verification={rule}",
        "eval.temperature=[0.0,1.0]",
        f"export.dir={exported}",
    ]
    command = recipe_arguments(*asked, *sizes)
    assert main(command) == 0
    report = json.loads((load_recipe(command[0], command[1:]).report_dir / "report.json").read_text())
    trees = [run for run in report["runs"] if run["method"] == "eagle3, medusa tree"]
    assert [(run["temperature"], run["lossless"]) for run in trees] == [(0.0, True), (1.0, rule == "tokenwise")]
    assert trees[0]["identical_to_baseline"] == "2/2" and trees[0]["not_argmax"] == []
    assert all(run["num_draft_tokens"] == 7 * run["num_drafts"] > 0 for run in trees)


@pytest.mark.parametrize(("field", "value", "says"), [("fingerprint", "0123", "fingerprint 0123"), ("hidden_size", 128, "of width 128")])
def test_an_export_for_another_target_is_refused(field, value, says, arguments, trained_export, capsys, tmp_path):
    shutil.copytree(trained_export, tmp_path / "export")
    meta = json.loads((tmp_path / "export" / "headstart.json").read_text())
    meta["target"][field] = value
    (tmp_path / "export" / "headstart.json").write_text(json.dumps(meta))
    assert main([*arguments, f"export.dir={tmp_path / 'export'}"]) == 2
    assert says in capsys.readouterr().err


# --- Records ------------------------------------------------------------------------------------------------------------------------


def test_a_record_tells_a_request_as_vllm_does():
    """Only rounds with drafts are listed; reading along `kept` finds the others again. A tree has a depth of its own."""
    rounds = [Round(2, 7, 3, 3), Round(0, 0, 0, 1), Round(0, 7, 3, 1), Round(3, 7, 3, 2)]  # the last one trimmed at EOS
    request = Request([1, 2], TorchDice(torch.Generator()), [1, 2, *range(10, 18)], rounds=rounds, finish_reason="stop")
    record = reference.request_of(request)
    assert (record["accepted"], record["drafted"], record["kept"]) == ([2, 0, 3], [7, 7, 7], [1, 3, 1, 1, 2])
    read = rounds_of(record)  # which of two rounds without acceptance had a draft is not told, and no figure depends on it
    assert (read.accepted, read.kept, count([read])) == (request.counts.accepted, request.counts.kept, count([request.counts]))
    assert record["output_ids"] == list(range(10, 18)) and record["prompt_tokens"] == 2


def test_candidate_coverage_is_the_share_of_nodes_whose_children_hold_the_targets_token(model, trained_head, prompts):
    drafter, settings = Eagle2Drafter(trained_head, model, nodes=12, depth=3, top_k=3), Settings(max_tokens=40, max_length=512)
    decoded = decode(model, prompts, drafter, settings, concurrency=4)
    figures = reference.record_of(decoded, drafter, settings)["figures"]
    # At temperature 0 a node is covered exactly where verification went on below it.
    visited = sum(r.accepted + (r.accepted < r.depth) for request in decoded.requests for r in request.rounds)
    accepted = sum(r.accepted for request in decoded.requests for r in request.rounds)
    assert figures["candidate_coverage"] == pytest.approx(accepted / visited, abs=0.02)  # a path may end at a leaf above the depth
    written = [token for request in decoded.requests for token in request.answer[1:]]
    known = set(trained_head.vocab.ids.tolist())
    assert figures["draft_vocab_coverage"] == pytest.approx(sum(token in known for token in written) / len(written))


def test_answers_end_where_vllm_ends_them(recipe_arguments, model, monkeypatch):
    recipe = load_recipe(*(lambda path, *rest: (path, list(rest)))(*recipe_arguments()))
    own = load_tokenizer(recipe.target).eos_token_id
    monkeypatch.setattr(model.generation_config, "eos_token_id", [7, 9])
    assert reference.eos_ids(recipe, model) == {own, 7, 9}


# --- Medusa's calibration -------------------------------------------------------------------------------------------------------------


def test_calibration_counts_ranks_of_the_targets_own_tokens(model, parts, greedy, prompts):
    """Against counting by hand over all positions at once (METHODS §1.5); fresh heads say what the target's LM head says."""
    head = MedusaHead(MedusaBlock(num_heads=2), parts, DraftVocab(torch.arange(260), 260)).eval()
    answers = [(prompt, greedy(prompt, 20)) for prompt in prompts]
    # A label of head i is the token 2 + i places on; some answers repeat, so that ranks are hit at all.
    answers.append((prompts[0], [50, 60] * 10))
    accuracies = reference.calibrate(model, HeadDrafter(head, model, 2), answers, ranks=40)
    hits, counts = torch.zeros(2, 40), torch.zeros(2)
    for prompt, answer in answers:
        tokens = prompt + answer
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        for t in range(len(prompt) - 1, len(tokens)):
            for i in range(2):
                if t + 2 + i < len(tokens):
                    counts[i] += 1
                    hits[i] += logits[t].topk(40).indices == tokens[t + 2 + i]
    assert hits.sum() > 0
    torch.testing.assert_close(accuracies, (hits / counts[:, None]).double())


# --- Parity with vLLM ------------------------------------------------------------------------------------------------------------------


def told(output: list[int], accepted: list[int], drafted: int = 3) -> dict[str, Any]:
    return {"output_ids": output, "accepted": accepted, "drafted": [drafted] * len(accepted), "kept": [1, *(a + 1 for a in accepted)]}


SAME = told(list(range(8)), [2, 3])


@pytest.mark.parametrize(
    ("theirs", "token", "accepted", "same_text"),
    [
        (told(list(range(8)), [2, 1, 1]), 5, (3, 1), True),  # the second round starts at token 4; both accept 4, vLLM not 5
        (told([0, 1, 2, 3, 4, 99, 98, 97], [2, 0, 1, 0]), 4, (3, 0), False),
        (told([0, 1, 77, 3, 4, 5, 6, 7], [2, 3]), 2, (None, None), False),  # equal counts, other text
        (told(list(range(4)), [2]), 4, (3, None), False),  # one answer is longer
    ],
)
def test_a_difference_is_found_at_its_token(theirs, token, accepted, same_text):
    parity = compare_requests([SAME, SAME], [SAME, theirs], lambda request, token: 0.25)
    (difference,) = parity.differences
    assert (difference.request, difference.token, difference.accepted, difference.same_text) == (1, token, accepted, same_text)
    assert difference.margin == 0.25 and parity.equal_share == 0.5
    assert f"request 1: at token {token}" in parity.lines()[1]


def test_equal_requests_are_equal_and_ngram_misses_are_rounds():
    missed = told(list(range(6)), [2]) | {"kept": [1, 1, 3, 1]}
    parity = compare_requests([SAME, missed], [SAME, missed])
    assert parity.equal_share == 1 and parity.gap == 0 and parity.acceptance_length == pytest.approx((10 / 3, 10 / 3))


def test_what_vllm_does_not_run_is_passed_over(monkeypatch, capsys):
    """PARD-2's chains with the target's states have no counterpart in vLLM; the others are compared all the same."""
    cell = {"k": 3, "prompts": "a", "temperature": 0.0, "concurrency": 1, "requests": [SAME]}
    ours = [cell | {"method": "pard"}, cell | {"method": "pard, target states"}]
    measured = reference.Measured(ours, {"a": [[1]]}, None, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr("eval.reference.measure_cells", lambda recipe, path: measured)
    monkeypatch.setattr("eval.prepare.engines_of", lambda recipe, meta: ([], {}))
    monkeypatch.setattr("eval.prepare.make_job", lambda *args: None)
    monkeypatch.setattr("eval.vllm_engine.run_cells", lambda job, file, on_tick, impossible: ours[:1])
    assert compare_engines("recipes/debug/pard.yaml", []) == 0
    assert capsys.readouterr().out.count("requests (100%)") == 1


def test_a_head_that_vllm_does_not_run_has_no_parity(monkeypatch, capsys):
    monkeypatch.setattr("eval.reference.measure_cells", lambda recipe, path: pytest.fail("nothing has to be measured"))
    assert compare_engines("recipes/debug/mtp.yaml", ["head.shared=false"]) == 0
    assert "not compared: vLLM runs only the first MTP module" in capsys.readouterr().out


def test_the_margin_is_the_targets_at_that_token(model, greedy, prompts):
    answer = greedy(prompts[0], 6)
    logits = model(torch.tensor([prompts[0] + answer[:4]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert logit_margin(model, prompts, [{"output_ids": answer}])(0, 4) == pytest.approx(best - second, rel=1e-4)
    assert int(logits.argmax()) == answer[4]


# --- Speed, and the real target ----------------------------------------------------------------------------------------------------------


def test_bench_gives_equal_answers_by_every_contender(recipe_arguments, trained_export):
    path, *rest = recipe_arguments(f"export.dir={trained_export}", "eval.max_tokens=10", "eval.tree_depth=3", "eval.tree_nodes=12")
    lines = bench(load_recipe(path, rest), [[10, 11, 12, 13], [40, 41, 40, 41, 40]], k=2, layers=2)
    assert len(lines) == 8 and all(line["equal_answers"] == 2 and line["tokens"] == 20 for line in lines)
    with pytest.raises(RecipeError, match="has 4 layers"):
        bench(load_recipe(path, rest), [[1]], k=2, layers=5)


@pytest.mark.slow
def test_smollm2_greedy_output_is_the_targets_own():
    """The default target in fp32 with its trained head: chain and EAGLE-2 tree equal transformers' generate, token for token."""
    recipe = load_recipe("recipes/smollm2-135m/eagle3.yaml", ["eval.max_prompts=4"])
    if not (recipe.export_dir / "headstart.json").is_file():
        pytest.skip(f"no export at {recipe.export_dir}; train it first")
    target, model = read_target(recipe.target), load_target_model(recipe.target)
    head = load_exported_head(recipe.export_dir, target)[0]
    prompts = next(iter(reference.read_prompts(recipe).values()))
    settings = Settings(max_tokens=48, max_length=1024, eos_ids=reference.eos_ids(recipe, model))
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)  # type: ignore[operator]
        expected.append(out[0, len(prompt) :].tolist())
    for drafter in (NoDrafter(), HeadDrafter(head, model, 5), Eagle2Drafter(head, model)):
        decoded = decode(model, prompts, drafter, settings, concurrency=2)
        assert [request.answer for request in decoded.requests] == expected

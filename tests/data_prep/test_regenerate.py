"""The target writes answers: what is asked, what is written, and what a killed run leaves behind."""

import argparse
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig

from data_prep.answering import ENGINES, cpu_options, end_of_turn_ids, vllm_environment
from data_prep.conversations import read_conversations
from data_prep.options import add_engine_arguments, engine_options, settings_of, target_of
from data_prep.regenerate import main, recover, regenerate, regenerate_recipe
from data_prep.render import render, render_prompt
from data_prep.rows import make_rows
from heads.target import kv_cache_bytes, load_target_model, load_tokenizer
from recipes.errors import DataError
from recipes.schema import Data, Regenerate, Target, parse_recipe

ROOT = Path(__file__).parents[2]
QUESTIONS = ["alpha?", "Tell me of beta.", "c", "What is delta, please?", "e e e e", "zeta"]


@pytest.fixture
def target(tiny_target):
    return Target(path=str(tiny_target), dtype="float32")


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "category": "x", "prompt": text} for i, text in enumerate(QUESTIONS)])


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def options(**values):
    return Regenerate(**{"engine": "hf", "max_new_tokens": 8, "concurrency": 4} | values)


@pytest.fixture
def answered(monkeypatch):
    """Ids of the conversations that an engine was asked about, call by call."""
    asked = []
    engine = ENGINES["hf"]

    def recording(todo, *rest):
        asked.append(sorted(job.conversation.id for job in todo))
        yield from engine(todo, *rest)

    monkeypatch.setitem(ENGINES, "hf", recording)
    return asked


def test_answers_are_the_targets_own_greedy_decoding(target, prompts, tmp_path):
    output = regenerate([prompts], target, options(), tmp_path / "answers.jsonl")
    rows = read(output)
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(6)]  # in the order of the prompts, whatever finished first
    model, tokenizer = load_target_model(target), load_tokenizer(target)
    stop = end_of_turn_ids(target, tokenizer)
    for row in rows:
        ids = torch.tensor([render_prompt(row["messages"][:1], tokenizer)])
        with torch.no_grad():
            for _ in range(len(row["answer_ids"])):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        assert row["answer_ids"] == ids[0, -len(row["answer_ids"]) :].tolist()
        assert row["temperature"] == 0.0 and row["target"] == target.path
        ended = row["answer_ids"][-1] in stop
        assert row["finish_reason"] == ("stop" if ended else "length") and (ended or len(row["answer_ids"]) == 8)


def test_what_the_targets_generation_config_asks_for_is_left_out(tiny_target, target, prompts, tmp_path):
    """Qwen2.5's asks for a repetition penalty: what is decoded with it is not greedy, and vLLM's answers are without it."""
    shutil.copytree(tiny_target, tmp_path / "target")
    asked = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_length": 300, "do_sample": True, "temperature": 0.7, "top_k": 3}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": 258, **asked}))
    penal = Target(path=str(tmp_path / "target"), dtype="float32")
    model = load_target_model(penal)
    assert model.generation_config.repetition_penalty == 1.3
    for temperature in (0.0, 1.0):
        settings = options(temperature=temperature, max_new_tokens=24)
        plain = read(regenerate([prompts], target, settings, tmp_path / f"plain{temperature}.jsonl"))
        rows = read(regenerate([prompts], penal, settings, tmp_path / f"penal{temperature}.jsonl"))
        assert [row["answer_ids"] for row in rows] == [row["answer_ids"] for row in plain]
        if temperature:
            continue
        for row in rows:
            prompt = render_prompt(row["messages"][:1], load_tokenizer(penal))
            logits = model(torch.tensor([prompt + row["answer_ids"]])).logits[0, len(prompt) - 1 : -1]
            assert row["answer_ids"] == logits.argmax(-1).tolist()


def test_rows_train_on_the_generated_ids(target, prompts, tmp_path):
    output = regenerate([prompts], target, options(temperature=1.0), tmp_path / "answers.jsonl")
    tokenizer = load_tokenizer(target)
    for conversation, raw in zip(read_conversations([str(output)]), read(output), strict=True):
        row = render(conversation, tokenizer, Data(prompts=["a.jsonl"]))
        assert row.exact and not conversation.greedy
        assert row.input_ids == render_prompt(raw["messages"][:1], tokenizer) + raw["answer_ids"]


def test_a_torn_last_line_is_written_again(target, prompts, tmp_path, answered):
    """A killed process loses what was in flight and nothing else; finished rows are not done again."""
    output = tmp_path / "answers.jsonl"
    whole = regenerate([prompts], target, options(), output).read_bytes()
    lines = whole.splitlines(keepends=True)
    for torn in (b"", lines[3][:40], lines[3][:-1]):  # between two rows, inside a row, before the line break
        output.write_bytes(b"".join(lines[:3]) + torn)
        assert regenerate([prompts], target, options(), output).read_bytes() == whole
        assert answered[-1] == ["p3", "p4", "p5"]
    calls = len(answered)
    assert regenerate([prompts], target, options(), output).read_bytes() == whole
    assert len(answered) == calls  # nothing was left to do


def test_nothing_behind_a_corrupt_line_is_taken_for_whole(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'{"key": "a"}\n{"key": "b", \x00\x00\n{"key": "c"}\n')
    assert recover(file) == {"a"}
    assert file.read_bytes() == b'{"key": "a"}\n'


def test_killed_process_goes_on(target, tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "prompt": f"question {i}"} for i in range(40)])
    output = tmp_path / "answers.jsonl"
    command = [sys.executable, "-m", "data_prep.regenerate", "--target", target.path, "--prompts", prompts, "--output", str(output)]
    command += ["--engine", "hf", "--concurrency", "1", "--max-new-tokens", "24", "--dtype", "float32"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)  # importing transformers takes seconds, on a busy machine minutes
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [line for line in output.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert 3 <= len(before) < 40
    with open(output, "ab") as f:
        f.write(b'{"id": "p39", "cat')
    rows = read(regenerate([prompts], target, options(max_new_tokens=24), output))
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(40)]
    after = set(output.read_bytes().splitlines(keepends=True))
    assert set(before) <= after


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens=8, now max_new_tokens=9"),
        ({"temperature": 0.5}, "temperature=0.0, now temperature=0.5"),
        ({"seed": 1}, "seed=0, now seed=1"),
    ],
    ids=str,
)
def test_other_settings_are_not_mixed(target, prompts, tmp_path, change, said):
    """B12: both values and the remedy; the engine and the number of requests in flight may change."""
    output = regenerate([prompts], target, options(), tmp_path / "answers.jsonl")
    with pytest.raises(DataError, match=said):
        regenerate([prompts], target, options(**change), output)
    regenerate([prompts], target, options(concurrency=2), output)


def test_a_run_that_answered_nothing_binds_nobody(target, prompts, tmp_path):
    """A wrong file name in the prompts can be mended without deleting anything."""
    output = tmp_path / "answers.jsonl"
    with pytest.raises(DataError, match="no file or folder"):
        regenerate([str(tmp_path / "typo.jsonl")], target, options(), output)
    assert len(read(regenerate([prompts], target, options(), output))) == 6
    with pytest.raises(DataError, match="was begun with prompts="):
        regenerate([prompts, prompts], target, options(), output)


def test_other_template_is_not_mixed(target, prompts, tmp_path):
    """B12: the text of the chat template is part of the settings."""
    output = regenerate([prompts], target, options(), tmp_path / "answers.jsonl")
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="chat_template="):
        regenerate([prompts], target, options(), output, chat_template=str(template))


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.jsonl.gz"])
def test_a_file_of_unknown_origin_is_not_touched(target, prompts, tmp_path, name):
    output = tmp_path / name
    output.write_text("precious\n")
    with pytest.raises(DataError, match=r"answers.jsonl.settings.json, which says how it was made, does not"):
        regenerate([prompts], target, options(), output)
    assert output.read_text() == "precious\n"


def test_added_prompts_are_answered_and_removed_ones_left_out(target, tmp_path, answered):
    rows = [{"id": f"p{i}", "prompt": text} for i, text in enumerate(QUESTIONS)]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    regenerate([write(prompts, rows[:4])], target, options(), output)
    regenerate([write(prompts, rows[2:][::-1])], target, options(), output)
    assert answered == [["p0", "p1", "p2", "p3"], ["p4", "p5"]]
    assert [row["id"] for row in read(output)] == ["p5", "p4", "p3", "p2"]


def test_fewer_rows_for_a_try_lose_nothing(target, prompts, tmp_path, answered):
    output = regenerate([prompts], target, options(), tmp_path / "answers.jsonl")
    regenerate([prompts], target, options(), output, max_rows=2)
    regenerate([prompts], target, options(), output)
    assert len(answered) == 1 and len(read(output)) == 6


def test_greedy_share_goes_by_the_prompt(target, tmp_path):
    rows = [{"id": f"p{i}", "prompt": f"question {i}"} for i in range(64)]
    settings = options(temperature=0.8, greedy_share=0.5, max_new_tokens=1, concurrency=64)
    first = read(regenerate([write(tmp_path / "a.jsonl", rows)], target, settings, tmp_path / "1.jsonl"))
    random.shuffle(rows)
    second = read(regenerate([write(tmp_path / "b.jsonl", rows)], target, settings, tmp_path / "2.jsonl"))
    chosen = {row["id"]: row["temperature"] for row in first}
    assert chosen == {row["id"]: row["temperature"] for row in second}
    counts = Counter(chosen.values())
    assert set(counts) == {0.0, 0.8} and min(counts.values()) >= 20


def test_greedy_rows_stay_greedy_beside_sampled_ones(target, prompts, tmp_path):
    greedy = read(regenerate([prompts], target, options(), tmp_path / "greedy.jsonl"))
    mixed = read(regenerate([prompts], target, options(temperature=5.0, greedy_share=0.6), tmp_path / "mixed.jsonl"))
    same = {row["temperature"]: [] for row in mixed}
    for one, other in zip(greedy, mixed, strict=True):
        same[other["temperature"]].append(one["answer_ids"] == other["answer_ids"])
    assert all(same[0.0]) and not any(same[5.0])


CHAT = [("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"), ("user", "q3")]


@pytest.mark.parametrize("every_turn", [False, True])
def test_turns(target, tmp_path, every_turn):
    """Only the last answer is new, or each in order, built on the target's own."""
    prompts = write(tmp_path / "p.jsonl", [{"id": "c", "messages": [{"role": r, "content": c} for r, c in CHAT]}])
    (row,) = read(regenerate([prompts], target, options(every_turn=every_turn, max_new_tokens=4), tmp_path / "answers.jsonl"))
    messages = row["messages"]
    contents = [m["content"] for m in messages if m["role"] != "assistant"]
    if every_turn and row["finish_reason"] == "length" and len(messages) < 7:  # an unfinished answer ends the conversation
        assert contents == ["s", "q1"] and messages[-1]["role"] == "assistant"
    else:
        assert contents == ["s", "q1", "q2", "q3"]
        assert [m["role"] for m in messages] == ["system"] + ["user", "assistant"] * 3
    tokenizer = load_tokenizer(target)
    model, ids = load_target_model(target), torch.tensor([render_prompt(messages[:-1], tokenizer)])
    assert row["answer_ids"][0] == model(ids).logits[0, -1].argmax().item()
    if not every_turn:
        assert messages[2]["content"] == "a1" and messages[4]["content"] == "a2" and messages[6]["content"] != "a2"


@pytest.fixture
def echo(monkeypatch):
    """An engine that always ends its answers: <question>."""

    def answers(todo, target, settings, stop_ids, context):
        while todo:
            job = todo.popleft()
            yield job, [*f"<{job.messages[-1]['content']}>".encode(), stop_ids[0]], "stop"

    monkeypatch.setitem(ENGINES, "hf", answers)


def test_every_turn_is_answered_in_order(target, tmp_path, echo):
    """The second question is asked behind the first answer."""
    prompts = write(
        tmp_path / "p.jsonl", [{"id": "c", "messages": [{"role": r, "content": c} for r, c in CHAT]}, {"id": "d", "prompt": "x"}]
    )
    rows = read(regenerate([prompts], target, options(every_turn=True), tmp_path / "answers.jsonl"))
    assert [m["content"] for m in rows[0]["messages"]] == ["s", "q1", "<q1>", "q2", "<q2>", "q3", "<q3>"]
    assert [m["content"] for m in rows[1]["messages"]] == ["x", "<x>"]


@pytest.mark.parametrize(
    ("every_turn", "supervise", "greedy"),
    [
        (True, "assistant", [1, 1]),
        (True, "last_assistant", [1, 1]),
        (True, "all", [0, 0]),  # the target wrote no question
        (False, "assistant", [0, 1]),  # a1 and a2 are somebody else's
        (False, "last_assistant", [1, 1]),
    ],
)
def test_a_row_is_greedy_where_all_its_supervised_answers_are(target, tmp_path, echo, every_turn, supervise, greedy):
    rows = [{"messages": [{"role": r, "content": c} for r, c in CHAT]}, {"prompt": "x"}]
    output = regenerate([write(tmp_path / "p.jsonl", rows)], target, options(every_turn=every_turn), tmp_path / "answers.jsonl")
    data, tokenizer = Data(prompts=["a.jsonl"], supervise=supervise), load_tokenizer(target)
    assert make_rows([str(output)], data, tokenizer)[0].greedy.tolist() == greedy
    first, second = read(output)
    assert ("earlier_answer_ids" in first) == every_turn and "earlier_answer_ids" not in second
    if (every_turn, supervise) == (True, "assistant"):
        first["earlier_answer_ids"][1][0] += 1  # the text is tokenised to other tokens than the target wrote
        assert make_rows([write(output, [first, second])], data, tokenizer)[0].greedy.tolist() == [0, 1]
        first["earlier_answer_ids"] = None
        assert make_rows([write(output, [first, second])], data, tokenizer)[0].greedy.tolist() == [0, 1]


def test_a_later_turn_that_cannot_be_asked_ends_its_conversation(target, tmp_path, echo, answered, capsys):
    """A template that refuses a system message in the middle; a question that does not fit: what was answered is kept and counted."""
    template = tmp_path / "strict.jinja"
    refuse = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    template.write_text("{% for m in messages %}" + refuse + "<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    asked = [("user", "q1"), ("assistant", "a1"), ("system", "s"), ("user", "q2")], [*CHAT[:3], ("user", "long " * 200)], CHAT[:4]
    rows = [{"id": str(i), "messages": [{"role": r, "content": c} for r, c in chat]} for i, chat in enumerate(asked)]
    prompts, output = write(tmp_path / "p.jsonl", rows), tmp_path / "answers.jsonl"
    for _ in range(2):  # the second time nothing is left to do
        got = read(regenerate([prompts], target, options(every_turn=True), output, chat_template=str(template)))
        assert [m["content"] for m in got[0]["messages"]] == ["q1", "<q1>"] and got[0]["answer_ids"][:4] == list(b"<q1>")
        assert [m["content"] for m in got[1]["messages"]] == ["s", "q1", "<q1>"]
        assert [m["content"] for m in got[2]["messages"]] == ["s", "q1", "<q1>", "q2", "<q2>"]
    said = capsys.readouterr().err
    assert said.count("note: 1 rows: ended before a later turn: template_error: System message must be at the beginning\n") == 1
    assert said.count("note: 1 rows: ended before a later turn: prompt_too_long\n") == 1
    assert len(answered) == 1


def test_prompts_that_cannot_be_answered_are_counted(target, tmp_path, capsys):
    """B08: reasons are counted; with nothing left it is an error."""
    rows = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "long " * 200}, {"text": "rendered"}, {"messages": []}]
    output = regenerate([write(tmp_path / "p.jsonl", rows)], target, options(), tmp_path / "answers.jsonl")
    assert len(read(output)) == 1
    assert "kept 1 / skipped 4" in (said := capsys.readouterr().err)
    for reason in ("duplicate_prompt", "prompt_too_long", "already_rendered_text", "empty"):
        assert f"{reason}=1" in said
    with pytest.raises(DataError, match="kept 0 / skipped 3"):
        regenerate([write(tmp_path / "q.jsonl", rows[2:])], target, options(), tmp_path / "none.jsonl")


def test_packed_output_is_the_same_bytes_each_time(target, prompts, tmp_path, answered):
    one = regenerate([prompts], target, options(), tmp_path / "one.jsonl.gz")
    two = regenerate([prompts], target, options(concurrency=1), tmp_path / "two.jsonl.gz")
    assert one.read_bytes() == two.read_bytes()
    assert not (tmp_path / "one.jsonl").exists() and len(read(one)) == 6
    calls = len(answered)
    assert regenerate([prompts], target, options(), one).read_bytes() == two.read_bytes()
    assert len(answered) == calls


def test_time_limit_keeps_what_is_finished(target, prompts, tmp_path):
    output = tmp_path / "answers.jsonl.gz"
    regenerate([prompts], target, options(concurrency=1), output, max_minutes=1e-9)
    assert len(read(output)) == 1
    assert [row["id"] for row in read(regenerate([prompts], target, options(), output))] == [f"p{i}" for i in range(6)]


def test_recipe_writes_into_its_feature_folder(target, prompts, tmp_path):
    recipe = parse_recipe(
        {
            "name": "t",
            "method": "eagle3",
            "target": target.model_dump(),
            "data": {"prompts": [prompts], "max_rows": 2, "regenerate": {"engine": "hf", "max_new_tokens": 2}},
            "features": {"dir": str(tmp_path / "features")},
            "head": {},
            "train": {"max_steps": 1},
        }
    )
    path = regenerate_recipe(recipe)
    assert path == tmp_path / "features" / "answers.jsonl" and len(read(path)) == 2


def test_every_end_of_turn_is_known(tiny_target, tmp_path, target):
    """Llama 3 has several: generation_config.json lists them, the tokenizer names one."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_target / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    tokenizer = load_tokenizer(target)
    assert end_of_turn_ids(Target(path=str(tmp_path)), tokenizer) == sorted({3, 9, tokenizer.eos_token_id})


def test_answers_end_at_their_end_of_turn(tiny_target, tmp_path, prompts, target):
    """The end-of-turn token is kept in the ids, not in the text, and nothing that a batch was padded with comes behind it."""
    long = {row["id"]: row["answer_ids"] for row in read(regenerate([prompts], target, options(), tmp_path / "long.jsonl"))}
    stop = long["p0"][2]
    shutil.copytree(tiny_target, tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    chatty = Target(path=str(tmp_path / "target"), dtype="float32")
    rows = read(regenerate([prompts], chatty, options(), tmp_path / "short.jsonl"))
    tokenizer = load_tokenizer(target)
    for row in rows:
        ended = stop in long[row["id"]]
        expected = long[row["id"]][: long[row["id"]].index(stop) + 1] if ended else long[row["id"]]
        assert row["answer_ids"] == expected and row["finish_reason"] == ("stop" if ended else "length")
        assert row["messages"][-1]["content"] == tokenizer.decode(expected[:-1] if ended else expected)
    assert len({row["finish_reason"] for row in rows}) == 2


def test_command_says_what_is_wrong(prompts, tmp_path, capsys):
    assert main(["--target", "tiny:nothing", "--prompts", prompts, "--output", str(tmp_path / "a.jsonl")]) == 1
    assert "error: target.path: 'tiny:nothing' is not one of" in capsys.readouterr().err


def test_template_kwargs_are_part_of_the_settings(target, prompts, tmp_path):
    """They change what is asked, so a file begun with others is refused (B12); without any it goes on as before the key was there."""
    template, output = tmp_path / "greeting.jinja", tmp_path / "answers.jsonl"
    template.write_text("{{ greeting }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    plain = read(regenerate([prompts], target, options(), output, chat_template=str(template)))
    assert "template_kwargs" not in json.loads((tmp_path / "answers.jsonl.settings.json").read_text())
    with pytest.raises(DataError, match=r"template_kwargs=None, now template_kwargs={'greeting': 'Hello'}"):
        regenerate([prompts], target, options(), output, chat_template=str(template), template_kwargs={"greeting": "Hello"})
    other = regenerate(
        [prompts], target, options(), tmp_path / "b.jsonl", chat_template=str(template), template_kwargs={"greeting": "Hello"}
    )
    assert [row["answer_ids"] for row in read(other)] != [row["answer_ids"] for row in plain]


@pytest.mark.parametrize("name", ["folder", "file/a.jsonl"])
def test_an_output_that_cannot_be_written_is_said_before_the_work(target, prompts, tmp_path, name, answered):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=f"cannot write {tmp_path / name}: .*Give a file"):
        regenerate([prompts], target, options(), tmp_path / name)
    assert not answered


# ---------------------------------------------------------------- options of the command


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return parser.parse_args(words)


GIVEN = ["--target", "a/b", "--revision", "v1", "--dtype", "float16", "--attn", "eager", "--tp", "2", "--trust-remote-code"]
GIVEN += ["--chat-template", "my template.jinja", "--template-kwargs", '{"enable_thinking": false, "budget": 3}']
GIVEN += ["--engine", "hf", "--concurrency", "7"]


def test_options_are_the_keys_of_the_recipe():
    assert target_of(parsed("--target", "a/b")) == Target(path="a/b")  # preset like the recipe's, bfloat16 included
    args = parsed(*GIVEN)
    assert target_of(args) == Target(path="a/b", revision="v1", dtype="float16", attn="eager", tp=2, trust_remote_code=True)
    assert settings_of(args) == Regenerate(engine="hf", concurrency=7)
    assert args.template_kwargs == {"enable_thinking": False, "budget": 3} and args.template_kwargs["enable_thinking"] is False
    assert engine_options(args) == GIVEN and engine_options(parsed("--target", "a/b")) == ["--target", "a/b"]


@pytest.mark.parametrize("text", ["enable_thinking=false", "[1]", '{"a": {"b": 1}}'])
def test_template_kwargs_must_be_an_object_of_plain_values(text, capsys):
    with pytest.raises(SystemExit):
        parsed("--target", "a/b", "--template-kwargs", text)
    assert "is no JSON object of plain values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"), [("--tp=0", "--tp 0: Input should be greater"), ("--temperature=-1", "--temperature -1.0: Input")]
)
def test_a_value_out_of_range_is_one_line(target, prompts, tmp_path, capsys, option, said):
    assert main(["--target", target.path, "--prompts", prompts, "--output", str(tmp_path / "a.jsonl"), option]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {said}") and err.count("\n") == 1


# ---------------------------------------------------------------- vLLM


def test_vllm_runs_in_a_process_of_its_own_on_a_gpu_alone(monkeypatch):
    """There its memory is free again once it has ended; a CPU engine gets the cores that this process may use, not all there are."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 5})
    assert vllm_environment(cpu=True)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and vllm_environment(cpu=True)["OMP_NUM_THREADS"] == "3"
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"} & vllm_environment(cpu=False).keys()


@pytest.mark.parametrize("name", ["gpt_neox", "llama"])
def test_cache_of_a_family_without_kv_heads(tmp_path, name):
    """GPT-NeoX's config names neither KV heads nor a head size."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    config = GPTNeoXConfig(**sizes) if name == "gpt_neox" else LlamaConfig(**sizes, num_key_value_heads=2, head_dim=32)
    assert hasattr(config, "num_key_value_heads") == (name == "llama")
    config.save_pretrained(tmp_path)
    assert kv_cache_bytes(config, "bfloat16") == 2 * 3 * 64 * 2  # keys and values, layers, 4 x 16 or 2 x 32, bytes
    assert cpu_options(Target(path=str(tmp_path), dtype="float32"), 1000, 872)["kv_cache_memory_bytes"] == 23 * 2**26  # 1,536,000,000


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_writes_the_same_greedy_answers(target, prompts, tmp_path):
    """In a process of its own: vLLM changes global settings of torch. One request more than fits at once, seeded sampling among them."""
    output = tmp_path / "vllm.jsonl"
    command = [sys.executable, "-m", "data_prep.regenerate", "--target", target.path, "--prompts", prompts, "--output", str(output)]
    command += ["--max-new-tokens", "8", "--concurrency", "5", "--temperature", "0.7", "--greedy-share", "0.6", "--dtype", "float32"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=300)
    rows = read(output)
    same = {
        row["id"]: row for row in read(regenerate([prompts], target, options(temperature=0.7, greedy_share=0.6), tmp_path / "hf.jsonl"))
    }
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(6)]
    assert {row["temperature"] for row in rows} == {0.0, 0.7}
    for row in rows:
        assert row["temperature"] == same[row["id"]]["temperature"]
        if row["temperature"] == 0.0:
            assert row == same[row["id"]]

"""Prompts that the target writes itself: where its text begins and ends, what is kept, and what is shipped."""

import gzip
import json
import shlex

import pytest

from data_prep.answering import ENGINES
from data_prep.conversations import Tally, read_conversations
from data_prep.embedded.make_magpie import EXCLUDE, OUTPUT, without_held_out_subjects
from data_prep.magpie import draw_prompts, main, write_rows
from data_prep.prompt_sets import normalised, questions_of, word_runs
from data_prep.render import chat_tokenizer, question_header, render_prompt
from recipes.errors import DataError
from recipes.schema import Regenerate, Target

REAL = Target(path="embedded:smollm2-135m", dtype="float32")


def options(**values):
    return Regenerate(**{"engine": "hf", "temperature": 0.9, "max_new_tokens": 8, "concurrency": 4} | values)


@pytest.fixture
def target(tiny_target):
    return Target(path=str(tiny_target), dtype="float32")


def shipped() -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(OUTPUT.read_bytes()).splitlines()]


def test_header_and_ending_are_what_the_template_puts_around_a_question(target):
    tokenizer = chat_tokenizer(target, None)
    header, ending = question_header(tokenizer)
    whole = render_prompt([{"role": "user", "content": "a question"}], tokenizer)
    assert whole[: len(header)] == header
    rest = tokenizer.decode(whole[len(header) :])
    assert rest.startswith("a question") and rest.removeprefix("a question").startswith(tokenizer.decode([ending]))


def test_a_template_that_changes_the_text_is_refused(target, tmp_path):
    template = tmp_path / "upper.jinja"
    template.write_text("{% for m in messages %}<{{ m.content | upper }}>{% endfor %}")
    with pytest.raises(DataError, match="as it is between two marks"):
        question_header(chat_tokenizer(target, template))


def test_a_target_that_never_ends_a_question_is_an_error_with_the_counts(target, tmp_path, capsys):
    output = tmp_path / "prompts.jsonl"
    assert main(["--target", target.path, "--draws", "5", "--output", str(output), "--engine", "hf", "--max-new-tokens", "4"]) == 1
    assert "none of 5 draws is a usable prompt (kept 0 / skipped 5 (unfinished=5))" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(("values", "draws", "message"), [({"temperature": 0.0}, 3, "again and again"), ({}, 0, "at least 1")])
def test_draws_that_make_no_sense_are_refused(target, values, draws, message):
    with pytest.raises(DataError, match=message):
        list(draw_prompts(target, options(**values), draws, []))


def test_every_draw_starts_behind_the_header_with_a_seed_of_its_own(target, monkeypatch):
    seen, engine = [], ENGINES["hf"]

    def spy(todo, *rest):
        seen.extend(todo)
        return engine(todo, *rest)

    monkeypatch.setitem(ENGINES, "hf", spy)
    tally = Tally()
    assert list(draw_prompts(target, options(), 6, [], tally=tally)) == []
    header, _ = question_header(chat_tokenizer(target, None))
    assert [job.prompt_ids for job in seen] == [header] * 6
    assert len({job.seed for job in seen}) == 6 and len({job.conversation.key for job in seen}) == 6
    assert tally.kept == 0 and tally.skipped.total() == 6


def test_the_next_command_carries_what_was_given(target, tmp_path, capsys, monkeypatch):
    """Everything that says which target, template and engine; nothing that is Magpie's own."""

    def questions(todo, target, settings, stop_ids, context):
        while todo:
            job = todo.popleft()
            yield job, [*f"What is {job.conversation.id}?".encode(), stop_ids[0]], "stop"

    monkeypatch.setitem(ENGINES, "hf", questions)
    template = tmp_path / "with a greeting.jinja"
    template.write_text("{{ greeting }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    given = ["--target", target.path, "--dtype", "float32", "--chat-template", str(template), "--template-kwargs", '{"greeting": "Hi"}']
    given += ["--engine", "hf", "--concurrency", "3"]
    output = tmp_path / "prompts.jsonl"
    assert main([*given, "--draws", "4", "--seed", "7", "--output", str(output)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: "))
    assert words == ["python", "-m", "data_prep.regenerate", *given, "--prompts", str(output), "--output", "answers.jsonl.gz"]


def test_the_template_and_its_variables_are_used(target, tmp_path, monkeypatch):
    seen, engine = [], ENGINES["hf"]
    monkeypatch.setitem(ENGINES, "hf", lambda todo, *rest: seen.extend(todo) or engine(todo, *rest))
    template = tmp_path / "greeting.jinja"
    template.write_text("{{ greeting }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    list(draw_prompts(target, options(), 1, [], chat_template=str(template), template_kwargs={"greeting": "Hi"}))
    assert seen[0].prompt_ids == [*b"Hi", 257]


@pytest.mark.slow
def test_the_real_target_writes_questions():
    tally = Tally()
    rows = list(draw_prompts(REAL, options(max_new_tokens=80, concurrency=16), 16, ["embedded:eval"], tally=tally))
    assert tally.kept == len(rows) >= 8, tally
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)
    assert not any("<|im_" in row["messages"][0]["content"] for row in rows)


def test_rows_are_written_in_the_order_of_their_draws_and_can_be_asked(tmp_path):
    rows = [{"id": f"magpie-{i:05d}", "category": "magpie", "messages": [{"role": "user", "content": f"What is {i}?"}]} for i in (2, 0, 1)]
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_rows(rows, tmp_path / name)
        back = list(read_conversations([str(tmp_path / name)], need_answer=False))
        assert [c.id for c in back] == ["magpie-00000", "magpie-00001", "magpie-00002"]


def test_shipped_prompts_share_nothing_with_the_prompts_that_are_measured_on():
    rows = shipped()
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(rows) >= 3000 and len({normalised(t) for t in texts}) == len(rows)
    assert without_held_out_subjects(rows) == rows
    held_out = {run for name in EXCLUDE for text in questions_of(name) for run in word_runs(text)}
    assert not [text for text in texts if word_runs(text) & held_out]

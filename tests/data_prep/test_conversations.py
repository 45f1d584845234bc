"""Rows of every shape and source, and what becomes of the bad ones."""

import gzip
import json
import time
from pathlib import Path

import pytest
import yaml

from data_prep import conversations
from data_prep.conversations import Reject, Tally, held_out, normalise, read_conversations
from recipes.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write_jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def turns(conversation):
    return [(m["role"], m["content"]) for m in conversation.messages]


@pytest.mark.parametrize(
    "row",
    [
        GOOD,
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "user", "value": "a"}, {"from": "chatgpt", "value": "b"}]},
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "output": "b"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]},
        {"messages": [*GOOD["messages"], {"role": "user", "content": "never answered"}]},
    ],
    ids=["openai", "sharegpt", "sharegpt_roles", "sharegpt_names", "alpaca", "alpaca_no_input", "parts", "unanswered_tail"],
)
def test_shapes(row):
    """B08: ShareGPT keys, OpenAI keys and Alpaca keys come to the same messages."""
    assert turns(normalise(row)) == [("user", "a"), ("assistant", "b")]


def test_system_and_input_are_kept():
    assert turns(normalise({"system": "s", "instruction": "a", "input": "x", "output": "b"})) == [
        ("system", "s"),
        ("user", "a\n\nx"),
        ("assistant", "b"),
    ]


def test_questions_without_answers():
    assert turns(normalise({"prompt": "a"}, need_answer=False)) == [("user", "a")]
    assert turns(normalise({"turns": ["a", "c"]}, need_answer=False)) == [("user", "a"), ("user", "c")]
    with pytest.raises(Reject, match="^no_assistant$"):
        normalise({"prompt": "a"})


def test_odd_role_sequences_are_counted(tmp_path):
    """B08: one bad row never kills the job; reasons are counted."""
    rows = [
        {"conversations": []},
        {"conversations": None},
        {"conversations": [{"role": "system", "content": "s"}]},
        {"conversations": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]},
        {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    tally = Tally()
    kept = list(read_conversations([write_jsonl(tmp_path / "rows.jsonl", rows)], tally=tally))
    assert [turns(c)[-1][1] for c in kept] == ["c", "b"]
    assert tally.summary() == "kept 2 / skipped 4 (empty=2, no_assistant=1, empty_answer=1)"
    assert f"first at {tmp_path / 'rows.jsonl'}:3" in tally.explain()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{torn", "bad_json"),
        ("[1, 2]", "not_a_mapping"),
        ("{}", "unknown_shape"),
        ({"messages": "a"}, "messages_not_a_list"),
        ({"messages": ["a"]}, "message_not_a_mapping"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown_role: narrator"),
        ({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "b"}]}, "empty_user_turn"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "no_user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "non_text_content"),
        ({"messages": [{"role": "user", "content": 3}]}, "non_text_content"),
        ({"text": " "}, "empty"),
        (GOOD | {"answer_ids": ["1"]}, "bad_answer_ids"),
        (GOOD | {"answer_ids": []}, "bad_answer_ids"),
        (GOOD | {"tools": "{"}, "bad_tools"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "bad_tool_calls"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]}]},
            "bad_tool_arguments",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "row",
)
def test_bad_rows_are_counted_by_reason(tmp_path, row, reason):
    """B08: whatever a row holds, the good one behind it is read."""
    tally = Tally()
    kept = list(read_conversations([write_jsonl(tmp_path / "rows.jsonl", [row, GOOD])], tally=tally))
    assert len(kept) == 1 and dict(tally.skipped) == {reason: 1}


def test_bytes_that_are_not_utf8_are_one_bad_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}\n\n' + json.dumps(GOOD).encode() + b"\n")
    tally = Tally()
    assert len(list(read_conversations([str(file)], tally=tally))) == 1
    assert dict(tally.skipped) == {"bad_json": 1}


def test_nothing_kept_is_an_error(tmp_path):
    """B08: non-zero exit if nothing is kept."""
    with pytest.raises(DataError, match=r"(?s)kept 0 / skipped 2 \(empty=2\).*rows.jsonl:1"):
        list(read_conversations([write_jsonl(tmp_path / "rows.jsonl", [{"messages": []}, {"messages": None}])]))
    with pytest.raises(DataError, match="holds no row"):
        list(read_conversations([]))


def test_tool_calls_keep_their_parts():
    """B07: roles and fields survive; `content: null` becomes empty text; arguments become a mapping."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
    row = {
        "tools": json.dumps([{"type": "function", "function": {"name": "f"}}]),
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"},
            {"role": "assistant", "content": "It is 42."},
        ],
    }
    conversation = normalise(row)
    assert conversation.tools == [{"type": "function", "function": {"name": "f"}}]
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call | {"function": {"name": "f", "arguments": {"x": None}}}],
    }
    assert conversation.messages[2] == {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"}


def test_sharegpt_calls():
    """B07: roles function_call and observation."""
    row = {
        "conversations": [
            {"from": "human", "value": "go"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "42"},
            {"from": "gpt", "value": "It is 42."},
        ]
    }
    messages = normalise(row).messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize("content", ["r\n</think>\n\nc", "<think>\nr\n</think>\n\nc"])
def test_inline_reasoning_becomes_the_field(content):
    """B06: one way to write reasoning, so that no template wraps it twice."""
    message = normalise({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]}).messages[1]
    assert message == {"role": "assistant", "content": "c", "reasoning_content": "r"}


# ---------------------------------------------------------------- sources


def test_every_kind_of_file_gives_the_same(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    rows = [GOOD, {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "tool_calls": None}]}]
    write_jsonl(tmp_path / "x.jsonl", rows)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    (tmp_path / "x.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "dict"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "1.jsonl", rows[:1])
    write_jsonl(folder / "2.jsonl", rows[1:])
    for name in ("x.jsonl", "x.jsonl.gz", "x.json", "x.parquet", "saved", "dict", "folder"):
        kept = list(read_conversations([str(tmp_path / name)]))
        assert [turns(c) for c in kept] == [[("user", "a"), ("assistant", "b")], [("user", "c"), ("assistant", "d")]], name


def test_max_rows_counts_kept_rows_over_all_sources(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"messages": []}, GOOD, GOOD])
    b = write_jsonl(tmp_path / "b.jsonl", [GOOD, GOOD])
    tally = Tally()
    assert len(list(read_conversations([a, b], tally=tally, max_rows=3))) == 3
    assert (tally.kept, tally.skipped.total()) == (3, 1)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("missing.jsonl", "no file or folder 'missing.jsonl'"),
        ("some/missing.jsonl", "no file or folder"),
        ("/no/such/folder", "no file or folder"),
        ("embedded:nothing", "there is .*embedded:eval.*embedded:prompts"),
    ],
)
def test_missing_source_fails_at_once(source, said):
    started = time.monotonic()
    with pytest.raises(DataError, match=said):
        list(read_conversations([source]))
    assert time.monotonic() - started < 2  # a hub name that is none would be retried for half a minute


def test_hub_name_that_cannot_be_had_is_one_line():
    with pytest.raises(DataError, match="'nobody-at-all/no-such-rows:train' is no local path") as error:
        list(read_conversations(["nobody-at-all/no-such-rows:train"]))
    assert "\n" not in str(error.value)


def test_recipes_name_the_split_of_hub_data():
    """UltraChat-200k, for one, has no split `train`."""
    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*/*.yaml"))
    sources = {source for path in recipes for source in (yaml.safe_load(path.read_text()).get("data") or {}).get("prompts", [])}
    hub = {source for source in sources if source.count("/") == 1 and not source.endswith((".jsonl", ".gz"))}
    assert (
        hub and all(source.endswith(":train_sft") for source in hub if "ultrachat_200k" in source) and all(":" in source for source in hub)
    )


@pytest.mark.parametrize("name", ["x.parquet", "x.json", "x.jsonl.gz"])
def test_corrupt_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"{not what it says")
    with pytest.raises(DataError, match=name):
        list(read_conversations([str(tmp_path / name)]))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.jsonl.gz"])
def test_empty_file_is_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=str(tmp_path / name)) as error:
        list(read_conversations([str(tmp_path / name)]))
    assert "\n" not in str(error.value) and "skipped 0" not in str(error.value)


def test_empty_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no .jsonl"):
        list(read_conversations([str(tmp_path)]))


def test_embedded_prompts_are_conversations():
    tally = Tally()
    kept = list(read_conversations(["embedded:prompts"], tally=tally, need_answer=False))
    assert len(kept) >= 4000 and not tally.skipped
    assert len({c.key for c in kept}) == len(kept)


# ---------------------------------------------------------------- keys and hold-out


def test_key_is_of_the_question_alone():
    other = {"id": "z", "messages": [GOOD["messages"][0], {"role": "assistant", "content": "another answer"}], "temperature": 0.8}
    assert normalise(GOOD).key == normalise(other).key
    assert normalise(GOOD).key != normalise(GOOD | {"tools": [{"name": "f"}]}).key
    assert normalise(GOOD).key != normalise({"prompt": "b"}, need_answer=False).key


def test_hold_out_is_stable_and_of_the_asked_share():
    keys = [f"{i:016x}" for i in range(4000)]
    chosen = {key for key in keys if held_out(key, 0.05, seed=0)}
    assert 0.04 < len(chosen) / len(keys) < 0.06
    assert chosen <= {key for key in keys if held_out(key, 0.1, seed=0)}  # a larger share keeps what a smaller one chose
    assert chosen != {key for key in keys if held_out(key, 0.05, seed=1)}
    assert not any(held_out(key, 0.0) for key in keys)


@pytest.mark.parametrize("ids", ["12", 7, [[1], 2], [["a"]], [[]]], ids=str)
def test_earlier_answer_ids_are_checked(ids):
    assert normalise(GOOD | {"earlier_answer_ids": [[1, 2], [3]]}).earlier_answer_ids == [[1, 2], [3]]
    assert normalise(GOOD | {"earlier_answer_ids": None}).earlier_answer_ids == normalise(GOOD).earlier_answer_ids == []
    with pytest.raises(Reject, match="bad_answer_ids"):
        normalise(GOOD | {"earlier_answer_ids": ids})


def test_greedy_is_known_only_where_the_row_says_so():
    assert normalise(GOOD | {"temperature": 0.0}).greedy
    assert not normalise(GOOD | {"temperature": 0.8}).greedy
    assert not normalise(GOOD).greedy


def test_embedded_names(monkeypatch, tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    (tmp_path / "c_prompts.jsonl").write_text("")
    monkeypatch.setattr(conversations, "EMBEDDED", tmp_path)
    assert [conversations.embedded_file(f"embedded:{n}").name for n in "abc"] == ["a.jsonl", "b.jsonl.gz", "c_prompts.jsonl"]
    with pytest.raises(DataError, match="embedded:a, embedded:b, embedded:c"):
        conversations.embedded_file("embedded:d")


def test_shipped_answers_belong_to_the_shipped_prompts():
    """In the order of the prompts; greedy and sampled by halves; ids are SmolLM2's; no evaluation prompt among them."""
    prompts = {c.id: (i, c) for i, c in enumerate(read_conversations(["embedded:prompts"], need_answer=False))}
    tally = Tally()
    answers = list(read_conversations(["embedded:answers-smollm2-135m"], tally=tally))
    assert len(answers) >= 2500 and not tally.skipped
    places = [prompts[answer.id][0] for answer in answers]
    assert places == sorted(set(places))
    for answer in answers:
        prompt = prompts[answer.id][1]
        assert answer.messages[:-1] == prompt.messages and answer.key == prompt.key
        assert answer.target == "embedded:smollm2-135m" and answer.answer_ids and max(answer.answer_ids) < 49152
        assert answer.finish_reason == ("stop" if answer.answer_ids[-1] == 2 else "length")  # 2: <|im_end|>
    assert 0.45 < sum(a.greedy for a in answers) / len(answers) < 0.55
    assert not {a.key for a in answers} & {p.key for p in read_conversations(["embedded:eval", "embedded:repetitive"], need_answer=False)}

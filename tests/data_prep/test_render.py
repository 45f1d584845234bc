"""Chat templates of every kind: what is tokenised, and what is supervised."""

import dataclasses
import json
from copy import copy
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from data_prep.conversations import Conversation, Reject, Tally, normalise, read_conversations
from data_prep.render import PATIENCE, chat_tokenizer, read_template, render, render_prompt, render_rows
from recipes.errors import DataError
from recipes.schema import Data, Target

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (  # the same text; the marks are there for transformers' own mask
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (  # Llama-3-like: BOS, a header a message, content trimmed, no line break behind the end of turn
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
BRACKETS = (  # Llama-2-like: strict alternation, no assistant header of its own, the generation prompt adds nothing
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
THINKING = (  # Qwen-3-like: reasoning of the last answer only, an empty block where it has none
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
THINKING_FORCED = THINKING.replace("{{ '<|im_start|>assistant\n' }}{% if enable", "{{ '<|im_start|>assistant\n<think>\n' }}{% if enable")
STRIPPING = (  # R1-like: the prompt opens a thinking block, but no written answer ever has one
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + c.function.arguments | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = {"chatml": CHATML, "marked": MARKED, "headers": HEADERS, "brackets": BRACKETS, "thinking": THINKING, "tools": TOOLS}


@cache
def make_tokenizer(template: str, *, merges: tuple[tuple[str, str], ...] = (), add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level (id = byte), with specials from 256 on; `merges` adds tokens of two characters."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab |= {a + b: 300 + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template, clean_up_tokenization_spaces=False
    )


def data(**values) -> Data:
    return Data(prompts=["a.jsonl"], **values)


def chat(*contents: str, **extra) -> Conversation:
    """user, assistant, user, assistant, …"""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return Conversation(id="r", messages=messages, **extra)


def supervised(row, tokenizer) -> str:
    return tokenizer.decode([token for token, keep in zip(row.input_ids, row.loss_mask, strict=True) if keep])


# ---------------------------------------------------------------- the boundary rule


@pytest.mark.parametrize("name", PLAIN)
def test_answer_and_end_of_turn_are_supervised_with_any_template(name):
    """B01: templates with and without generation marks; never an all-zero mask, never the question."""
    tokenizer = make_tokenizer(PLAIN[name])
    row = render(chat("alpha?", "beta."), tokenizer, data())
    end = {"headers": "<|eot|>", "brackets": " </s>"}.get(name, "<|im_end|>")
    assert supervised(row, tokenizer).removeprefix(" ") == "beta." + end
    assert len(row.input_ids) == len(row.loss_mask)


def test_marks_and_boundaries_agree():
    """B01: where a template has marks, the mask is the one that transformers gets from them."""
    tokenizer = make_tokenizer(MARKED)
    conversation = chat("a", "b", "c", "d")
    row = render(conversation, tokenizer, data())
    theirs = tokenizer.apply_chat_template(conversation.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert row.loss_mask == theirs["assistant_masks"][: len(row.loss_mask)]
    assert not any(theirs["assistant_masks"][len(row.loss_mask) :])


def test_supervise_modes():
    tokenizer = make_tokenizer(CHATML)
    conversation = chat("q1", "a1", "q2", "a2")
    assert supervised(render(conversation, tokenizer, data()), tokenizer) == "a1<|im_end|>a2<|im_end|>"
    assert supervised(render(conversation, tokenizer, data(supervise="last_assistant")), tokenizer) == "a2<|im_end|>"
    assert set(render(conversation, tokenizer, data(supervise="all")).loss_mask) == {1}


def test_plain_text_is_supervised_whole():
    """`all` looks for no answer: a document without any header will do, and a base model without a chat template."""
    text = "No header here, and no question."
    for template in (CHATML, None):
        tokenizer = make_tokenizer(template)
        row = render(normalise({"text": text}), tokenizer, data(supervise="all"))
        assert tokenizer.decode(row.input_ids) == supervised(row, tokenizer) == text
    with pytest.raises(Reject, match="no_assistant_header"):
        render(normalise({"text": text}), make_tokenizer(CHATML), data())


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), min_size=1, max_size=12).filter(lambda text: text.strip() != "")


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(PLAIN)), texts=st.lists(words, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_prompt_is_a_prefix_and_nothing_is_changed(name, texts):
    """B06, B09: the serving prompt is a prefix of the row, and the row is the rendered text, whatever is written."""
    tokenizer = make_tokenizer(PLAIN[name], merges=(("Ċ", "Ċ"), ("Ġ", "Ġ")))
    conversation = chat(*texts)
    row = render(conversation, tokenizer, data())
    prompt = render_prompt(conversation.messages[:-1], tokenizer)
    assert row.input_ids[: len(prompt)] == prompt
    assert row.loss_mask[len(prompt) - 1] == 0
    text = tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    assert text.startswith(tokenizer.decode(row.input_ids))
    assert texts[-1].strip() in supervised(row, tokenizer)


def test_tokens_do_not_merge_over_the_boundary():
    """B06: "…assistant\\n" + "\\nhello" has a token of two line breaks; the prompt must stay what the server would send."""
    tokenizer = make_tokenizer(CHATML, merges=(("Ċ", "Ċ"),))
    row = render(chat("hi", "\nhello"), tokenizer, data())
    prompt = render_prompt([{"role": "user", "content": "hi"}], tokenizer)
    assert row.input_ids[: len(prompt)] == prompt
    assert supervised(row, tokenizer) == "\nhello<|im_end|>"


# ---------------------------------------------------------------- truncation


def test_truncation_that_leaves_nothing_is_counted():
    """B03: a prompt that fills max_length is dropped and counted; a long answer keeps its mask up to the cut."""
    tokenizer = make_tokenizer(CHATML)
    long = "word " * 200
    tally = Tally(kept=2)
    rows = list(render_rows([chat(long, "ok"), chat("hi", long)], tokenizer, data(max_length=32), tally))
    ((_, row),) = rows
    prompt = len(render_prompt([{"role": "user", "content": "hi"}], tokenizer))
    assert len(row.input_ids) == 32
    assert row.loss_mask == [0] * prompt + [1] * (32 - prompt)
    assert dict(tally.skipped) == {"no_loss_tokens": 1}
    assert tally.kept == 1


# ---------------------------------------------------------------- text that is already rendered


TEXT = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
)


def test_preformatted_text_is_masked_by_the_templates_own_header():
    """B04: {"text": …} rows."""
    tokenizer = make_tokenizer(CHATML)
    row = render(normalise({"id": "r1", "text": TEXT}), tokenizer, data())
    assert supervised(row, tokenizer) == "hello<|im_end|>yes<|im_end|>"
    same = render(chat("hi", "hello", "more", "yes"), tokenizer, data())
    assert (row.input_ids, row.loss_mask) == (same.input_ids, same.loss_mask)


def test_preformatted_text_without_a_header_in_the_template():
    tokenizer = make_tokenizer(BRACKETS)
    row = render(normalise({"text": "<s>[INST] hi [/INST] hello </s>[INST] more [/INST] yes </s>"}), tokenizer, data())
    assert supervised(row, tokenizer) == " hello </s> yes </s>"


@pytest.mark.parametrize("supervise", ["assistant", "all"])
@pytest.mark.parametrize("template", [HEADERS, CHATML], ids=["headers", "chatml"])
def test_preformatted_text_begins_as_served_prompts_do(template, supervise):
    """B09: text is often stored without BOS, but never served so; where it has one, or the template has none, nothing is added."""
    tokenizer = make_tokenizer(template, add_bos=True)
    row = render(chat("hi", "hello"), tokenizer, data())
    text = tokenizer.decode(row.input_ids)
    for stored in (text, text.removeprefix("<s>"), "\n" + text):
        got = render(normalise({"text": stored}), tokenizer, data(supervise=supervise))
        assert got.input_ids.count(tokenizer.bos_token_id) == (template == HEADERS)
        if not stored.startswith("\n"):
            assert got.input_ids == row.input_ids
            assert supervise == "all" or got.loss_mask == row.loss_mask


@pytest.mark.parametrize("answer", ["<think>\n\n</think>\n\nc", "<think>\nr\n</think>\n\nc", "c"], ids=["empty", "reasoned", "none"])
def test_empty_thinking_block_of_preformatted_text_is_not_supervised(answer):
    """B06 (3): text and messages of one answer have one mask."""
    tokenizer = make_tokenizer(THINKING)
    text = f"<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    row = render(normalise({"text": text}), tokenizer, data())
    assert supervised(row, tokenizer) == answer.removeprefix("<think>\n\n</think>\n\n") + "<|im_end|>"
    if answer != "c":
        same = render(
            normalise({"messages": [{"role": "user", "content": "go"}, REASONED if "r" in answer else DIRECT]}), tokenizer, data()
        )
        assert (row.input_ids, row.loss_mask) == (same.input_ids, same.loss_mask)


def test_text_of_another_template_stops_the_job_early():
    """B04: the message names the count, the header that never occurs, and the first row."""
    tokenizer = make_tokenizer(HEADERS)
    asked = []

    def endless():
        while True:
            asked.append(1)
            yield normalise({"text": TEXT})

    with pytest.raises(DataError) as error:
        list(render_rows(endless(), tokenizer, data(), Tally()))
    assert len(asked) == PATIENCE
    message = str(error.value)
    assert f"0 of {PATIENCE} rows contain a supervised token" in message
    assert repr("<|head|>assistant<|/head|>\n\n") in message and "hello" in message


# ---------------------------------------------------------------- reasoning

REASONED = {"role": "assistant", "reasoning_content": "r", "content": "c"}
INLINE = {"role": "assistant", "content": "r\n</think>\n\nc"}
DIRECT = {"role": "assistant", "content": "c"}


def answer(template: str, message: dict, before: tuple = ()) -> tuple[str, str]:
    """(text of the row, its supervised part)."""
    tokenizer = make_tokenizer(template)
    conversation = normalise({"messages": [*before, {"role": "user", "content": "go"}, message]})
    row = render(conversation, tokenizer, data())
    prompt = render_prompt([*before, {"role": "user", "content": "go"}], tokenizer)
    assert row.input_ids[: len(prompt)] == prompt and not any(row.loss_mask[: len(prompt)])
    return tokenizer.decode(row.input_ids), supervised(row, tokenizer)


@pytest.mark.parametrize("message", [REASONED, INLINE], ids=["field", "inline"])
@pytest.mark.parametrize("template", [THINKING, CHATML], ids=["thinking", "no_thinking"])
def test_reasoning_is_kept_once(template, message):
    """B06 (1, 2): r and c are both supervised, in exactly one thinking block, also by a template that knows no reasoning."""
    text, learnt = answer(template, message)
    assert learnt == "<think>\nr\n</think>\n\nc<|im_end|>"
    assert text.count("<think>") == text.count("</think>") == 1


def test_block_that_the_prompt_opens_is_not_supervised():
    """B06 (3): the generation prompt supplies <think>."""
    text, learnt = answer(THINKING_FORCED, REASONED)
    assert learnt == "r\n</think>\n\nc<|im_end|>" and text.count("<think>") == 1


@pytest.mark.parametrize("template", [THINKING, THINKING_FORCED], ids=["thinking", "forced"])
def test_empty_thinking_block_is_not_supervised(template):
    """B06 (3): the template puts an empty block before an answer that was written without thinking."""
    text, learnt = answer(template, DIRECT)
    assert learnt == "c<|im_end|>" and text.count("<think>") == 1


def test_turn_that_is_rewritten_in_hindsight_is_context():
    """B06: the first answer has lost its reasoning once it is history; the target never wrote it so, and it is not supervised."""
    text, learnt = answer(
        THINKING, REASONED, before=({"role": "user", "content": "q"}, {"role": "assistant", "reasoning_content": "old", "content": "first"})
    )
    assert "first" in text and learnt == "<think>\nr\n</think>\n\nc<|im_end|>"


def test_rows_whose_earlier_answers_are_not_supervised_are_counted():
    """A thinking template writes every answer but the last otherwise than the target did: the summary says so."""
    tokenizer, tally = make_tokenizer(THINKING), Tally(kept=3)
    rows = [chat("q1", "a1", "q2", "a2", "q3", "a3"), chat("q1", "a1"), chat("q1", "a1", "q2", "a2")]
    rendered = [row for _, row in render_rows(rows, tokenizer, data(), tally)]
    assert [row.rewritten for row in rendered] == [2, 0, 1] and supervised(rendered[0], tokenizer) == "a3<|im_end|>"
    assert "the template rewrites earlier answers, only the others are supervised=2" in tally.summary()
    for mode, template in (("last_assistant", THINKING), ("all", THINKING), ("assistant", CHATML)):
        tally = Tally(kept=3)
        assert not any(row.rewritten for _, row in render_rows(rows, make_tokenizer(template), data(supervise=mode), tally))
        assert not tally.notes


# ---------------------------------------------------------------- data.template_kwargs


@pytest.fixture
def thinking_file(tmp_path):
    path = tmp_path / "thinking.jinja"
    path.write_text(THINKING)
    return path


def test_template_kwargs_reach_prompts_and_rows(tiny_target, thinking_file):
    """The served prompt without thinking ends with an empty block, and stays a prefix of the row; the answer behind it is supervised."""
    target = Target(path=str(tiny_target))
    ends = {None: "assistant\n", True: "assistant\n", False: "assistant\n<think>\n\n</think>\n\n"}
    for value, end in ends.items():
        tokenizer = chat_tokenizer(target, thinking_file, {} if value is None else {"enable_thinking": value})
        prompt = render_prompt([{"role": "user", "content": "go"}], tokenizer)
        assert tokenizer.decode(prompt).endswith(end)
        row = render(chat("go", "c", answer_ids=[*b"c", 258]), tokenizer, data())
        assert row.exact and row.input_ids == [*prompt, *b"c", 258]


@pytest.mark.parametrize("name", ["enable_thinkng", "messages", "padding"])
def test_a_variable_that_the_template_does_not_read_is_refused(tiny_target, thinking_file, name):
    with pytest.raises(DataError, match=f"template_kwargs: {name} is no variable of the chat template, which reads enable_thinking[.]"):
        chat_tokenizer(Target(path=str(tiny_target)), thinking_file, {name: False})


@pytest.mark.parametrize(
    ("message", "said"),
    [(REASONED, "the template drops reasoning_content"), (DIRECT, "the generation prompt is not how the template begins this answer")],
    ids=["reasoned", "direct"],
)
def test_template_that_cannot_write_the_answer_skips_the_row(message, said):
    """B06: an R1-like template drops reasoning, and no answer of it begins with its generation prompt."""
    conversation = normalise({"messages": [{"role": "user", "content": "go"}, message]})
    with pytest.raises(Reject, match=f"^template_error: {said}$"):
        render(conversation, make_tokenizer(STRIPPING), data())


def test_own_answer_needs_no_template_that_can_write_it():
    """B06: R1's template writes no reasoning, but a row with the target's own tokens does not ask it to; what comes before is looked at."""
    tokenizer = make_tokenizer(STRIPPING)
    ids = [*b"r\n</think>\n\nc", 259]
    raw = {"messages": [{"role": "user", "content": "go"}, INLINE], "answer_ids": ids}
    row = render(normalise(raw), tokenizer, data())
    assert row.exact and row.input_ids == render_prompt(raw["messages"][:1], tokenizer) + ids
    assert supervised(row, tokenizer) == "r\n</think>\n\nc<|im_end|>"
    with pytest.raises(Reject, match="the template drops reasoning_content"):
        render(normalise(raw | {"answer_ids": [*b"x"]}), tokenizer, data())
    tool = [{"role": "user", "content": "go"}, {"role": "tool", "content": "42"}, INLINE]
    no_tool_role = make_tokenizer(STRIPPING.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"))
    with pytest.raises(Reject, match="the template drops role tool"):
        render(normalise(raw | {"messages": tool}), no_tool_role, data())


# ---------------------------------------------------------------- tools


def tool_row(arguments) -> dict:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "conversations": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "assistant", "content": "It is 42."},
        ],
    }


@pytest.mark.parametrize("arguments", [{}, "{}", {"x": 1}, '{"x": 1}'], ids=str)
def test_tool_call_and_final_answer_are_supervised(arguments):
    """B07: four turns survive, the tool's output is not supervised, arguments come as a string or a mapping."""
    tokenizer = make_tokenizer(TOOLS)
    row = render(normalise(tool_row(arguments)), tokenizer, data())
    written = json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments)
    assert supervised(row, tokenizer) == f"<call>f{written}</call><|im_end|>It is 42.<|im_end|>"
    assert tokenizer.decode(row.input_ids).count("<|im_start|>") == 5


def test_template_that_refuses_an_empty_answer_keeps_tool_calls():
    """B07: the call is looked for by leaving it out, and what is left is a message with nothing in it; a refused row stays refused."""
    refuse = "{% for m in messages %}{% if not (m.content or m.tool_calls) %}{{ raise_exception('empty message') }}{% endif %}"
    tokenizer = make_tokenizer(TOOLS.replace("{% for m in messages %}", refuse))
    assert supervised(render(normalise(tool_row({})), tokenizer, data()), tokenizer) == "<call>f{}</call><|im_end|>It is 42.<|im_end|>"
    raw = tool_row({})
    raw["conversations"][2]["content"] = ""
    with pytest.raises(Reject, match="^template_error: empty message$"):
        render(normalise(raw), tokenizer, data())


def test_template_that_refuses_calls_without_tools_keeps_them():
    """B07: that the template reads the tools is found by leaving them out."""
    refuse = "{% for m in messages %}{% if m.tool_calls and not tools %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer = make_tokenizer(TOOLS.replace("{% for m in messages %}", refuse))
    assert supervised(render(normalise(tool_row({})), tokenizer, data()), tokenizer) == "<call>f{}</call><|im_end|>It is 42.<|im_end|>"


@pytest.mark.parametrize("drop", ["nothing", "tools", "tools and calls"])
def test_template_without_tools_is_a_counted_skip(drop):
    """B07: never a half-rendered row."""
    raw = tool_row({})
    if drop != "nothing":
        del raw["tools"]
    if drop == "tools and calls":
        del raw["conversations"][1]["tool_calls"]
        raw["conversations"][1]["content"] = "wait"
    no_tool_role = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    tally = Tally(kept=1)
    assert list(render_rows([normalise(raw)], make_tokenizer(no_tool_role), data(), tally)) == []
    (reason,) = tally.skipped
    assert reason == "template_error: the template " + {"nothing": "ignores tools", "tools": "drops tool_calls"}.get(
        drop, "drops role tool"
    )


def test_dropped_system_message_is_a_counted_skip():
    conversation = normalise(
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    no_system = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    with pytest.raises(Reject, match="drops role system"):
        render(conversation, make_tokenizer(no_system), data())
    assert supervised(render(conversation, make_tokenizer(CHATML), data()), make_tokenizer(CHATML)) == "b<|im_end|>"


# ---------------------------------------------------------------- odd rows, BOS, templates


def test_template_errors_are_counted_by_what_they_say(tmp_path):
    """B08: a strict template refuses two user turns; the job goes on."""
    twice = {"conversations": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]}
    good = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(twice) + "\n" + json.dumps(good) + "\n")
    tally = Tally()
    rows = list(render_rows(read_conversations([str(file)], tally=tally), make_tokenizer(BRACKETS), data(), tally))
    assert len(rows) == 1
    assert tally.summary() == "kept 1 / skipped 1 (template_error: roles must alternate=1)"


@pytest.mark.parametrize("template", [HEADERS, BRACKETS], ids=["headers", "brackets"])
def test_one_bos(template):
    """B09: the template prints BOS, and the tokenizer would add another."""
    tokenizer = make_tokenizer(template, add_bos=True)
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    conversation = chat("a", "b", "c", "d")
    row = render(conversation, tokenizer, data())
    assert row.input_ids.count(tokenizer.bos_token_id) == 1
    theirs = tokenizer.apply_chat_template(conversation.messages, tokenize=True, return_dict=True)["input_ids"]
    assert row.input_ids == theirs
    assert render_prompt(conversation.messages[:-1], tokenizer).count(tokenizer.bos_token_id) == 1


def test_no_template_is_an_error_with_the_remedy():
    tokenizer = copy(make_tokenizer(CHATML))
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="data.chat_template"):
        render(chat("a", "b"), tokenizer, data())


def test_template_files(tmp_path):
    good, bad = tmp_path / "good.jinja", tmp_path / "bad.jinja"
    good.write_text(MARKED)
    bad.write_text("{% for m in messages %}")
    assert read_template(good) == MARKED
    with pytest.raises(DataError, match="bad.jinja is not a Jinja template"):
        read_template(bad)
    with pytest.raises(DataError, match="cannot read"):
        read_template(tmp_path / "none.jinja")


# ---------------------------------------------------------------- answers that the target wrote


def test_generated_ids_are_used_as_they_are():
    """The target wrote "hello" in single letters; tokenised again it would be two tokens fewer."""
    tokenizer = make_tokenizer(CHATML, merges=(("h", "e"), ("l", "l")))
    ids = [*b"hello", tokenizer.convert_tokens_to_ids("<|im_end|>")]
    conversation = chat("q1", "a1", "q2", "hello", answer_ids=ids, temperature=0.0)
    row = render(conversation, tokenizer, data())
    prompt = render_prompt(conversation.messages[:-1], tokenizer)
    assert row.exact and row.input_ids == prompt + ids
    assert supervised(row, tokenizer) == "a1<|im_end|>hello<|im_end|>"
    assert supervised(render(conversation, tokenizer, data(supervise="last_assistant")), tokenizer) == "hello<|im_end|>"
    again = render(dataclasses.replace(conversation, answer_ids=None), tokenizer, data())
    assert not again.exact and len(again.input_ids) == len(row.input_ids) - 2


def test_an_answer_cut_by_its_budget_has_no_end_of_turn():
    tokenizer = make_tokenizer(CHATML)
    row = render(chat("q", "hel", answer_ids=list(b"hel"), finish_reason="length"), tokenizer, data())
    assert supervised(row, tokenizer) == "hel"


@pytest.mark.parametrize("ids", [[104, 105], [*b"hello", 5000]], ids=["spell something else", "outside the vocabulary"])
def test_ids_of_another_tokenizer_are_not_used(ids):
    """The text is tokenised instead, and the summary says so."""
    tokenizer = make_tokenizer(CHATML)
    tally = Tally(kept=1)
    ((_, row),) = render_rows([chat("q", "hello", answer_ids=ids)], tokenizer, data(), tally)
    assert not row.exact and supervised(row, tokenizer) == "hello<|im_end|>"
    assert "answer_ids of another tokenizer" in tally.summary()

"""Conversation → token ids and loss mask, by the tokenizer's own chat template; no server is asked.

The mask follows one rule for all templates, whether or not they carry `{% generation %}` marks (hardly any does, B01). The
template is a function from messages to text, so the answer to messages[:i] is what it adds to the generation prompt:

    template(messages[:i], add_generation_prompt=True)   <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n
    template(messages[: i + 1])                          <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
    supervised                                                                                                  hello<|im_end|>

Hence the prompt that a server would generate from is always a prefix of the training row, what the prompt supplies is never
supervised (B06), and the end-of-turn token is. An earlier turn that the template writes otherwise once it is history (thinking
templates drop its reasoning) is context, not an answer of the target: it is not supervised. A row that holds `answer_ids`, the
tokens that the target itself produced, is the prompt and these ids: nothing is tokenised twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_prep.conversations import Conversation, Reject, Tally
from recipes.errors import DataError
from recipes.schema import Data, Target

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, end) of a text
TemplateValue = bool | int | float | str  # of `data.template_kwargs`

PATIENCE = 100  # rows: a job whose first rows all fail is stopped here, not after a million
_EMPTY_THINKING = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
_MARKUP = re.compile(r"\s+|</?think>")


@dataclass(frozen=True)
class Row:
    """One training row."""

    input_ids: list[int]
    loss_mask: list[int]  # 1: the token is supervised
    exact: bool = False  # the answer's ids are the target's own, not text that was tokenised again
    own: bool = False  # so is everything that is supervised: no answer of somebody else among the earlier ones, no prompt
    rewritten: int = 0  # earlier answers that the template writes otherwise once they are history: not supervised


def render_rows(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, data: Data, tally: Tally
) -> Iterator[tuple[Conversation, Row]]:
    """Render what can be rendered; move what cannot from `tally.kept` to `tally.skipped`.

    Raises:
        DataError: none of the first `PATIENCE` rows has a supervised token (B04), or the tokenizer cannot be used.
    """
    seen = kept = 0
    first: Conversation | None = None
    for conversation in conversations:
        seen, first = seen + 1, first or conversation
        try:
            row = render(conversation, tokenizer, data)
        except Reject as reason:
            tally.kept -= 1
            tally.skip(str(reason), conversation.id)
            if not kept and seen == PATIENCE:
                shown = str(first.text if first.text is not None else first.messages)
                raise DataError(f"0 of {seen} rows contain a supervised token:\n{tally.explain()}\n  first row: {shown[:300]}") from None
            continue
        kept += 1
        if conversation.answer_ids is not None and not row.exact:
            tally.notes["answer_ids of another tokenizer, text used"] += 1
        if row.rewritten:
            tally.notes["the template rewrites earlier answers, only the others are supervised"] += 1
        yield conversation, row


def render(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, data: Data) -> Row:
    """Tokenise one conversation and mask what `data.supervise` asks for, cut at `data.max_length`.

    Raises:
        Reject: `no_loss_tokens` (nothing supervised is left, B03), `template_error: …`, or `no_assistant_header: …`.
        DataError: no chat template, or a tokenizer without character offsets.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} gives no character offsets; a fast tokenizer is needed (tokenizer.json in the target's folder)"
        )
    exact, own, rewritten = False, False, 0
    if conversation.text is not None:
        text = _with_bos(conversation.text, tokenizer)
        # all: any document, no answer is looked for, no template is needed
        spans = [] if data.supervise == "all" else _preformatted_spans(text, tokenizer)
        ids, mask = _tokenise(text, spans, tokenizer)
    else:
        exact = _is_own_answer(conversation, tokenizer)
        answer_ids = conversation.answer_ids if exact else None
        written = conversation.messages[:-1] if exact else conversation.messages  # the template does not write the target's own ids
        messages = [*_complete(written, conversation.tools, tokenizer), *conversation.messages[len(written) :]]
        ids, mask, rewritten = _chat(messages, conversation.tools, answer_ids, tokenizer, data.supervise)
    if data.supervise == "all":
        mask = [1] * len(ids)
    if exact and (last := conversation.answer_ids) is not None:
        own = list(compress(ids, mask)) in (last, [*chain(*conversation.earlier_answer_ids), *last])  # earlier answers may all be context
    ids, mask = ids[: data.max_length], mask[: data.max_length]
    if not any(mask):
        raise Reject("no_loss_tokens")
    end = len(mask) - mask[::-1].index(1)  # what follows the last supervised token teaches nothing
    return Row(ids[:end], mask[:end], exact, own, rewritten)


def render_prompt(messages: list[Message], tokenizer: PreTrainedTokenizerBase, tools: list[Message] | None = None) -> list[int]:
    """Token ids of a chat up to and including the assistant's header: what a server generates from.

    Raises:
        Reject: `template_error: …`.
        DataError: no chat template.
    """
    return _ids(_template(messages, tools, tokenizer, prompt=True), tokenizer)


def question_header(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Token ids of a chat up to where the user's text begins, and the token that ends that text.

    Raises:
        DataError: no chat template, or one that changes a user's text so that its place cannot be found.
    """
    mark = "Xquestion0X"
    header, found, rest = _template([{"role": "user", "content": mark}], None, tokenizer, prompt=True).partition(mark)
    if not found or not rest:
        raise DataError("the chat template does not put a user's text as it is between two marks; the target cannot write prompts with it.")
    return _ids(header, tokenizer), _ids(rest, tokenizer)[0]


def chat_tokenizer(
    target: Target, template: str | Path | None, template_kwargs: Mapping[str, TemplateValue] | None = None
) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with `data.chat_template` where one is given; all rendering with it uses `data.template_kwargs`.

    Raises:
        DataError: no such template file, it is no template, or `template_kwargs` names a variable that the template does not read.
    """
    from heads.target import load_tokenizer

    tokenizer = load_tokenizer(target)
    if template is not None:
        tokenizer.chat_template = read_template(template)
    if template_kwargs:
        _check_kwargs(template_kwargs, tokenizer.chat_template or "")
        setattr(tokenizer, _KWARGS, dict(template_kwargs))
    return tokenizer


def _check_kwargs(given: Mapping[str, TemplateValue], template: str | dict[str, str]) -> None:
    """Raise DataError unless the template reads every variable that is given: a misspelt one would change nothing, silently."""
    import jinja2.meta

    read: set[str] = set()
    for text in template.values() if isinstance(template, dict) else [template]:
        read |= jinja2.meta.find_undeclared_variables(_parsed(text))
    known = sorted(read - _NOT_GIVEN)
    if unknown := sorted(set(given) - set(known)):
        raise DataError(
            f"data.template_kwargs: {', '.join(unknown)} is no variable of the chat template, which reads "
            f"{', '.join(known) or 'none but the messages'}. Mend the name, or drop it."
        )


_KWARGS = "headstart_template_kwargs"  # attribute of a tokenizer that `chat_tokenizer` made
_NOT_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}  # never variables of a recipe


def _parsed(template: str):
    """The template's syntax tree (jinja2.TemplateSyntaxError where it is no template)."""
    import jinja2

    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", template))


def read_template(path: str | Path) -> str:
    """The Jinja text of `data.chat_template`.

    Raises:
        DataError: no such file, or it is no template.
    """
    import jinja2

    try:
        text = Path(path).read_text(encoding="utf-8")
        _parsed(text)
    except OSError as e:
        raise DataError(f"data.chat_template: cannot read {path}: {e.strerror}") from None
    except (UnicodeDecodeError, jinja2.TemplateSyntaxError) as e:
        raise DataError(f"data.chat_template: {path} is not a Jinja template: {e}") from None
    return text


_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # a tag of transformers, unknown to plain Jinja


# ---------------------------------------------------------------- template and tokens


def _template(messages: list[Message], tools: list[Message] | None, tokenizer: PreTrainedTokenizerBase, *, prompt: bool = False) -> str:
    """Run the chat template. What it raises is the row's fault as far as can be known: it becomes a Reject."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template; give one with data.chat_template: FILE.jinja"
        )
    given = getattr(tokenizer, _KWARGS, {})
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **given))  # type: ignore[arg-type]
    except Exception as e:  # Jinja raises what the template asks it to, and any error of the expressions in it
        raise Reject(f"template_error: {(str(e) or type(e).__name__).splitlines()[0]}") from None


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenise rendered text. The template prints BOS itself where there is one: the tokenizer must not add another (B09)."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]


def _tokenise(text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids of `text`, and 1 for each token that begins inside one of `spans`."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = encoded["input_ids"]  # type: ignore[assignment]
    starts = [start for start, _ in encoded["offset_mapping"]]  # type: ignore[union-attr]
    return ids, [int(any(a <= start < b for a, b in spans)) for start in starts]


def _chat(
    messages: list[Message], tools: list[Message] | None, answer_ids: list[int] | None, tokenizer: PreTrainedTokenizerBase, supervise: str
) -> tuple[list[int], list[int], int]:
    """Ids and mask of a chat that ends with an assistant message (written as `answer_ids` where given).

    The third value counts earlier answers that were to be supervised, and that the template writes otherwise in hindsight.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    last = turns[-1]
    prompt = _template(messages[:last], tools, tokenizer, prompt=True)
    text = prompt if answer_ids is not None else _template(messages, tools, tokenizer)
    if not text.startswith(prompt):
        raise Reject("template_error: the generation prompt is not how the template begins this answer")
    earlier = turns[:-1] if supervise == "assistant" else []  # all: no mask is needed
    spans = [span for i in earlier if (span := _answer_span(i, messages, tools, text, tokenizer)) is not None]
    rewritten = len(earlier) - len(spans)
    if answer_ids is not None:
        ids, mask = _tokenise(prompt, spans, tokenizer)
        return ids + answer_ids, mask + [1] * len(answer_ids), rewritten
    final = _trim(text, len(prompt), len(text), messages[last], tokenizer)
    ids, mask = _tokenise(text, [*spans, final], tokenizer)
    prompt_ids = _ids(prompt, tokenizer)
    if ids[: len(prompt_ids)] != prompt_ids:  # the end of the prompt and the begin of the answer would merge into one token
        rest, rest_mask = _tokenise(text[len(prompt) :], [(final[0] - len(prompt), final[1] - len(prompt))], tokenizer)
        if tokenizer.decode(prompt_ids + rest) != tokenizer.decode(ids):
            raise Reject("template_error: prompt and answer cannot be tokenised apart")
        _, prompt_mask = _tokenise(prompt, spans, tokenizer)
        ids, mask = prompt_ids + rest, prompt_mask + rest_mask
    return ids, mask, rewritten


def _answer_span(
    i: int, messages: list[Message], tools: list[Message] | None, text: str, tokenizer: PreTrainedTokenizerBase
) -> Span | None:
    """Characters of `text` that answer messages[:i]; None where the template writes this turn otherwise in hindsight."""
    prompt = _template(messages[:i], tools, tokenizer, prompt=True)
    answered = _template(messages[: i + 1], tools, tokenizer).rstrip()
    if not text.startswith(prompt) or not text.startswith(answered):
        return None
    return _trim(text, len(prompt), len(answered), messages[i], tokenizer)


def _trim(text: str, start: int, end: int, message: Message, tokenizer: PreTrainedTokenizerBase) -> Span:
    """Leave out what the target never writes: an empty thinking block that the template puts in, and line breaks behind the end of turn."""
    if not message.get("reasoning_content") and (empty := _EMPTY_THINKING.match(text, start, end)):
        start = empty.end()
    stripped = text[start:end].rstrip()
    if stripped.endswith(tuple(token.content for token in tokenizer.added_tokens_decoder.values())):
        end = start + len(stripped)
    return start, end


# ---------------------------------------------------------------- is everything in the text that is in the messages?


def _complete(messages: list[Message], tools: list[Message] | None, tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """The messages as this template can write them whole.

    A template that knows nothing of a field leaves it out without a word. So the text is compared with the text without the
    field: if they are equal, the field is lost. Reasoning can then still be written into the content; the rest cannot.

    Raises:
        Reject: `template_error: …` where something would be lost (B06, B07): never a half-rendered row.
    """
    if tools and _writes(_template(messages, tools, tokenizer), messages, None, tokenizer):
        raise Reject("template_error: the template ignores tools")
    whole: list[Message] = []
    for message in messages:
        role = message["role"]
        if message.get("tool_calls") and _is_lost(whole, message, "tool_calls", tools, tokenizer):
            raise Reject("template_error: the template drops tool_calls")
        if role in ("system", "developer", "tool") and message["content"].strip() and _is_lost(whole, message, "content", tools, tokenizer):
            raise Reject(f"template_error: the template drops role {role}")
        if message.get("reasoning_content") and _is_lost(whole, message, "reasoning_content", tools, tokenizer):
            reasoning = message["reasoning_content"].strip("\n")
            folded = {**message, "content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}"}
            del folded["reasoning_content"]
            other = {**folded, "content": folded["content"].replace(reasoning, reasoning + " other", 1)}
            if _writes(_template([*whole, folded], tools, tokenizer), [*whole, other], tools, tokenizer):
                raise Reject("template_error: the template drops reasoning_content")
            message = folded
        whole.append(message)
    return whole


def _is_lost(before: list[Message], message: Message, field: str, tools: list[Message] | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template writes the same text for another value of `field`."""
    other = {**message, "content": "other"} if field == "content" else {k: v for k, v in message.items() if k != field}
    question = [] if any(m["role"] == "user" for m in before) or message["role"] != "system" else [{"role": "user", "content": "a"}]
    return _writes(_template([*before, message, *question], tools, tokenizer), [*before, other, *question], tools, tokenizer)


def _writes(text: str, messages: list[Message], tools: list[Message] | None, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template writes `text` for other messages too. One that refuses them, as an answer without content, tells them apart."""
    try:
        return _template(messages, tools, tokenizer) == text
    except Reject:
        return False


def _is_own_answer(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `answer_ids` are ids of this tokenizer: they must spell the last message."""
    ids, message = conversation.answer_ids, conversation.messages[-1]
    if ids is None or max(ids) >= len(tokenizer):
        return False
    written = str(tokenizer.decode(ids, skip_special_tokens=True))
    return _MARKUP.sub("", written) == _MARKUP.sub("", message.get("reasoning_content", "") + message["content"])


# ---------------------------------------------------------------- text that is already rendered


def _with_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` behind the BOS that the template, and so every served prompt, begins with; text that was stored without it gets it."""
    bos = str(tokenizer.bos_token or "")
    if not bos or tokenizer.chat_template is None or text.lstrip().startswith(bos):
        return text
    served = _template([{"role": "user", "content": "a"}], None, tokenizer, prompt=True)
    return bos + text if served.startswith(bos) else text


def _preformatted_spans(text: str, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Assistant turns of rendered text: from behind the template's assistant header to its end-of-turn mark, the mark included.

    An empty thinking block behind the header is left out, as in rows of messages.

    Raises:
        Reject: `no_assistant_header: …` where the header does not occur (the text belongs to another template, B04).
    """
    header, end = _turn_marks(tokenizer)
    spans, at = [], 0
    while (found := text.find(header, at)) >= 0:
        start = found + len(header)
        stop = text.find(end, start)
        at = len(text) if stop < 0 else stop + len(end)
        spans.append(_trim(text, start, at, {}, tokenizer))
    if not spans:
        raise Reject(f"no_assistant_header: {header!r} of the tokenizer's template is not in the text")
    return spans


def _turn_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the template writes before and behind an answer, found by letting it write one."""
    question, answer = "a question to look for", "an answer to look for"
    asked = [{"role": "user", "content": question}]
    plain, prompt = _template(asked, None, tokenizer), _template(asked, None, tokenizer, prompt=True)
    answered = _template([*asked, {"role": "assistant", "content": answer}], None, tokenizer)
    between, _, end = answered.partition(question)[2].partition(answer)
    header = prompt[len(plain) :] if prompt.startswith(plain) and prompt != plain else between.strip()
    if not header or not end.strip():
        raise Reject("template_error: the template marks neither begin nor end of an answer; give messages instead of text")
    return header, end.rstrip()

"""Conversations to learn from: the assistant's tokens and no others, whatever the template makes of them."""

import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import data, rl
from flowrl.errors import DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
#: Thoughts of earlier answers are taken out, as many templates of reasoning models do it.
FORGETS = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}"
)
#: The beginning of an answer that is sampled is not that of an answer that is given.
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And <|im_end|> one?"},
    {"role": "assistant", "content": "Five."},
]


def tokenizer(template):
    """A token per byte, and two special ones that begin and end a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["<pad>", *letters])}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template, fast.name_or_path = template, "letters"
    return fast


def source(*talks, **options):
    return data.rows([{"talk": t, "id": i} for i, t in enumerate(talks)], messages="talk", shuffle=False, **options)


def read(template, *talks, **options):
    made = source(*talks, batch=len(talks), **options)
    return made.to_batch(made.cursor().draw(), 0, tokenizer(template))


def trained(batch, using, row=0):
    """The text of the tokens that are trained on, a run of them each."""
    runs, before = [], False
    for token, on in zip(batch.response_ids[row].tolist(), batch.response_mask[row].tolist(), strict=True):
        if on:
            runs += [[]] if not before else []
            runs[-1].append(token)
        before = on
    return [using.decode(run) for run in runs]


def test_what_the_assistant_says_is_learned_and_nothing_else():
    batch, using = read(CHATML, [*TALK[:3], {"role": "user", "content": "And one?"}, *TALK[4:]]), tokenizer(CHATML)
    assert {n: str(t) for n, t in source(TALK, batch=1).schema().items()} == {
        "prompt": "any",
        "prompt_ids": "i32[*prompt]",
        "response_ids": "i32[*response]",
        "tokens": "i32[*token]",
        "response_mask": "bool[*response]",
        "messages": "any",
        "id": "any",
    }
    assert set(batch.fields) == set(source(TALK, batch=1).schema())
    whole = using.apply_chat_template(batch.messages[0], tokenize=False)
    assert using.decode(batch.tokens[0]) == whole
    assert batch.prompt[0] == whole[: whole.index("Four")] == using.decode(batch.prompt_ids[0])
    assert batch.tokens[0].tolist() == batch.prompt_ids[0].tolist() + batch.response_ids[0].tolist()
    assert trained(batch, using) == ["Four.<|im_end|>", "Five.<|im_end|>"]


def test_marks_of_the_template_are_believed():
    batch = read(MARKED, TALK)
    assert trained(batch, tokenizer(MARKED)) == ["Four.<|im_end|>", "Five.<|im_end|>"]
    same = read(CHATML, TALK)
    assert batch.tokens.equal(same.tokens) and batch.response_mask.equal(same.response_mask)


def test_a_mark_of_an_answers_text_in_a_question_ends_nothing():
    """The end-of-turn token in what the user says is the user's."""
    assert trained(read(CHATML, TALK), tokenizer(CHATML)) == ["Four.<|im_end|>", "Five.<|im_end|>"]


def test_an_answer_without_an_end_learns_one_at_the_end():
    batch = read(PLAIN, TALK[1:3], TALK[1:3] + TALK[1:2])
    assert trained(batch, tokenizer(PLAIN)) == ["Four.\n<|im_end|>"]
    assert trained(batch, tokenizer(PLAIN), 1) == ["Four.\n"], "a question follows: the answer is not the end"


def test_a_system_message_is_put_before_conversations_that_have_none():
    batch = read(CHATML, TALK[1:3], TALK[:3], system="Be kind.")
    assert [m[0]["content"] for m in batch.messages] == ["Be kind.", "Be brief."]
    assert batch.prompt[0].startswith("<|im_start|>system\nBe kind.")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_tools_are_shown_before_a_conversation(template):
    """They were left out without a word: the policy learned to call tools that it was not shown."""
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}" + template
    batch = read(shown, TALK, tools=[{"name": "add"}])
    assert batch.prompt[0].startswith('[{"name": "add"}]<|im_start|>')
    assert trained(batch, tokenizer(shown)) == ["Four.<|im_end|>", "Five.<|im_end|>"]


def test_a_template_that_forgets_is_refused_by_name():
    thoughts = [*TALK[1:2], {"role": "assistant", "content": "Hm.</think>Four."}, *TALK[3:]]
    assert trained(read(FORGETS, thoughts[:2]), tokenizer(FORGETS)) == ["Hm.</think>Four.<|im_end|>"]
    with pytest.raises(DataError) as caught:
        read(FORGETS, TALK[1:3], thoughts)
    said = caught.value
    assert said.what == (
        "The chat template of 'letters' does not keep what it wrote: what it makes of messages 1 to 2 "
        "is not the beginning of what it makes of all 4."
    )
    assert said.fix == (
        "Put {% generation %} and {% endgeneration %} around what the assistant says in the template, or learn from "
        "conversations with one answer, at the end."
    )
    assert "row 1" in str(said.at)


def test_a_template_with_another_beginning_for_sampling_is_refused():
    with pytest.raises(DataError) as caught:
        read(THINKS, TALK)
    assert caught.value.what == (
        "The chat template of 'letters' does not keep what it wrote: the beginning of an answer that it "
        "writes for sampling is not that of message 3."
    )


@pytest.mark.parametrize(
    ("template", "talk", "what"),
    [
        (CHATML, TALK[:2], "A conversation has no message of the assistant to learn from."),
        (CHATML, TALK[2:3], "A conversation begins with an answer."),
        (CHATML, [], "The conversation 'talk' of a row is empty."),
        (CHATML, None, "The conversation 'talk' of a row is missing."),
        (CHATML, [{"role": "user"}], "A message of 'talk' lacks 'role' or 'content'."),
        (None, TALK, "The prompts are chats, and the tokenizer has no chat template."),
        (
            MARKED.replace("m.role == 'assistant'", "m.role == 'model'"),
            TALK,
            "The chat template of 'letters' marks no token of a conversation as the assistant's.",
        ),
        ("{{ raise_exception('no') }}", TALK, "The chat template refuses these messages: no."),
        ("{{ raise_exception('no') }}{% generation %}{% endgeneration %}", TALK, "The chat template refuses"),
    ],
)
def test_what_cannot_be_learned_names_its_row(template, talk, what):
    with pytest.raises(DataError) as caught:
        read(template, TALK if template and "raise" not in template and "model" not in template else talk, talk)
    assert caught.value.what.startswith(what) and "row " in str(caught.value.at)


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast, chat_template, name_or_path = False, CHATML, "an/old-one"

    made = source(TALK, batch=1)
    with pytest.raises(DataError, match="'an/old-one' does not say where in a text its tokens are"):
        made.to_batch(made.cursor().draw(), 0, Slow())


@pytest.mark.parametrize("other", ["prompt", "response", "rejected", "chat"])
def test_conversations_and_prompts_are_not_read_at_once(other):
    more = {"rejected": {"rejected": "x", "response": "y"}, "chat": {"chat": True}}.get(other, {other: "x"})
    with pytest.raises(DataError) as caught:
        source(TALK, batch=1, **more)
    assert "messages='talk' are whole conversations, and" in caught.value.what


def test_a_column_that_holds_no_conversations():
    with pytest.raises(DataError, match="The column 'id' of the list of rows holds no lists"):
        data.rows([{"talk": TALK, "id": 3}], batch=1, messages="id").schema()
    with pytest.raises(DataError, match="has no column 'tlak', which is its messages") as caught:
        data.rows([{"talk": TALK, "id": 3}], batch=1, messages="tlak").schema()
    assert caught.value.fix == "Write messages='talk'."


def test_long_prompts_are_dropped_or_cut():
    batch = read(CHATML, TALK, TALK[1:3], max_prompt_tokens=40, overlong="drop")
    assert batch.keys == ((1,),) and batch.id.to_list() == [1]
    batch = read(CHATML, TALK, max_prompt_tokens=5, overlong="truncate")
    assert len(batch.prompt_ids[0]) == 5 and trained(batch, tokenizer(CHATML))[0] == "Four.<|im_end|>"


texts = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_whatever_is_said_only_answers_are_learned(turns):
    talk = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    batch, using = read(CHATML, talk), tokenizer(CHATML)
    assert trained(batch, using) == [f"{answer}<|im_end|>" for _, answer in turns]


def test_a_program_learns_conversations(tmp_path):
    task = runpy.run_path(str(Path(__file__).parents[2] / "algorithms" / "tasks" / "arithmetic.py"))
    config = {**task["MODEL"].config, "vocab_size": 300, "max_position_embeddings": 256}
    model = fl.Model(config=config, tokenizer=lambda: tokenizer(CHATML))
    flow = fl.Flow("sft")
    actor = flow.worker(fl.Actor, model, name="actor", lr=1e-2)

    @flow.program
    def sft(steps: int = 2):
        for step, batch in flow.steps(source(TALK, TALK[:3], batch=2), steps):
            flow.log(step, actor.update(batch, loss=rl.sft()))

    assert not flow.check().errors
    flow.run(out=tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2 and f'"tokens": {3 * len("Four.") + 3}' in lines[0]

"""Arguments of a chat template are plain JSON, none of flowrl's own, and read by the template; else they are refused."""

from __future__ import annotations

import inspect

import pytest
from byte_tokenizer import make_tokenizer

import flowrl as fl
from flowrl import data
from flowrl.data.identity import identity
from flowrl.data.template_arguments import RESERVED, check_read, template_arguments, template_variables
from flowrl.errors import DataError, ModelError

#: As that of Qwen3: without thinking an answer begins behind an empty thought, also in a conversation that is given.
QWEN = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "<think></think>{% endif %}{{ m.content }}~{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{% endif %}"
)
#: As that of gpt-oss: an argument that the template gives a value where nobody else does, in a macro.
GPT_OSS = (
    "{%- macro head() -%}{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "Reasoning: {{ reasoning_effort }}\n{%- endmacro -%}{{ head() }}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
OFF = {"enable_thinking": False}


def read(template, row, **options):
    made = data.rows([row], batch=1, **options)
    return made.to_batch(made.cursor().draw(), 0, make_tokenizer(template))


def text_of(batch, template=QWEN):
    return make_tokenizer(template).decode(batch.prompt_ids[0])


@pytest.mark.parametrize("prompt", ["hi", [{"role": "user", "content": "hi"}]])
def test_an_argument_reaches_the_template_of_a_prompt(prompt):
    said = {True: "<user>hi~<assistant>", False: "<user>hi~<assistant><think></think>"}
    for thinks, text in said.items():
        batch = read(QWEN, {"prompt": prompt}, chat=True, chat_template_kwargs={"enable_thinking": thinks})
        assert text_of(batch) == text
    assert text_of(read(QWEN, {"prompt": prompt}, chat=True)) == said[True]


def test_a_text_is_an_argument_as_well():
    batch = read(GPT_OSS, {"prompt": "hi"}, chat=True, chat_template_kwargs={"reasoning_effort": "high"})
    assert text_of(batch, GPT_OSS) == "Reasoning: high[user]hi[assistant]"


def test_a_conversation_to_learn_from_begins_its_answer_as_one_that_is_sampled():
    """The empty thought is given without thinking, and learned with it."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    given = read(QWEN, {"talk": talk}, messages="talk", chat_template_kwargs=OFF)
    learned = read(QWEN, {"talk": talk}, messages="talk", chat_template_kwargs={"enable_thinking": True})
    using = make_tokenizer(QWEN)
    assert text_of(given) == text_of(read(QWEN, {"prompt": talk[:1]}, chat_template_kwargs=OFF))
    assert using.decode(given.response_ids[0]) == "yes~"
    assert using.decode(learned.response_ids[0]) == "<think></think>yes~"
    assert given.tokens.equal(learned.tokens)


def test_a_template_that_marks_answers_gets_them_too():
    marked = QWEN.replace("{{ m.content }}~", "{% generation %}{{ m.content }}~{% endgeneration %}") + "{{ style }}"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    found = read(marked, {"talk": talk}, messages="talk", chat_template_kwargs={"style": "!"})
    assert make_tokenizer(marked).decode(found.tokens[0]).endswith("yes~!")


def test_what_templates_read_is_known_however_they_read_it():
    tokenizer = make_tokenizer(QWEN)
    assert template_variables(tokenizer) == {"messages", "add_generation_prompt", "enable_thinking"}
    assert "reasoning_effort" in template_variables(make_tokenizer(GPT_OSS))
    marked = "{% for m in messages %}{% generation %}{{ own }}{% endgeneration %}{% break %}{% endfor %}"
    assert template_variables(make_tokenizer(marked)) == {"messages", "own"}
    assert template_variables(make_tokenizer("{{ raise_exception(strftime_now('%d')) }}{{ range(3) }}")) == set()
    assert template_variables(make_tokenizer("{% if %}")) is None, "the template refuses what is rendered, in its words"
    tokenizer.chat_template = {"default": "{{ plain }}", "tool_use": "{{ with_tools }}"}
    assert template_variables(tokenizer) == {"plain"}
    assert template_variables(tokenizer, [{"type": "function"}]) == {"with_tools"}


def test_one_that_the_template_never_reads_is_refused_at_the_line_of_the_source():
    source = data.rows([{"prompt": "hi"}], batch=1, chat=True, chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(DataError, match="reads no 'enable_thinkin'") as error:
        source.to_batch(source.cursor().draw(), 0, make_tokenizer(QWEN))
    assert error.value.have == "enable_thinking" and error.value.fix == "Did you mean 'enable_thinking'?"
    assert error.value.at == source.made_at and error.value.at.file == __file__

    with pytest.raises(DataError, match="reads no 'enable_thinking'") as error:
        read(GPT_OSS, {"prompt": "hi"}, chat=True, chat_template_kwargs=OFF)
    assert "never read" in error.value.fix and error.value.have == "reasoning_effort"


def test_no_row_is_skipped_for_it():
    source = data.rows([{"prompt": "hi"}] * 2, batch=2, chat=True, chat_template_kwargs={"x": 1}, on_bad="skip")
    with pytest.raises(DataError, match="reads no 'x'"):
        source.to_batch(source.cursor().draw(), 0, make_tokenizer(QWEN))
    assert source.skipped == 0


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ("enable_thinking", "is no dict", '{"enable_thinking": False}'),
        ({3: True}, "has the key 3", "name"),
        ({"enable-thinking": True}, "has the key 'enable-thinking'", "name"),
        ({"tools": []}, "has 'tools'", "tools="),
        ({"messages": []}, "has 'messages'", "data"),
        ({"conversation": []}, "has 'conversation'", "data"),
        ({"add_generation_prompt": True}, "has 'add_generation_prompt'", "Leave it out"),
        ({"continue_final_message": True}, "has 'continue_final_message'", "Leave it out"),
        ({"tokenize": False}, "has 'tokenize'", "Leave it out"),
        ({"return_dict": True}, "has 'return_dict'", "Leave it out"),
        ({"max_length": 5}, "has 'max_length'", "max_prompt_tokens="),
        ({"chat_template": "x"}, "has 'chat_template'", "tokenizer="),
        ({"x": {1, 2}}, "'x' is of set", "JSON"),
        ({"x": [{"y": object()}]}, "'x' is of object", "JSON"),
        ({"x": (1, 2)}, "'x' is of tuple", "list"),
        ({"x": float("nan")}, "'x' is nan", "JSON"),
        ({"x": {1: 2}}, "'x' has the key 1", "JSON"),
    ],
)
def test_what_no_template_may_be_given_is_refused_where_the_source_is_made(given, what, fix):
    with pytest.raises(DataError) as error:
        data.rows([{"prompt": "hi"}], batch=1, chat=True, chat_template_kwargs=given)
    assert what in error.value.what and fix in error.value.fix
    assert error.value.at is not None and error.value.at.file == __file__


def test_no_parameter_of_transformers_is_taken_for_one_of_the_template():
    """``documents`` are both: the template reads them under that name."""
    from transformers import PreTrainedTokenizerBase

    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert {*own} - {"self", "kwargs", "documents"} <= {*RESERVED}


@pytest.mark.parametrize("given", [{"x": None}, {"x": [1, 2.5, "a", {"y": True}]}, {"documents": []}, {}, None])
def test_plain_values_will_do(given):
    assert data.rows([{"prompt": "hi"}], batch=1, chat=True, chat_template_kwargs=given).reading.chat


def test_they_are_for_chats():
    with pytest.raises(DataError, match="is for chats") as error:
        data.rows([{"prompt": "hi"}], batch=1, chat_template_kwargs=OFF).schema()
    assert "chat=True" in error.value.fix
    with pytest.raises(DataError, match="chat_template_kwargs= is given too"):
        data.rows([{"body": "hi"}], batch=1, text="body", length=8, chat_template_kwargs=OFF)


@pytest.mark.parametrize(
    "name", ["enable_thinking", "reasoning_effort", "template_kwargs", "apply_chat_template_kwargs"]
)
def test_who_writes_one_as_an_option_of_the_data_is_told_how(name):
    with pytest.raises(DataError, match=f"no option '{name}'") as error:
        data.rows([{"prompt": "hi"}], batch=1, chat=True, **{name: False})
    assert "chat_template_kwargs=" in error.value.fix


def test_a_resume_with_others_is_told():
    def what(given):
        return identity(data.rows([{"prompt": "hi"}], batch=1, chat=True, chat_template_kwargs=given))

    assert what(OFF)["chat_template_kwargs"] == "enable_thinking=False"
    assert what(OFF) != what({"enable_thinking": True}) and what(OFF) != what(None)
    assert what({"a": 1, "b": 2}) == what({"b": 2, "a": 1}) and what({}) == what(None)
    assert "chat_template_kwargs" not in what(None), "as in records of before there was this option"


def test_parts_and_strata_have_them():
    source = data.rows([{"prompt": "hi", "level": "x"}], batch=1, chat=True, chat_template_kwargs=OFF)
    for mixed in (data.stratified(source, by="level"), data.mix({"a": source}, batch=1)):
        batch = mixed.to_batch(mixed.cursor().draw(), 0, make_tokenizer(QWEN))
        assert text_of(batch) == "<user>hi~<assistant><think></think>"


def test_tools_go_beside_them():
    assert template_arguments(None, None) == {} == template_arguments([], {})
    assert template_arguments([1], OFF) == {"enable_thinking": False, "tools": [1]}


def test_a_tokenizer_without_a_template_reads_none():
    check_read({}, make_tokenizer(None))
    with pytest.raises(ModelError, match="has no chat template") as error:
        check_read(OFF, make_tokenizer(None))
    assert error.value.fix
    assert fl.data.Options.__annotations__["chat_template_kwargs"]

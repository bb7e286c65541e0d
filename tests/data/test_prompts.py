"""Rows as a batch: text and messages through the tokenizer, the other columns as they are, and what is too long."""

import datetime
import json

import pytest
from byte_tokenizer import CHAT, TEMPLATE, make_tokenizer

from flowrl import data
from flowrl.errors import DataError


def test_values_become_what_json_can_hold(tokenizer):
    import numpy as np

    row = {"prompt": "a", "day": datetime.date(2024, 2, 3), "x": np.float32(0.5), "xs": (np.arange(2), {1: "b"})}
    source = data.rows([row], batch=1)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer)
    assert batch.day[0] == "2024-02-03"
    assert batch.xs[0] == [[0, 1], {"1": "b"}]
    assert json.loads(json.dumps(batch.to_record()))["columns"]["x"] == {"values": [0.5]}


def test_chosen_columns(tokenizer):
    source = data.rows([{"q": "a", "one": 1, "two": 2}], batch=1, prompt="q", columns=["two"])
    assert list(source.schema()) == ["prompt", "prompt_ids", "two"]
    assert source.to_batch(source.cursor().draw(), 0, tokenizer).two[0] == 2


def test_response_is_tokenized_and_ended(tokenizer):
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "a", "answer": "b~"}]
    source = data.rows(rows, batch=2, response="answer", shuffle=False)
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer)
    end = tokenizer.eos_token_id
    assert {name: batch[name].type for name in batch.fields} == {n: str(t) for n, t in source.schema().items()}
    assert batch.answer.to_list() == ["3", "b~"]
    three, b = (tokenizer.encode(x, add_special_tokens=False) for x in "3b")
    assert batch.response_ids.to_list() == [[*three, end], [*b, end]]  # an end that is there already stays one
    assert batch.response_mask.to_list() == [[True, True], [True, True]]
    for prompt, response, tokens in zip(batch.prompt_ids, batch.response_ids, batch.tokens, strict=True):
        assert tokens.tolist() == prompt.tolist() + response.tolist()


def test_messages_go_through_the_template():
    chatty = make_tokenizer(TEMPLATE)
    source = data.rows([{"chat": CHAT, "prompt_id": 4}], batch=1, prompt="chat")
    assert list(source.schema()) == ["prompt", "prompt_ids", "messages", "prompt_id"]
    batch = source.to_batch(source.cursor().draw(), 0, chatty)
    assert batch.prompt[0] == "[user]hi[assistant]"
    assert chatty.decode(batch.prompt_ids[0]) == "[user]hi[assistant]"  # without a second begin token
    assert batch.messages[0] == CHAT


def test_text_as_a_chat_with_a_system_message():
    source = data.rows([{"prompt": "hi"}], batch=1, chat=True, system="be brief")
    batch = source.to_batch(source.cursor().draw(), 0, make_tokenizer(TEMPLATE))
    assert batch.prompt[0] == "hi"
    assert make_tokenizer().decode(batch.prompt_ids[0]) == "[system]be brief[user]hi[assistant]"
    assert "messages" not in batch


def test_a_system_message_of_the_data_stays():
    own = [{"role": "system", "content": "own"}, *CHAT]
    source = data.rows([{"prompt": own}], batch=1, system="other")
    batch = source.to_batch(source.cursor().draw(), 0, make_tokenizer(TEMPLATE))
    assert batch.prompt[0] == "[system]own[user]hi[assistant]"


def long_and_short(**options):
    return data.rows(
        [{"prompt": "abcdef"}, {"prompt": "ab"}, {"prompt": "xyzuvw"}, {"prompt": "c"}],
        batch=4, shuffle=False, max_prompt_tokens=3, **options,
    )  # fmt: skip


def test_overlong_is_an_error(tokenizer):
    source = long_and_short()
    with pytest.raises(DataError, match="7 tokens; max_prompt_tokens is 3") as caught:
        source.to_batch(source.cursor().draw(), 0, tokenizer)
    assert "row 0" in str(caught.value.at)


def test_overlong_is_dropped_and_counted(tokenizer, caplog):
    source = long_and_short(overlong="drop")
    batch = source.to_batch(source.cursor().draw(), 10, tokenizer)
    assert batch.keys == ((11,), (13,))  # a uid is the number of the draw, whatever is dropped
    assert batch.prompt.to_list() == ["ab", "c"]
    assert source.dropped == 2
    assert [r.message.split(":")[0] for r in caplog.records] == ["dropped a prompt of 7 tokens (at most 3)"] * 2


def test_overlong_is_cut_at_its_beginning(tokenizer):
    source = long_and_short(overlong="truncate")
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer)
    assert tokenizer.decode(batch.prompt_ids[0]) == "def"
    assert batch.prompt[0] == "abcdef"


def test_a_step_that_loses_all_its_prompts_is_an_error(tokenizer):
    source = data.rows([{"prompt": "abcdef"}], batch=2, max_prompt_tokens=3, overlong="drop")
    with pytest.raises(DataError, match="All 2 prompts"):
        source.to_batch(source.cursor().draw(), 0, tokenizer)


PAIRS = [{"prompt": "1+2=", "good": "3", "bad": "44"}, {"prompt": "5+5=", "good": "10", "bad": "9"}]


def pairs_source(**options):
    return data.rows(PAIRS, batch=2, shuffle=False, response="good", rejected="bad", **options)


def test_a_rejected_response_makes_two_rows(tokenizer):
    source = pairs_source()
    batch = source.to_batch(source.cursor().draw(), 7, tokenizer)
    assert batch.keys == ((7, 0), (7, 1), (8, 0), (8, 1))
    assert batch.preferred.to_list() == [True, False, True, False]
    ids = [
        [
            *tokenizer(row["prompt"])["input_ids"],
            *tokenizer(row[name], add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        for row in PAIRS
        for name in ("good", "bad")
    ]
    assert batch.tokens.to_list() == ids
    assert batch.prompt.to_list() == ["1+2=", "1+2=", "5+5=", "5+5="]
    assert str(source.schema()["preferred"]) == "bool[]" and set(source.schema()) == set(batch.fields)
    assert source.dropped == 0


def test_a_rejected_response_needs_a_better_one():
    with pytest.raises(DataError, match="worse than another response"):
        data.rows(PAIRS, batch=2, rejected="bad")
    with pytest.raises(DataError, match="no column 'worse', which is its rejected"):
        data.rows(PAIRS, batch=2, response="good", rejected="worse").schema()


def test_a_missing_rejected_response_names_the_row(tokenizer):
    source = data.rows([{"prompt": "1+2=", "good": "3", "bad": None}], batch=1, response="good", rejected="bad")
    with pytest.raises(DataError, match="The response 'bad' of a row is None"):
        source.to_batch(source.cursor().draw(), 0, tokenizer)

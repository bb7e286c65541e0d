"""Documents to learn from: rows of a bounded length that have every token once, packed or each document on its own."""

from itertools import pairwise

import pytest
from byte_tokenizer import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import data
from flowrl.data.documents import cut_documents
from flowrl.errors import DataError

documents = st.lists(st.lists(st.integers(5, 9), min_size=1, max_size=30), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(documents, st.integers(2, 12), st.booleans())
def test_every_token_is_learned_once_and_no_row_is_too_long(documents, length, pack):
    pieces = cut_documents(documents, begin=0, length=length, pack=pack)
    assert all(2 <= len(piece.tokens) <= length for piece in pieces)
    learned = [token for piece in pieces for token in piece.tokens[1:]]
    assert learned == [token for document in documents for token in document]
    assert len({(piece.document, piece.part) for piece in pieces}) == len(pieces)
    if pack:
        assert all(len(piece.tokens) == length for piece in pieces[:-1])
    for before, after in pairwise(pieces):
        assert after.tokens[0] == (before.tokens[-1] if pack or after.part else 0)


def read(rows, **options):
    source = data.rows(rows, shuffle=False, **options)
    return source, source.to_batch(source.cursor().draw(), 4, make_tokenizer())


LONG = [{"body": "abcdefgh", "name": "one"}, {"body": "xy", "name": "two"}]


def test_packed_documents_follow_each_other():
    source, batch = read(LONG, batch=2, text="body", length=5)
    words = make_tokenizer()
    assert set(batch.fields) == set(source.schema()) == {
        "prompt", "prompt_ids", "response_ids", "tokens", "response_mask",
    }  # fmt: skip
    assert [words.decode(ids) for ids in batch.tokens.to_list()] == ["<s>abcd", "defgh", "h~xy~"]
    assert batch.keys == ((4, 0), (4, 1), (4, 2)), "the third begins with the end of the first"
    assert all(all(mask) for mask in batch.response_mask.to_list())
    assert [len(row) for row in batch.response_ids.to_list()] == [4, 4, 4]


def test_documents_on_their_own_keep_their_columns():
    source, batch = read(LONG, batch=2, text="body", length=5, pack=False)
    words = make_tokenizer()
    assert [words.decode(ids) for ids in batch.tokens.to_list()] == ["<s>abcd", "defgh", "h~", "<s>xy~"]
    assert batch.keys == ((4, 0), (4, 1), (4, 2), (5, 0))
    assert batch.name.to_list() == ["one", "one", "one", "two"] and "name" in source.schema()


def test_a_tokenizer_without_a_begin_token_begins_with_its_end():
    words = make_tokenizer()
    words.bos_token = None
    source = data.rows(LONG, shuffle=False, batch=1, text="body", length=100)
    assert words.decode(source.to_batch(source.cursor().draw(), 0, words).tokens[0]) == "~abcdefgh~"


def test_parts_of_a_mixture():
    one, two = (data.rows([row], batch=1, text="body", length=5) for row in LONG)
    mixed = data.mix({"one": one, "two": two}, batch=2, exact=True)
    batch = mixed.to_batch(mixed.cursor().draw(), 7, make_tokenizer())
    assert batch.keys == ((7, 0), (7, 1), (7, 2), (8, 0))
    assert batch.source.to_list() == ["one", "one", "one", "two"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"text": "body"}, "Give length=, the tokens of a row: length=2048."),
        ({"length": 8}, "Give text=, the column of the documents."),
        ({"pack": False}, "Give text=, the column of the documents."),
        ({"text": "body", "length": 1}, "Give the tokens of a row, 2 or more."),
        ({"text": "body", "length": 8, "pack": "no"}, "pack='no' is not True or False"),
        ({"text": "body", "length": 8, "prompt": "name"}, "Leave out prompt=, or text=."),
        ({"text": "body", "length": 8, "messages": "name"}, "Leave out messages=, or text=."),
        ({"text": "body", "length": 8, "overlong": "drop"}, "Leave out overlong=, or text=."),
        ({"text": "body", "length": 8, "columns": ["name"]}, "Leave out columns=, or write pack=False."),
        ({"text": "bdy", "length": 8}, "Write text='body'."),
    ],
)
def test_wrong_options_are_told(options, says):
    with pytest.raises(DataError) as error:
        data.rows(LONG, batch=1, **options).schema()
    assert says in error.value.report()


@pytest.mark.parametrize(("value", "says"), [("", "is empty"), (None, "is missing"), (["a"], "is a list"), (3, "is 3")])
def test_wrong_documents_are_named(value, says):
    with pytest.raises(DataError) as error:
        read([*LONG, {"body": value}], batch=3, text="body", length=8)
    assert f"The document 'body' of a row {says}" in error.value.report() and "row 2" in error.value.report()

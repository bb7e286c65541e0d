"""Field types: how they are written, read and compared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.graph.ops.field_types import DTYPES, STANDARD, FieldType, TypeTextError, parse_fields

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
dims = st.one_of(names, st.integers(1, 4096).map(str))
types = st.builds(
    lambda dtype, ragged, rest: FieldType(dtype, ((f"*{ragged}",) if ragged else ()) + tuple(rest)),
    st.sampled_from([d for d in DTYPES if d != "any"]),
    st.none() | names,
    st.lists(dims, max_size=2),
)


@pytest.mark.parametrize(
    ("text", "dtype", "dims"),
    [
        ("f32[]", "f32", ()),
        ("f32", "f32", ()),
        ("i32[*token]", "i32", ("*token",)),
        (" bool[*response] ", "bool", ("*response",)),
        ("bf16[*response, 4096]", "bf16", ("*response", "4096")),
        ("f64[expert,hidden]", "f64", ("expert", "hidden")),
        ("any", "any", ()),
    ],
)
def test_a_type_is_read(text, dtype, dims):
    assert FieldType.parse(text) == FieldType(dtype, dims)


@given(types)
def test_what_is_written_is_read_back(type_):
    assert FieldType.parse(str(type_)) == type_


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("float32[]", "'float32' is no dtype", "Write f32."),
        ("int64[]", "'int64' is no dtype", "Write i64."),
        ("string", "'string' is no dtype", None),
        ("f32[", "'f32[' is no field type", "f32[*response]"),
        ("f32[1x]", "'1x' is no dim", "*name"),
        ("f32[hidden, *token]", "ragged dim that is not the first", "Put it first."),
        ("f32[*a, *b]", "ragged dim that is not the first", "Put it first."),
    ],
)
def test_a_wrong_type_says_how_to_write_it(text, what, fix):
    with pytest.raises(TypeTextError) as error:
        FieldType.parse(text)
    assert what in str(error.value)
    assert error.value.fix is None if fix is None else fix in error.value.fix


def test_any_is_read_as_anything_and_everything_as_any():
    rewards = FieldType.parse("f32[]")
    assert rewards.accepts(rewards)
    assert rewards.accepts(FieldType("any")) and FieldType("any").accepts(rewards)
    assert not rewards.accepts(FieldType.parse("f64[]"))
    assert not rewards.accepts(FieldType.parse("f32[*response]"))
    assert not FieldType.parse("f32[*token]").accepts(FieldType.parse("f32[*response]"))


def test_fields_are_read_with_their_types_and_the_standard_ones_know_theirs():
    assert parse_fields("tokens, rewards: f32[], mine, logits: f32[*response, vocab]") == {
        "tokens": FieldType("i32", ("*token",)),
        "rewards": FieldType("f32"),
        "mine": None,
        "logits": FieldType("f32", ("*response", "vocab")),
    }
    assert parse_fields("") == {} == parse_fields(" , ")


@pytest.mark.parametrize("text", ["2fast", "a-b: f32[]", "rewards f32[]", ": f32[]"])
def test_what_is_no_field_is_refused(text):
    with pytest.raises(TypeTextError, match="is no field"):
        parse_fields(text)


def test_the_standard_fields_have_the_types_of_the_vocabulary():
    assert str(STANDARD["response_mask"]) == "bool[*response]"
    assert str(STANDARD["rewards"]) == "f32[]"
    assert all(STANDARD[n].dims == ("*response",) for n in ("values", "advantages", "returns", "ref_logprobs"))

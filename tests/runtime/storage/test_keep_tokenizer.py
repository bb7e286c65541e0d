"""A run writes the tokenizer of its rows, so that they can be read token by token while it goes on."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flowrl.runtime.storage.keep_tokenizer import NAME, keep_tokenizer
from flowrl.show.row_texts import tokenizer_of


def test_a_tokenizer_is_written_once_and_read_back(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"sum": 0, "of": 1}, unk_token="of"))
    assert tokenizer_of(tmp_path) is None
    keep_tokenizer(tmp_path, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="of"))
    read = tokenizer_of(tmp_path)
    assert read is not None and read.decode([0, 1]) == "sum of"
    before = (tmp_path / NAME).stat().st_mtime_ns
    keep_tokenizer(tmp_path, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="of"))
    assert (tmp_path / NAME).stat().st_mtime_ns == before


def test_what_is_no_such_tokenizer_is_left_out(tmp_path: Path) -> None:
    for other in (None, object(), "a name"):
        keep_tokenizer(tmp_path, other)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_tokenizer_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"version": "1.0"')
    assert tokenizer_of(tmp_path) is None

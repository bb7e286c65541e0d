"""What tests of data share: a tokenizer."""

import pytest


@pytest.fixture(scope="module")
def tokenizer():
    from byte_tokenizer import make_tokenizer

    return make_tokenizer()

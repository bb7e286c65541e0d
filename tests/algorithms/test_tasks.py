"""The tasks that need no download: what they draw, what they reward, and that they are light."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.errors import DataError

ALGORITHMS = Path(__file__).parents[2] / "algorithms"


@pytest.fixture(autouse=True)
def beside_the_drivers(monkeypatch):
    monkeypatch.syspath_prepend(ALGORITHMS)


@pytest.fixture
def arithmetic():
    from tasks import arithmetic

    return arithmetic


@pytest.fixture
def guessing():
    from tasks import guessing

    return guessing


def numbers(row):
    a, b = row["prompt"].removesuffix("=").split("+")
    return int(a), int(b)


def test_import_and_schema_are_light():
    code = (
        "from tasks import arithmetic, guessing\n"
        "for source in (arithmetic.prompts(2), arithmetic.examples(2), arithmetic.heldout(), guessing.prompts(2), "
        "guessing.every_game()):\n"
        "    source.schema()\n"
        "import sys; bad = {'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": f"{ALGORITHMS}:{ALGORITHMS.parent}"})


# Arithmetic


def test_tokenizer_has_a_token_per_character(arithmetic):
    tokenizer = arithmetic.build_tokenizer()
    assert tokenizer.encode("12+7=19;") == [2, 3, 11, 8, 12, 2, 10, 13]
    assert tokenizer.decode([2, 3, 11, 8, 12, 2, 10, 13]) == "12+7=19;"
    assert tokenizer.eos_token_id == 13 == arithmetic.MODEL.config["eos_token_id"]
    assert tokenizer.pad_token_id == 0 == arithmetic.MODEL.config["pad_token_id"]
    assert len(tokenizer) == 16 == arithmetic.MODEL.config["vocab_size"]


def test_no_token_hides_in_an_answer(arithmetic):
    tokenizer = arithmetic.build_tokenizer()
    response = [2, 10, 13]
    assert tokenizer.decode(response, skip_special_tokens=True) == "19"
    for token in range(16):
        text = tokenizer.decode([token, *response], skip_special_tokens=True)
        hidden = token in (tokenizer.pad_token_id, tokenizer.eos_token_id)
        assert arithmetic.exact_match("12+7=", text) == float(hidden)


@pytest.mark.parametrize(
    ("response", "reward"), [("19", 1), ("019", 0), ("19 ", 0), ("1", 0), ("190", 0), ("", 0), ("+19", 0), ("?19", 0)]
)
def test_exact_match(arithmetic, response, reward):
    assert arithmetic.exact_match("12+7=", response) == reward
    assert arithmetic.exact_match(prompt="0+0=", response="0") == 1


@pytest.mark.parametrize(
    ("question", "verdict", "reward"),
    [("12+7=19?", "y", 1), ("12+7=19?", "n", 0), ("12+7=20?", "n", 1), ("12+7=20?", "y", 0), ("12+7=?", "n", 1)],
)
def test_a_verdict_is_true_or_not(arithmetic, question, verdict, reward):
    assert arithmetic.says_the_truth(question, verdict) == reward
    assert arithmetic.says_the_truth(question, "") == 0


def test_held_out_sums_are_never_trained_on(arithmetic):
    held_out = [numbers(row) for row in arithmetic.heldout().cursor().draw()]
    assert len(set(held_out)) == 512
    assert all(10 <= a <= 99 and 10 <= b <= 99 for a, b in held_out)
    everything = [numbers(row) for row in arithmetic.prompts(10_000 - 512).cursor().draw()]
    assert len(set(everything)) == len(everything) == 10_000 - 512
    assert not set(held_out) & set(everything)
    for source in (arithmetic.prompts(3000, one_digit=0.0), arithmetic.examples(3000, one_digit=0.2)):
        assert not set(held_out) & {numbers(row) for row in source.cursor().draw()}


def test_held_out_sums_are_always_the_same(arithmetic):
    source = arithmetic.heldout()
    first = source.cursor().draw()
    assert source.cursor().draw() == first == arithmetic.heldout().cursor().draw()
    assert arithmetic.heldout(20).cursor().draw() == first[:20]
    cursor = source.cursor()
    assert [len(cursor.draw()) for _ in range(3)] == [512, 0, 0]
    cursor = arithmetic.heldout(repeat=True).cursor()
    assert cursor.draw() == cursor.draw() == first
    with pytest.raises(DataError, match="512 held-out sums"):
        arithmetic.heldout(513)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_share_of_one_digit_operands(arithmetic, share):
    rows = arithmetic.prompts(2000, one_digit=share).cursor().draw()
    short = sum((a < 10) + (b < 10) for a, b in map(numbers, rows)) / 4000
    assert short == pytest.approx(share, abs=0.04)
    assert all(row["answer"] == str(sum(numbers(row))) for row in rows)


def test_seeds_of_sums(arithmetic):
    for one_digit in (None, 0.5):
        one, same, other = (arithmetic.prompts(50, one_digit=one_digit, seed=s).cursor().draw() for s in (0, 0, 1))
        assert one == same != other


def test_examples_end_with_the_stop_token(arithmetic):
    source = arithmetic.examples(8)
    tokenizer = arithmetic.build_tokenizer()
    batch = source.to_batch(source.cursor().draw(), 0, tokenizer)
    for prompt, answer, ids in zip(batch.prompt, batch.answer, batch.tokens, strict=True):
        assert tokenizer.decode(ids) == f"{prompt}{answer};"


# Guessing


def play(game, secret, guesses):
    """What the environment answers, and the rewards."""
    state, seen = game.reset({"secret": secret}, 0)
    assert seen == ""
    answers, rewards, done = "", [], False
    for guess in guesses:
        assert not done
        state, seen, reward, done = game.step(state, guess)
        answers += seen
        rewards.append(reward)
    return answers, rewards, done


@pytest.mark.parametrize(
    ("guesses", "answers", "rewards", "done"),
    [
        ("7", "=", [1.0], True),
        ("587", "><=", [0, 0, 1 / 3], True),
        ("0123", ">>>>", [0, 0, 0, 0], False),
        ("x+7", "??=", [0, 0, 1 / 3], True),
        (["", "7;"], "?=", [0, 1 / 2], True),
    ],
)
def test_a_game(guessing, guesses, answers, rewards, done):
    assert play(guessing.Guess(), 7, guesses) == (answers, rewards, done)


def test_bisection_finds_every_secret_within_the_turns(guessing):
    game = guessing.Guess()
    for secret in range(10):
        state, _ = game.reset({"secret": secret}, 0)
        low, high, done, turns = 0, 9, False, 0
        while not done:
            guess = (low + high) // 2
            state, seen, reward, done = game.step(state, str(guess))
            turns += 1
            low, high = (guess + 1, high) if seen == ">" else (low, guess - 1)
        assert turns <= game.turns and reward == 1 / turns


def test_steps_are_pure(guessing):
    game = guessing.Guess()
    state, _ = game.reset({"secret": 3}, 0)
    assert game.step(state, "5") == game.step(state, "5")


@pytest.mark.parametrize(
    ("guesses", "anchors"),
    [
        ("587", [(0, 9), (6, 9), (6, 7), (7, 7)]),
        ("857", [(0, 9), (0, 7), (6, 7), (7, 7)]),
        ("0x96", [(0, 9), (1, 9), (1, 9), (1, 8), (7, 8)]),
        ("5198", [(0, 9), (6, 9), (6, 9), (6, 8), (6, 7)]),
    ],
)
def test_the_anchor_of_a_game_is_the_digits_still_possible(guessing, guesses, anchors):
    """However they were found, and whatever was guessed that told nothing."""
    game = guessing.Guess()
    state, said = game.reset({"secret": 7}, 0)
    found = [game.anchor(state, said)]
    for guess in guesses:
        state, said, _, _ = game.step(state, guess)
        found.append(game.anchor(state, said))
    assert found == anchors


def test_every_game_is_each_secret_once(guessing):
    cursor = guessing.every_game().cursor()
    assert cursor.draw() == [{"prompt": "?", "secret": secret} for secret in range(10)]
    assert cursor.draw() == []


def test_a_row_without_a_secret_takes_it_from_the_seed(guessing):
    game = guessing.Guess()
    assert {game.reset({}, seed)[0].secret for seed in range(10)} == set(range(10))


def test_secrets_are_spread_and_belong_to_the_index(guessing):
    rows = guessing.prompts(500).cursor().draw()
    assert {row["secret"] for row in rows} == set(range(10))
    assert guessing.prompts(500).cursor().draw() == rows != guessing.prompts(500, seed=1).cursor().draw()
    assert {row["prompt"] for row in rows} == {"?"}


def test_every_character_of_the_game_is_a_token(guessing):
    tokenizer = guessing.build_tokenizer()
    assert len(tokenizer.encode("?5>8<7=;")) == 8
    assert tokenizer.decode(tokenizer.encode("?5>8<7=;")) == "?5>8<7=;"
    assert len(tokenizer) == guessing.MODEL.config["vocab_size"]
    assert tokenizer.eos_token_id == guessing.MODEL.config["eos_token_id"]

"""Addition of one- and two-digit numbers: ``12+7=`` is answered with ``19;``, where ``;`` ends a response.

512 sums of two two-digit numbers are held out; no training source ever draws them.
"""

from __future__ import annotations

import random
from functools import cache, partial
from typing import Any

import flowrl as fl
from flowrl import rl
from flowrl.errors import DataError

CHARS = "0123456789+=;"
HELD_OUT = 512
MAX_TOKENS = 8  # of an answer, its end included: room for mistakes


def build_tokenizer(more: str = "") -> Any:
    """One token per character; ``;`` ends a sequence. 16 tokens with padding and two that no text needs.

    ``more`` are further characters, whose tokens come first, so that ids of the two tokenizers differ.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # "?" and "_" are ordinary tokens: sampled ones stay visible in the text, so an answer with one is wrong.
    vocabulary = {token: i for i, token in enumerate(["<pad>", *more, *CHARS, "?", "_"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";", padding_side="left")


#: A Qwen2 of 1.6 million parameters with random weights.
MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": 16,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1 + CHARS.index(";"),
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)

#: What a judge is asked about an answer, and a Qwen2 that says ``y`` or ``n``, with more letters than the actor has.
QUESTION = "{prompt}{response}?"
JUDGE = fl.Model(
    config={**(MODEL.config or {}), "vocab_size": 18, "eos_token_id": 3 + CHARS.index(";")},
    tokenizer=partial(build_tokenizer, "yn"),
)


def prompts(batch: int, *, one_digit: float | None = None, seed: int = 0) -> fl.data.Source:
    """``batch`` sums a step, with the columns ``prompt`` ("12+7=") and ``answer`` ("19").

    ``one_digit`` is the probability that an operand has one digit; None draws from all pairs of numbers below 100
    alike, each once before any comes again.
    """
    return _source(batch, one_digit, seed, response=None)


def examples(batch: int, *, one_digit: float | None = None, seed: int = 1) -> fl.data.Source:
    """The same to learn from: prompts with their answers, ended by ``;``."""
    return _source(batch, one_digit, seed, response="answer")


def preferences(batch: int, *, one_digit: float | None = None, seed: int = 2) -> fl.data.Source:
    """``batch`` prompts, each with a right answer, which is preferred, and a wrong one."""

    def draw(index: int) -> dict[str, str]:
        row = _drawn(one_digit, seed, index)
        return {**row, "wrong": _wrong(row["answer"], random.Random(f"wrong {seed} {index}"))}

    return fl.data.generated(draw, batch=batch, response="answer", rejected="wrong")


def verdicts(batch: int, *, one_digit: float | None = None, seed: int = 3) -> fl.data.Source:
    """What the judge learns from: questions about answers, half of them wrong, with ``y`` or ``n``."""

    def draw(index: int) -> dict[str, str]:
        row, chance = _drawn(one_digit, seed, index), random.Random(f"verdict {seed} {index}")
        right = chance.random() < 0.5
        answer = row["answer"] if right else _wrong(row["answer"], chance)
        return {"prompt": QUESTION.format(prompt=row["prompt"], response=answer), "verdict": "y" if right else "n"}

    return fl.data.generated(draw, batch=batch, response="verdict", tokenizer=JUDGE.tokenizer)


def heldout(n: int = HELD_OUT, *, repeat: bool = False) -> fl.data.Source:
    """n held-out sums of two two-digit numbers, as one batch, always the same."""
    if not 1 <= n <= HELD_OUT:
        raise DataError(f"heldout({n}): there are {HELD_OUT} held-out sums.", fix=f"Ask for 1 to {HELD_OUT}.")
    return fl.data.rows(_held_out()[:n], batch=n, shuffle=False, repeat=repeat)


def exact_match(prompt: str, response: str) -> float:
    """1 where the response is the sum in decimal digits and nothing else, otherwise 0."""
    return float(response == _answer(prompt))


def says_one(response: str) -> float:
    """A cost: 1 where the digit 1 is said, otherwise 0. About half of the right answers have one."""
    return float("1" in response)


def says_yes(response: str) -> float:
    """The verdict of a judge: 1 where it says yes, otherwise 0."""
    return float(response == "y")


def says_the_truth(prompt: str, response: str) -> float:
    """1 where the verdict on ``12+7=19?`` is right: ``y`` of the sum, ``n`` of all else."""
    asked, _, answer = prompt.removesuffix("?").partition("=")
    return float(response == ("y" if answer == _answer(f"{asked}=") else "n"))


def stages(flow: fl.Flow, actor: fl.Actor, reward: fl.FunctionReward) -> None:
    """Declare two more programs of a flow: ``warmup``, and ``evaluate`` on held-out sums."""

    @flow.program
    def warmup(steps: int = 400, rows: int = 128, lr: float = 1e-3) -> None:
        """A supervised warm-up: the actor learns the form of an answer, and some of the sums."""
        for step, batch in flow.steps(examples(rows, one_digit=0.5), steps):
            rate = lr * min(1, (step + 1) / 50) * (1 - step / steps)
            flow.log(step, actor.update(batch, loss=rl.sft(), lr=rate))

    @flow.program
    def evaluate() -> None:
        """Greedy answers to held-out sums of two-digit numbers."""
        for step, batch in flow.steps(heldout()):
            batch = actor.generate(batch, greedy=True)
            batch = reward.score(batch)
            flow.log(step, greedy_exact_match=batch.rewards.mean())


def _source(batch: int, one_digit: float | None, seed: int, response: str | None) -> fl.data.Source:
    if one_digit is None:
        return fl.data.rows(_training(), batch=batch, seed=seed, response=response)

    return fl.data.generated(lambda index: _drawn(one_digit, seed, index), batch=batch, response=response)


def _drawn(one_digit: float | None, seed: int, index: int) -> dict[str, str]:
    """A sum that is not held out; without ``one_digit`` of two numbers below 100, all alike."""
    chance = random.Random(f"{seed} {index}")  # a text: numbers next to each other would start alike
    while True:
        if one_digit is None:
            a, b = chance.randrange(100), chance.randrange(100)
        else:
            a, b = (chance.randrange(10) if chance.random() < one_digit else chance.randrange(10, 100) for _ in "ab")
        if (a, b) not in _held_out_pairs():
            return _row(a, b)


def _wrong(answer: str, chance: random.Random) -> str:
    """A wrong answer: a number near the right one, or something odd.

    What a judge has never been shown it may take for right, and a policy that is rewarded by it finds that: nothing at
    all, or signs until there is no room for more.
    """
    near = [str(n) for n in range(max(0, int(answer) - 12), int(answer) + 13)]
    signs = "".join(chance.choices("0123456789+=", k=chance.randint(1, MAX_TOKENS)))
    odd = ["", signs, answer + signs, answer + answer[-1], answer[:-1] + "+", answer[0] * 3, "=" + answer]
    return chance.choice([text for text in (near if chance.random() < 0.5 else odd) if text[:MAX_TOKENS] != answer])


def _answer(prompt: str) -> str:
    a, b = prompt.removesuffix("=").split("+")
    return str(int(a) + int(b))


def _row(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


@cache
def _held_out_pairs() -> dict[tuple[int, int], None]:
    """In a fixed order, so that the first n of them are always the same."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(7).shuffle(pairs)
    return dict.fromkeys(pairs[:HELD_OUT])


@cache
def _held_out() -> list[dict[str, str]]:
    return [_row(a, b) for a, b in _held_out_pairs()]


@cache
def _training() -> list[dict[str, str]]:
    held_out = _held_out_pairs()
    return [_row(a, b) for a in range(100) for b in range(100) if (a, b) not in held_out]

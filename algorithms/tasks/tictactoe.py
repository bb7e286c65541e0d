"""Tic-tac-toe against a player of random moves, and against one of optimal moves.

A game reads ``123456789<move>5</move>;a234E6789<move>3</move>;`` and so on: the policy is shown the board, and says a
move. A free field is its number; in its place stands a letter of the same rank, a capital one for a mark of the policy
and a small one for a mark of the other player. So what lies where can be read off each character alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import flowrl as fl
from flowrl.environments import Environment, reward

BOARD = "123456789"
MARKS = "xo"  # the policy's, also where the other one began, and the other one's
SHOWN = {"x": "ABCDEFGHI", "o": "abcdefghi"}
LINES = ("123", "456", "789", "147", "258", "369", "159", "357")
OPPONENTS = ("random", "optimal")
SIDES = ("first", "second")
PLAYERS = tuple(product(OPPONENTS, SIDES))
_THREES = tuple(tuple(BOARD.index(field) for field in line) for line in LINES)
#: The board, turned and mirrored in all 8 ways.
FORMS = ("123456789", "321654987", "789456123", "987654321", "147258369", "741852963", "369258147", "963852741")
_MOVE = re.compile(r"<move>([1-9])</move>")


# -- the game --------------------------------------------------------------------------------------


def free(board: str) -> str:
    """The fields that are free.

    >>> free("1x34o678x")
    '134678'
    """
    return "".join(field for field in board if field not in MARKS)


def play(board: str, field: str, mark: str) -> str:
    """The board after a move.

    >>> play("123456789", "5", "x")
    '1234x6789'
    """
    return board.replace(field, mark)


def winner(board: str) -> str:
    """The mark that has three in a line; empty where none has.

    >>> winner("xxx4oo789")
    'x'
    """
    return next((board[a] for a, b, c in _THREES if board[a] == board[b] == board[c]), "")


def is_over(board: str) -> bool:
    """Whether a player has won, or no field is free."""
    return bool(winner(board)) or not free(board)


@cache
def value(board: str, mark: str) -> int:
    """What the player of ``mark``, who moves next, comes to if both play as well as can be: 1, 0 or -1 (minimax)."""
    if is_over(board):
        return -1 if winner(board) else 0  # the last move was the other one's
    return max(-value(play(board, field, mark), _other(mark)) for field in free(board))


@cache
def best_moves(board: str, mark: str) -> str:
    """All moves of the player of ``mark`` that keep the value of the board.

    >>> best_moves("xx3oo6789", "o")
    '36'
    """
    fields, wanted = free(board), value(board, mark)
    return "".join(field for field in fields if -value(play(board, field, mark), _other(mark)) == wanted)


def reply(opponent: str, board: str, seed: int, mark: str = "o") -> str:
    """The move of an opponent: chosen by seed and board, so that all games of one seed meet the same player."""
    moves = best_moves(board, mark) if opponent == "optimal" else free(board)
    return random.Random(f"{seed} {board}").choice(moves)  # a text: seeds next to each other would start alike


def _other(mark: str) -> str:
    return "o" if mark == "x" else "x"


def show(board: str) -> str:
    """A board as the policy is shown it.

    >>> show("o234x6789")
    'a234E6789'
    """
    return "".join(SHOWN[said][i] if said in MARKS else said for i, said in enumerate(board))


def read(shown: str) -> str:
    """The board that is shown so.

    >>> read("a234E6789")
    'o234x6789'
    """
    return "".join(next((mark for mark in MARKS if said in SHOWN[mark]), said) for said in shown)


def turned(board: str, form: str) -> str:
    """A board turned or mirrored: what lies on field ``i`` comes to lie on field ``form[i - 1]``.

    >>> turned("x2o456789", "789456123")
    '123456x8o'
    """
    found = list(BOARD)
    for said, to in zip(board, form, strict=True):
        found[BOARD.index(to)] = said if said in MARKS else to
    return "".join(found)


# -- the environment -------------------------------------------------------------------------------


class TicTacToe(Environment):
    """Games: 1 for a win, 0.5 for a draw, -1 for a loss, -1.5 for a move to a field that is taken and for no move."""

    turns = 5

    def setup(self, state: Any) -> None:
        """The board is that of the prompt."""
        state.board, state.result = read(state.row["prompt"]), ""

    def respond(self, state: Any) -> str | None:
        """Move for the opponent; nothing where the game is over."""
        said = _MOVE.fullmatch(state.response)
        if said is None or said[1] not in state.board:
            state.result = "malformed" if said is None else "invalid"
            return None
        board = play(state.board, said[1], "x")
        if not is_over(board):
            board = play(board, reply(state.row["opponent"], board, state.row["seed"]), "o")
        state.board = board
        if is_over(board):
            state.result = {"x": "won", "o": "lost", "": "drawn"}[winner(board)]
            return None
        return show(board)

    @reward()
    def won(self, state: Any) -> float:
        """Whether the policy has three in a line."""
        return float(state.result == "won")

    @reward(weight=0.5)
    def drawn(self, state: Any) -> float:
        """Whether no field is free, and nobody has three in a line."""
        return float(state.result == "drawn")

    @reward(weight=-1.0)
    def lost(self, state: Any) -> float:
        """Whether the opponent has three in a line."""
        return float(state.result == "lost")

    @reward(weight=-1.5)
    def invalid(self, state: Any) -> float:
        """Whether a move went to a field that was not free."""
        return float(state.result == "invalid")

    @reward(weight=-1.5)
    def malformed(self, state: Any) -> float:
        """Whether an answer was no move."""
        return float(state.result == "malformed")


# -- tasks -----------------------------------------------------------------------------------------


def task(opponent: str, side: str, seed: int) -> dict[str, Any]:
    """A game to play: ``{"prompt": "123456789", "opponent": "random", "side": "first", "seed": 7}``."""
    board = BOARD if side == "first" else play(BOARD, reply(opponent, BOARD, seed), "o")
    return {"prompt": show(board), "opponent": opponent, "side": side, "seed": seed}


def position(seed: int, *, earliest: int = 1) -> dict[str, Any]:
    """The rest of a game against the optimal player: moves were random so far, and now some lose and some do not.

    ``earliest`` is the least number of moves that lie behind it, of 1 to 7.
    """
    chance = random.Random(seed)
    while True:
        board, moves = BOARD, chance.randint(earliest, 7)
        for i in range(moves, 0, -1):  # the policy moves next, so the last one of these is the other one's
            if not is_over(board):
                board = play(board, chance.choice(free(board)), "xo"[i % 2])
        if not is_over(board) and {value(play(board, f, "x"), "o") == 1 for f in free(board)} == {True, False}:
            return {"prompt": show(board), "opponent": "optimal", "side": SIDES[moves % 2], "seed": seed}


def games(batch: int, *, backwards: int = 0, seed: int = 0) -> fl.data.Mixture:
    """``batch`` tasks a step, without end: half of them are positions, the others games of all opponents and sides.

    Half of the games are begun by the optimal player. The positions of the first ``backwards`` steps go from the end of
    a game to its begin: two fields are free in the first ones. The column ``stratum`` says which: ``random first``, or
    ``position``.
    """

    def part(name: str, make: Callable[[int, int], dict[str, Any]]) -> fl.data.Source:
        def draw(index: int) -> dict[str, Any]:
            return make(random.Random(f"{seed} {name} {index}").getrandbits(48), index)

        return fl.data.generated(draw, batch=batch, chat=True)

    def rest(drawn: int, index: int) -> dict[str, Any]:
        gone = 2 * index / (batch * backwards) if backwards else 1.0  # the share of the steps behind it
        return position(drawn, earliest=max(1, round(7 - 6 * gone)))

    strata = {f"{opponent} {side}": part(f"{opponent} {side}", _whole(opponent, side)) for opponent, side in PLAYERS}
    weights = {name: 3 if name == "optimal second" else 1 for name in strata}
    strata["position"], weights["position"] = part("position", rest), sum(weights.values())
    return fl.data.mix(strata, weights=weights, batch=batch, exact=True, column="stratum")


def _whole(opponent: str, side: str) -> Callable[[int, int], dict[str, Any]]:
    return lambda drawn, index: task(opponent, side, drawn)


def held_out(opponent: str, n: int = 1000) -> fl.data.Source:
    """Games against one opponent whose seeds no training has, half of them on each side, as one batch."""
    rows = [task(opponent, SIDES[i % 2], -1 - i) for i in range(n)]
    return fl.data.rows(rows, batch=n, shuffle=False, repeat=False, chat=True)


def examples(batch: int, *, count: int = 200, seed: int = 0) -> fl.data.Source:
    """``count`` games of an optimal player against one of random or optimal moves, each in its 8 symmetric forms.

    They show what a move looks like, and some good ones. Half of them are shown from their begin, the others from a
    later board on, to which random moves have led.
    """
    rows = [_example(i, seed, form) for i in range(count) for form in FORMS]
    return fl.data.rows(rows, batch=batch, messages="messages", seed=seed)


def _example(index: int, seed: int, form: str) -> dict[str, Any]:
    """A game, its fields named as ``form`` has them."""
    chance = random.Random(f"example {seed} {index}")
    board, behind = BOARD, index % 2 if index % 4 < 2 else chance.randint(2, 7)
    for i in range(behind, 0, -1):
        if not is_over(after := play(board, chance.choice(free(board)), "xo"[i % 2])):
            board = after
    messages: list[dict[str, str]] = []
    while not is_over(board):
        field = chance.choice(best_moves(board, "x"))
        messages.append({"role": "user", "content": show(turned(board, form))})
        messages.append({"role": "assistant", "content": f"<move>{form[BOARD.index(field)]}</move>"})
        board = play(board, field, "x")
        if not is_over(board):
            replies = free(board) if index % 8 < 4 else best_moves(board, "o")
            board = play(board, chance.choice(replies), "o")
    return {"messages": messages}


# -- the model -------------------------------------------------------------------------------------

WORDS = ("<pad>", ";", "<move>", "</move>", *BOARD, *SHOWN["x"], *SHOWN["o"], "?")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% endfor %}"


def build_tokenizer() -> Any:
    """A token for each character and each tag; ``;`` ends an answer. 32 tokens with padding and one more."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("</?move>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";", padding_side="left")
    made.chat_template = TEMPLATE
    return made


#: A Qwen2 of 3.2 million parameters with random weights.
MODEL = fl.Model(
    config={
        "model_type": "qwen2",
        "vocab_size": len(WORDS),
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 96,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    tokenizer=build_tokenizer,
)

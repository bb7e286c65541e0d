"""Environments of Gymnasium: what a policy plays in them is worth what Gymnasium itself says of the same actions."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import flowrl as fl
from flowrl import rl
from flowrl.batch import CallInfo
from flowrl.environments import GymnasiumEnvironment, load_environment
from flowrl.errors import RewardError, WorkerError

LAKE = "FrozenLake-v1"
WORDS = ["<pad>", ";", *"0123456789"]
MODEL = {"model_type": "llama", "vocab_size": len(WORDS), "max_position_embeddings": 96}
MODEL |= {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
MODEL |= {"num_hidden_layers": 1, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


def build_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";")
    made.chat_template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %};{% endif %}{% endfor %}"
    return made


class Guess(gymnasium.Env):
    """Guess a digit: the answer is how far away it is."""

    observation_space = gymnasium.spaces.Text(1, charset="0123456789")
    action_space = gymnasium.spaces.Text(3, charset="0123456789")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(10))
        return "5", {}

    def step(self, action):
        away = abs(int(action[-1:] or 9) - self.secret)
        return str(away), -away / 8, away == 0, False, {}


class Guesses(GymnasiumEnvironment):
    def make(self):
        return gymnasium.wrappers.TimeLimit(Guess(), 4)


class Walk(GymnasiumEnvironment):
    """Every answer is a step on the lake."""

    def read(self, text, space):
        return sum(map(ord, text)) % int(space.n)


def played(env, *, n=4, tasks=6, **how):
    source = env.source(batch=tasks, shuffle=False, repeat=False)
    batch = source.to_batch(source.cursor().draw(), 0, build_tokenizer())
    engine = fl.testing.FakeEngine(vocab=len(WORDS), stop=(1,), tokenizer=build_tokenizer())
    policy = fl.open(fl.Actor(fl.Model(config=MODEL, tokenizer=build_tokenizer), max_tokens=2), engine=engine)
    call = CallInfo(seed=3, op="game.rollout")
    return fl.open(env, name="game").rollout(batch.with_call(call), policy=policy, n=n, **how)


def turns_of(found, row: int) -> list[str]:
    """What the policy said in each turn."""
    ids, numbers = found.response_ids[row].tolist(), found.turn_ids[row].tolist()
    turns = [[i for i, n in zip(ids, numbers, strict=True) if n == turn] for turn in range(found.turns.to_list()[row])]
    return [build_tokenizer().decode(each, skip_special_tokens=True) for each in turns]


@pytest.mark.parametrize(
    ("env", "make"),
    [
        (Walk(LAKE, tasks=6, seed=7), lambda: gymnasium.make(LAKE)),
        (Walk(LAKE, tasks=6, map_name="8x8", max_episode_steps=5), lambda: gymnasium.make(LAKE, map_name="8x8", max_episode_steps=5)),
        (Guesses(tasks=6), lambda: gymnasium.wrappers.TimeLimit(Guess(), 4)),
    ],
)  # fmt: skip
def test_rewards_and_ends_are_those_of_gymnasium_for_the_same_actions(env, make):
    found = played(env, turns=20)
    seen = set()
    for row in range(24):
        raw, said = make(), turns_of(found, row)
        observation, _ = raw.reset(seed=env.seed + row // 4)
        rewards, shown, reason = [], [], ""
        for answer in said:
            assert not reason, "nothing is sampled after the end"
            observation, reward, over, cut, _ = raw.step(env.read(answer, raw.action_space))
            rewards.append(float(reward))
            reason = "terminated" if over else "truncated" if cut else ""
            shown += [] if reason else [str(observation)]
        assert found.turn_rewards[row].tolist() == pytest.approx(rewards, abs=1e-6)
        assert found.rewards.to_list()[row] == pytest.approx(sum(rewards), abs=1e-5)
        assert found.finish_reason[row] in ([reason] if reason else ["turns", "length"])
        observed = [
            i for i, n in zip(found.response_ids[row].tolist(), found.turn_ids[row].tolist(), strict=True) if n < 0
        ]
        if reason:
            assert build_tokenizer().decode(observed, skip_special_tokens=True) == "".join(shown)
        seen.add(reason)
    assert seen & {"terminated", "truncated"}


class Vectors(GymnasiumEnvironment):
    """Counts the steps of vector environments."""

    stepped: ClassVar[list[int]] = []
    vectors: ClassVar[list[Any]] = []

    def make_vec(self):
        vector = super().make_vec()
        step = vector.step
        vector.step = lambda actions: (self.stepped.append(len(list(actions))), step(actions))[1]
        self.vectors.append(vector)
        return vector


class WalkTogether(Vectors, Walk):
    pass


class GuessTogether(Vectors, Guesses):
    pass


@pytest.mark.parametrize("size", [1, 4, 5, 64])
@pytest.mark.parametrize(
    ("alone", "together", "options", "how"),
    [
        (Walk, WalkTogether, {"id": LAKE, "map_name": "8x8", "max_episode_steps": 5}, {"turns": 20}),
        (Walk, WalkTogether, {"id": LAKE}, {"turns": 3}),  # a limit ends some before the environment does
        (Guesses, GuessTogether, {}, {}),
    ],
)
def test_a_vector_environment_gives_each_episode_what_it_has_alone(alone, together, options, how, size):
    expected = played(alone(tasks=6, seed=7, **options), **how)
    Vectors.stepped.clear()
    Vectors.vectors.clear()
    found = played(together(tasks=6, seed=7, num_envs=size, **options), **how)
    assert set(expected.fields) == set(found.fields)
    for name in expected.fields:
        assert found[name].to_list() == expected[name].to_list(), name
    assert set(Vectors.stepped) == {size}
    assert -(-24 // size) < len(Vectors.vectors) <= 25, "one is for the prompts; a busy machine may fill some in part"
    turns = sum(expected.turns.to_list())
    assert len(Vectors.stepped) == turns if size == 1 else len(Vectors.stepped) <= turns


def test_the_parts_of_a_vector_environment_may_be_processes():
    expected = played(Walk(LAKE, tasks=2), tasks=2, n=2, turns=4)
    env = Walk(LAKE, tasks=2, num_envs=2, vectorization_mode="async")
    found = played(env, tasks=2, n=2, turns=4)
    env.close()
    for name in expected.fields:
        assert found[name].to_list() == expected[name].to_list(), name


def test_an_environment_of_a_vector_that_fails_fails_the_episodes_in_it_alone():
    third = Guess()
    third.reset(seed=2)

    class Breaks(Guess):
        def reset(self, *, seed=None, options=None):
            begun = super().reset(seed=seed)
            self.breaks = seed is not None and self.secret == third.secret
            return begun

        def step(self, action):
            if self.breaks:
                raise OverflowError("too far")
            return super().step(action)

    class Game(GymnasiumEnvironment):
        def make(self):
            return gymnasium.wrappers.TimeLimit(Breaks(), 4)

    alone = played(Game(tasks=6), on_error="mark", max_failed=1.0)
    found = played(Game(tasks=6, num_envs=4), on_error="mark", max_failed=1.0)
    assert found.outcome.to_list() == alone.outcome.to_list()
    failed = [row for row, why in enumerate(found.failed_why.to_list()) if "too far" in why]
    assert failed and len(failed) < 24 and len(failed) % 4 == 0
    for row in set(range(24)) - set(failed):
        assert found.rewards.to_list()[row] == alone.rewards.to_list()[row]


def test_a_vector_whose_parts_have_no_seed_each_is_refused():
    class Poles(GymnasiumEnvironment):
        def make_vec(self):
            return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")

    with pytest.raises(WorkerError, match="CartPoleVectorEnv takes no list of seeds"):
        Poles(num_envs=2).rows()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"num_envs": 0}, "num_envs=0"), ({"vectorization_mode": "vector"}, "none of sync and async")],
)
def test_a_vector_that_cannot_be_is_refused(options, said):
    with pytest.raises(WorkerError, match=said):
        GymnasiumEnvironment(LAKE, **options)


def test_an_answer_that_is_no_action_ends_the_episode_with_a_penalty():
    class Costs(GymnasiumEnvironment):
        penalty = -2.0

    env = Costs(LAKE, tasks=1)
    [row] = env.rows()
    for answer in ("4", "-1", "", "up", "1 2", "9" * 30):
        state, _ = env.reset(row, seed=0)
        assert env.step(state, answer)[1:] == ("", -2.0, "no_action")
    state, _ = env.reset(row, seed=0)
    assert env.step(state, " 3 ")[3] != "no_action"


def test_tasks_are_seeds_and_one_that_the_environment_does_not_keep_to_fails():
    env = load_environment("flowrl.environments:GymnasiumEnvironment", id="Taxi-v4", tasks=5, seed=40)
    assert isinstance(env, GymnasiumEnvironment)
    rows = list(env.rows())
    assert [row["task_seed"] for row in rows] == [40, 41, 42, 43, 44] and len({row["prompt"] for row in rows}) > 1
    assert rows == list(env.rows())

    class Forgets(Guesses):
        """Begins otherwise each time."""

        begun = 0

        def show(self, observation):
            self.begun += 1
            return str(self.begun % 10)

    with pytest.raises(RewardError, match="with seed 0 it began with"):
        played(Forgets(tasks=6))


def test_spaces_that_no_text_is_of_are_refused_before_a_game():
    with pytest.raises(WorkerError, match="Define read"):
        GymnasiumEnvironment("Pendulum-v1").rows()

    class Pushes(GymnasiumEnvironment):
        def read(self, text, space):
            return [float(text)]

    with pytest.raises(WorkerError, match="Define show"):
        Pushes("Pendulum-v1").rows()


def test_an_environment_is_closed_once_its_episode_is_forgotten():
    closed = []

    class Closes(Guess):
        def close(self):
            closed.append(1)

    class Game(GymnasiumEnvironment):
        def make(self):
            return Closes()

    env = Game(tasks=2)
    rows = list(env.rows())
    assert len(closed) == 1
    state, _ = env.reset(rows[0], seed=0)
    assert len(closed) == 1
    del state
    assert len(closed) == 2


def test_a_policy_is_trained_on_its_actions():
    env = Walk(LAKE, tasks=4)
    model = fl.Model(config=MODEL, tokenizer=build_tokenizer)
    actor = fl.open(fl.Actor(model, lr=1e-3, max_tokens=2))
    source = env.source(batch=4)
    batch = source.to_batch(source.cursor().draw(), 0, actor.tokenizer).with_call(CallInfo(seed=1, op="walk"))
    batch = rl.gigpo(fl.open(env).rollout(batch, policy=actor, n=4, turns=6), gamma=1.0, scale="none")
    metrics = actor.update(batch, loss=rl.ppo_clip(entropy=0.01))
    assert metrics.gap_max < 1e-3 and metrics.grad_norm > 0


@pytest.mark.parametrize(
    ("id", "options", "said"),
    [
        ("FrozenLak-v1", {}, "FrozenLak"),
        ("", {}, "Malformed environment ID"),
        (LAKE, {"slippy": True}, "unexpected keyword argument 'slippy'"),
    ],
)
def test_an_unknown_id_or_option_is_refused_with_what_helps(id, options, said):
    with pytest.raises(WorkerError, match=said) as refused:
        GymnasiumEnvironment(id, tasks=1, **options).rows()
    assert refused.value.fix == "gymnasium.pprint_registry() lists the ids; options are those of the environment."

"""Environments: what the policy sampled is kept as it was sampled, over several turns, and trains like any response."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from echo_env import LETTERS, SEEN, SMALL, Echo, build_tokenizer, prompts

import flowrl as fl
from flowrl import rl
from flowrl.analysis.run_difference import CLOCKED
from flowrl.batch import CallInfo
from flowrl.errors import RewardError, RunError, WorkerError
from flowrl.placement.plan.plan import Place, Plan

pytestmark = pytest.mark.usefixtures("one_thread")

ALGORITHMS = Path(__file__).parents[2] / "algorithms"


@pytest.fixture(scope="module")
def guessing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ALGORITHMS), *sys.path])
        from tasks import guessing
    return guessing


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


@pytest.fixture(scope="module")
def actor():
    return fl.open(fl.Actor(LETTERS, max_tokens=4))


def runs(ids, mask):
    """The response as a list of (sampled, ids), a run of equal mask each."""
    found = []
    for token, sampled in zip(ids, mask, strict=True):
        if not found or found[-1][0] != sampled:
            found.append((sampled, []))
        found[-1][1].append(token)
    return found


# -- what is kept ----------------------------------------------------------------------------------


def test_sampled_ids_are_kept_as_they_were_sampled(actor):
    """The text of an action read again is other tokens here: none of it may find its way into the response."""
    tokenizer = build_tokenizer()
    played = fl.open(Echo()).rollout(prompts(), policy=actor, n=8)
    assert played.tokens.to_list() == [
        p + r for p, r in zip(played.prompt_ids.to_list(), played.response_ids.to_list(), strict=True)
    ]
    read_again, episodes = 0, list(SEEN.items())
    for row, ((name, _), actions) in enumerate(episodes):
        assert name == played.name[row]
        parts = runs(played.response_ids[row].tolist(), played.response_mask[row].tolist())
        assert parts[0] == (False, tokenizer.encode("cd"))
        sampled = [ids for was, ids in parts if was]
        assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in sampled] == list(actions)
        observed = [ids for was, ids in parts[1:] if not was]
        assert observed == [tokenizer.encode(a[-1:] + "ab") for a in actions[:-1]]
        read_again += sum(tokenizer.encode(tokenizer.decode(ids)) != ids for ids in sampled)
    assert len(episodes) == 40 and read_again > 20


def test_fields_of_an_episode(actor):
    played = fl.open(Echo()).rollout(prompts(4), policy=actor, n=2)
    assert played.keys == tuple((i, k) for i in range(4) for k in range(2))
    lengths = played.response_ids.lengths.tolist()
    for name in ("response_mask", "rollout_logprobs", "sampling_logprobs", "versions"):
        assert played[name].dim == "response" and played[name].lengths.tolist() == lengths
    assert played.rewards.type == "f32[]" and played.turns.type == "i32[]"
    actions = list(SEEN.values())
    assert played.turns.to_list() == [len(a) for a in actions]
    assert played.rewards.to_list() == pytest.approx([sum(map(len, a)) / 10 for a in actions])
    observed = ~played.response_mask.values
    assert played.rollout_logprobs.values[observed].abs().max() == 0
    assert (played.rollout_logprobs.values[~observed] < 0).all()


def test_logprobs_of_sampled_tokens_are_those_of_a_forward_pass(actor):
    for how in ({}, {"temperature": 1.7}):
        played = fl.open(Echo()).rollout(prompts(), policy=actor, n=6, **how)
        found, mask = actor.logprobs(played).old_logprobs.values, played.response_mask.values
        torch.testing.assert_close(found[mask], played.rollout_logprobs.values[mask], atol=1e-4, rtol=0)
        assert torch.equal(played.rollout_logprobs.values, played.sampling_logprobs.values)
        assert played.temperature.to_list() == pytest.approx([how.get("temperature", 1.0)] * len(played))


def test_an_actor_that_serves_samples_its_own_way_with_the_whole_episode_before_it(actor):
    """Greedy tokens are the likeliest ones after the penalty on every token of the row so far."""
    held = fl.open(fl.Actor(LETTERS, max_tokens=4, repetition_penalty=3.0))
    played = fl.open(Echo()).rollout(prompts(), policy=held, greedy=True)
    assert max(played.turns.to_list()) > 1
    logits, differ = whole_logits(held, played), 0
    for row, tokens, response, mask in zip(
        logits, played.tokens, played.response_ids, played.response_mask, strict=True
    ):
        first = len(tokens) - len(response)
        for t in mask.nonzero().flatten().tolist():
            scores = row[first + t - 1]
            seen = torch.zeros(len(scores), dtype=torch.bool)
            seen[tokens[: first + t].long()] = True
            held_back = torch.where(seen, torch.where(scores < 0, scores * 3.0, scores / 3.0), scores)
            assert int(response[t]) == int(held_back.argmax())
            differ += int(scores.argmax()) != int(held_back.argmax())
    assert differ > 0


def whole_logits(actor, batch):
    """Logits [tokens, vocab] of each row from a model that transformers makes of the actor's weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(actor.engine.net.model.config)
    model.load_state_dict(actor.engine.net.model.state_dict())
    with torch.no_grad():
        return [model.eval()(tokens.long()[None]).logits[0] for tokens in batch.tokens]


def test_each_turn_goes_on_from_exactly_the_tokens_so_far(actor):
    """Greedy tokens are the likeliest ones behind the row as it stands in the batch."""
    played = fl.open(Echo()).rollout(prompts(), policy=actor, greedy=True)
    assert max(played.turns.to_list()) > 1
    rows = zip(whole_logits(actor, played), played.tokens, played.response_ids, played.response_mask, strict=True)
    for logits, tokens, response, mask in rows:
        best = logits.argmax(-1)[len(tokens) - len(response) - 1 : -1]
        assert torch.equal(best[mask], response[mask].long())


def test_an_episode_belongs_to_its_row(actor):
    env = fl.open(Echo())
    whole = env.rollout(prompts(6), policy=actor, n=3)
    turned = env.rollout(prompts(6).take([5, 2, 0, 4, 1, 3]), policy=actor, n=3).take_keys(whole.keys)
    alone = fl.Batch.concat(*(env.rollout(b, policy=actor, n=3) for b in prompts(6).split(6)))
    for other in (turned, alone):
        assert other.response_ids.equal(whole.response_ids) and other.rewards.equal(whole.rewards)
        torch.testing.assert_close(other.rollout_logprobs.values, whole.rollout_logprobs.values, atol=1e-4, rtol=0)
    assert env.rollout(prompts(6), policy=actor, n=3).digest() == whole.digest()
    assert len({tuple(r) for r in whole.response_ids.to_list()}) > 12
    assert len({seed for _, seed in SEEN}) == 18, "each episode has a seed, the same every time"


def test_versions_are_those_of_the_weights_that_served():
    actor = fl.open(fl.Actor(LETTERS, max_tokens=4, lr=1e-3))
    env = fl.open(Echo())
    played = env.rollout(prompts(), policy=actor)
    assert set(played.versions.values.tolist()) == {0}
    actor.update(played, loss=rl.sft())
    again = env.rollout(prompts(), policy=actor)
    assert set(again.versions.values[again.response_mask.values].tolist()) == {1}


def test_observed_tokens_have_no_loss(actor):
    """What the environment said may be anything: the gradient of a row is that of its sampled tokens."""
    played = fl.open(Echo()).rollout(prompts(), policy=actor, n=2)
    metrics = fl.open(fl.Actor(LETTERS)).update(played, loss=rl.sft())
    sampled = played.response_mask.values
    assert metrics["tokens"] == int(sampled.sum()) < len(sampled)
    expected = -actor.logprobs(played).old_logprobs.values[sampled].mean()
    assert metrics["loss"] == pytest.approx(float(expected), abs=1e-5)


# -- turns -----------------------------------------------------------------------------------------


def test_turns_have_rewards_states_and_numbers(actor):
    played = fl.open(Echo()).rollout(prompts(4), policy=actor, n=3)
    assert played.turn_rewards.type == "f32[*turn]" and played.turn_states.type == "i64[*turn]"
    assert played.turn_ids.type == "i32[*response]"
    turns = played.turns.to_list()
    assert played.turn_rewards.lengths.tolist() == played.turn_states.lengths.tolist() == turns
    for row, actions in enumerate(SEEN.values()):
        assert played.turn_rewards[row].tolist() == pytest.approx([len(a) / 10 for a in actions])
        ids, numbers = played.response_ids[row].tolist(), played.turn_ids[row].tolist()
        assert [n >= 0 for n in numbers] == played.response_mask[row].tolist()
        assert list(dict.fromkeys(n for n in numbers if n >= 0)) == list(range(turns[row]))
        for turn, action in enumerate(actions):
            sampled = [i for i, n in zip(ids, numbers, strict=True) if n == turn]
            assert build_tokenizer().decode(sampled, skip_special_tokens=True) == action
    sums = [float(rewards.double().sum()) for rewards in played.turn_rewards]
    assert played.rewards.to_list() == pytest.approx(sums)


def test_the_state_before_a_turn_is_the_latest_observation(actor):
    """Equal observations have equal numbers, in all rows; others have others."""
    played = fl.open(Echo()).rollout(prompts(5), policy=actor, n=8)
    named: dict[str, set[int]] = {}
    for row, actions in enumerate(SEEN.values()):
        observations = ["cd", *(a[-1:] + "ab" for a in actions[:-1])]
        for said, number in zip(observations, played.turn_states[row].tolist(), strict=True):
            named.setdefault(said, set()).add(number)
    assert len(named) > 3 and all(len(numbers) == 1 for numbers in named.values())
    assert len(set.union(*named.values())) == len(named)
    assert all(0 <= n < 2**63 for n in set.union(*named.values()))


class Anchored(Echo):
    """Its states are what ``says`` makes of them; it plays two turns."""

    turns = 2

    def __init__(self, says):
        super().__init__()
        self.says = says

    def anchor(self, state, observation):
        return self.says(state, observation)


def test_an_environment_says_which_states_are_the_same(actor):
    env = fl.open(Anchored(lambda state, observation: (state[0], len(state), observation[:1] in "abc")))
    played = env.rollout(prompts(3), policy=actor, n=4)
    first = [states[0].item() for states in played.turn_states]
    assert first == [n for n in dict.fromkeys(first) for _ in range(4)] and len(set(first)) == 3


def numbers_of(anchors, actor):
    """The number of each anchor, as rows of a batch have it."""
    env = fl.open(Anchored(lambda state, observation: anchors[int(state[0].removeprefix("row "))]))
    return [states[0].item() for states in env.rollout(prompts(len(anchors)), policy=actor, turns=1).turn_states]


def test_the_number_of_a_state_is_the_same_in_every_process(actor):
    """Python's own hash of a text is not; a resumed run, or a worker elsewhere, would group other turns."""
    assert numbers_of(["cd", 7, (6, "x")], actor) == [8393782852633507642, 4703935488074688627, 4850325620668252140]


def test_different_anchors_have_different_numbers(actor):
    anchors = ["", "1", 1, -1, (1,), ("1",), (1, ()), ((1,),), "(1,)", ("a", "b"), ("a,b",), ("ab",), "\ud800", 2**80]
    anchors = anchors[:8], anchors[8:]
    found = [number for part in anchors for number in numbers_of(list(part), actor)]
    assert len(set(found)) == len(found) == 14


def test_an_episode_without_turns_has_no_states(actor):
    played = fl.open(Echo(begins="cd" * 62)).rollout(prompts(4), policy=actor)
    assert played.turn_states.lengths.tolist() == played.turn_rewards.lengths.tolist() == [1, 1, 0, 0]
    assert played.turn_ids[0].tolist() == [-1] * 62 + [0] and not len(played.turn_ids[3])


def test_turns_are_counted_after_the_action_was_taken_and_states_before(actor):
    """A state that its step changes in place is asked for its anchor before."""

    class Mutable(fl.Env):
        turns = 3

        def reset(self, row, seed):
            return [0], "cd"

        def step(self, state, action):
            state[0] += 1
            return state, "cd", float(state[0]), False

        def anchor(self, state, observation):
            return state[0]

    played = fl.open(Mutable()).rollout(prompts(3), policy=actor)
    assert played.turn_rewards.to_list() == [[1.0, 2.0, 3.0]] * 3 and played.rewards.to_list() == [6.0] * 3
    assert played.turn_states.to_list() == [played.turn_states[0].tolist()] * 3
    assert len(set(played.turn_states[0].tolist())) == 3


def test_batches_of_episodes_are_put_together_and_taken_apart(actor):
    played = fl.open(Echo()).rollout(prompts(4), policy=actor, n=2)
    again = fl.Batch.concat(*played.split(3)).take(range(7, -1, -1)).sort()
    for name in ("turn_rewards", "turn_states", "turn_ids"):
        assert again[name].equal(played[name])
    assert fl.Batch.from_record(played.to_record()).turn_states.equal(played.turn_states)


# -- the guessing game -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def player(guessing):
    config = {**guessing.MODEL.config, **SMALL, "initializer_range": 0.1}
    return fl.open(fl.Actor(fl.Model(config=config, tokenizer=guessing.build_tokenizer)))


def games(guessing, rows=10):
    source = guessing.prompts(rows)
    return source.to_batch(source.cursor().draw(), 0, guessing.build_tokenizer()).with_call(CallInfo(op="game.rollout"))


def test_games_are_played_by_the_rules(guessing, player):
    """Played again from the tokens alone, every game gives the same observations, reward and number of turns."""
    batch = games(guessing, 12)
    played = fl.open(guessing.Guess()).rollout(batch, policy=player, n=6, turn_tokens=1)
    tokenizer, rules, lengths = guessing.build_tokenizer(), guessing.Guess(), set()
    for secret, ids, mask, reward, turns in zip(
        played.secret.to_list(),
        played.response_ids.to_list(),
        played.response_mask.to_list(),
        played.rewards.to_list(),
        played.turns.to_list(),
        strict=True,
    ):
        assert mask == [i % 2 == 0 for i in range(2 * turns - 1 + (turns == 5 and reward == 0))]
        state, total, done = guessing.State(secret), 0.0, False
        for place, token in enumerate(ids):
            if mask[place]:
                assert not done, "nothing is sampled after the end"
                text = tokenizer.decode([token], skip_special_tokens=True)
                state, said, gained, done = rules.step(state, text)
                total += gained
            else:
                assert tokenizer.decode([token]) == said
        assert total == pytest.approx(reward) and state.guesses == turns
        assert done or turns == 5
        lengths.add(turns)
    assert lengths >= {1, 5}


@pytest.mark.parametrize("turns", [1, 3])
def test_a_call_may_say_how_many_turns(guessing, player, turns):
    played = fl.open(guessing.Guess()).rollout(games(guessing), policy=player, n=4, turn_tokens=1, turns=turns)
    assert max(played.turns.to_list()) == turns
    assert played.response_mask.row_sum().to_list() == played.turns.to_list()


def test_an_environment_says_how_many_turns(guessing, player):
    played = fl.open(guessing.Guess(turns=2)).rollout(games(guessing), policy=player, n=4, turn_tokens=1)
    assert max(played.turns.to_list()) == 2


def test_a_turn_has_so_many_tokens_at_most(actor):
    played = fl.open(Echo()).rollout(prompts(), policy=actor, n=4, turn_tokens=2)
    for ids, mask in zip(played.response_ids.to_list(), played.response_mask.to_list(), strict=True):
        assert max(len(part) for was, part in runs(ids, mask) if was) <= 2


class Endless(fl.Env):
    turns = 1000

    def reset(self, row, seed):
        return None, ""

    def step(self, state, action):
        return None, "cdcd", 0.0, False


def test_an_episode_ends_where_the_model_has_no_room_left(actor):
    played = fl.open(Endless()).rollout(prompts(), policy=actor, n=2)
    assert all(60 <= length <= 64 for length in played.tokens.lengths.tolist())
    assert played.response_mask[0][-1], "an observation that no answer can follow is left out"
    assert max(played.turns.to_list()) < 64
    actor.logprobs(played)


def test_a_first_observation_that_does_not_fit_leaves_an_empty_response(actor):
    played = fl.open(Echo(begins="cd" * 62)).rollout(prompts(4), policy=actor)
    assert played.prompt_ids.lengths.tolist() == [1, 1, 2, 2]
    assert played.turns.to_list() == [1, 1, 0, 0]
    assert played.response_ids.lengths.tolist() == [63, 63, 0, 0]
    assert fl.open(fl.Actor(LETTERS)).update(played, loss=rl.sft())["tokens"] == 2


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "said"),
    [
        (lambda state, observation: 1 / 0, "ZeroDivisionError"),
        (lambda state, observation: None, "TypeError: it returned None, which is no text, whole number or tuple"),
        (lambda state, observation: ("a", 0.5), "it returned 0.5, which is no text"),
        (lambda state, observation: {"a"}, "it returned {'a'}, which is no text"),
    ],
)
def test_a_failing_anchor_names_the_row(actor, says, said):
    """Also an anchor that is written differently in every process, like a set."""
    late = Anchored(lambda state, observation: says(state, observation) if state[0] == "row 3" else "")
    with pytest.raises(RewardError, match=rf"game\.anchor failed for row 3, sample 0: .*{said}"):
        fl.open(late, name="game").rollout(prompts(), policy=actor, n=2)


class Broken(Echo):
    """Fails in a way of its own for the row (3, 1) of a batch."""

    def __init__(self, where, how):
        super().__init__()
        self.where, self.how, self.count = where, how, 0

    def reset(self, row, seed):
        self.count += 1
        bad = self.where == "reset" and self.count == 8
        return self.how() if bad else (self.count, "cd")

    def step(self, state, action):
        bad = self.where == "step" and state == 8
        return self.how() if bad else (state, "ab", 0.5, False)


def raises():
    raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    ("where", "how", "said"),
    [
        ("reset", raises, "ZeroDivisionError: by nothing"),
        ("step", raises, "ZeroDivisionError: by nothing"),
        ("reset", lambda: None, r"it returned None, not \(state, observation\)"),
        ("reset", lambda: (1, None), "the observation None, which is no text"),
        ("step", lambda: (1, "a", 0.0), r"not \(state, observation, reward, done\)"),
        ("step", lambda: (1, 5, 0.0, False), "the observation 5, which is no text"),
        ("step", lambda: (1, "a", None, False), "TypeError"),
        ("step", lambda: (1, "a", float("nan"), False), "it returned the reward nan"),
    ],
)
def test_a_failure_of_user_code_names_the_row(actor, where, how, said):
    env = fl.open(Broken(where, how), name="game")
    with pytest.raises(RewardError, match=rf"game\.{where} failed for row 3, sample 1: .*{said}"):
        env.rollout(prompts(), policy=actor, n=2)


def test_an_environment_without_rules_says_what_to_write(actor):
    class Nothing(fl.Env):
        pass

    class Half(fl.Env):
        def reset(self, row, seed):
            return 0, ""

    for env, name in ((Nothing(), "reset"), (Half(), "step")):
        with pytest.raises(WorkerError, match=f"has no {name}") as caught:
            fl.open(env).rollout(prompts(), policy=actor)
        assert f"Define {name}(self" in caught.value.fix


# -- in a program ----------------------------------------------------------------------------------

PLAYED: list[tuple] = []
STOP_AT = [-1]


def make_flow(guessing):
    """GRPO on the guessing game."""

    class Game(guessing.Guess):
        def step(self, state, action):
            PLAYED.append((state, action))
            return super().step(state, action)

    class Stopper(fl.Worker):
        keeps = ("steps",)

        def __init__(self):
            self.steps = 0

        @fl.op(reads="rewards", updates="steps", cost="train")
        def update(self, batch) -> fl.Metrics:
            if self.steps == STOP_AT[0]:
                raise KeyError("stopped on purpose")
            self.steps += 1
            return fl.Metrics()

    config = {**guessing.MODEL.config, **SMALL}
    flow = fl.Flow("play")
    actor = flow.worker(fl.Actor, fl.Model(config=config, tokenizer=guessing.build_tokenizer), lr=1e-2, name="actor")
    game = flow.worker(Game, name="game")
    stopper = flow.worker(Stopper, name="stopper")

    @flow.program
    def play(steps: int = 4, n: int = 4):
        for step, batch in flow.steps(guessing.prompts(3), steps):
            batch = game.rollout(batch, policy=actor, n=n, turn_tokens=1)
            batch = rl.group_advantages(batch)
            metrics = actor.update(batch, loss=rl.ppo_clip())
            stopper.update(batch)
            flow.log(step, metrics, reward=batch.rewards.mean(), turns=batch.turns.mean())

    return flow


@pytest.fixture
def flow(guessing):
    PLAYED.clear()
    STOP_AT[0] = -1
    return make_flow(guessing)


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k.split("/")[-1] not in CLOCKED} for line in lines]


def in_time(run, seconds=60):
    """What ``run`` returns; fails instead of waiting for ever."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the run does not end"
    assert found, "the run failed"
    return found[0]


def test_the_graph_shows_who_serves(flow):
    graph = flow.graph()
    assert [(e.src, e.dst) for e in graph.edges_of("serves")] == [("actor", "game.rollout")]
    weights = [(e.src, e.dst) for e in graph.edges_of("weights")]
    assert ("actor.update", "game.rollout") in weights
    assert set(graph.node("game.rollout").adds) >= {"response_ids", "rewards", "turns", "turn_states"}
    assert not flow.check().errors


SPLIT = Plan({"a": "cpu", "b": "cpu"}, {"actor": Place("a"), "game": Place("b"), "stopper": Place("b")})
TURNED = Plan({"a": "cpu", "b": "cpu"}, {"game": Place("a"), "actor": Place("b"), "stopper": Place("a")})


def test_eager_local_and_pools_of_their_own_give_the_same_bits(flow, tmp_path):
    ways = {
        "eager": {"runtime": "eager"},
        "local": {"runtime": "local"},
        "split": {"runtime": "local", "plan": SPLIT},
        "turned": {"runtime": "local", "plan": TURNED},
    }
    outcomes = {n: in_time(lambda n=n: flow.run(out=tmp_path / n, quiet=True, **ways[n])) for n in ways}
    assert len({o.weights_digest for o in outcomes.values()}) == 1
    assert len({json.dumps(metrics(tmp_path / n)) for n in ways}) == 1
    lines = metrics(tmp_path / "eager")
    assert len(lines) == 4 and all(line["grad_norm"] > 0 for line in lines)


def test_a_resumed_run_plays_no_game_again(flow, tmp_path):
    whole = flow.run(out=tmp_path / "whole", quiet=True)
    moves = len(PLAYED)
    PLAYED.clear()
    STOP_AT[0] = 2
    with pytest.raises(RunError, match="stopped on purpose"):
        flow.run(out=tmp_path / "run", quiet=True, checkpoint_every=2)
    STOP_AT[0] = -1
    again = flow.run(out=tmp_path / "run", quiet=True, resume=True)
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert len(PLAYED) == moves


def test_a_failure_in_a_run_has_the_drivers_line(guessing, tmp_path):
    flow = fl.Flow("play")
    model = fl.Model(config={**guessing.MODEL.config, **SMALL}, tokenizer=guessing.build_tokenizer)
    actor = flow.worker(fl.Actor, model, name="actor")
    game = flow.worker(Broken, "step", raises, name="game")

    @flow.program
    def play():
        for step, batch in flow.steps(guessing.prompts(10), 1):
            batch = game.rollout(batch, policy=actor, turn_tokens=1)
            flow.log(step, reward=batch.rewards.mean())

    with pytest.raises(RewardError, match="game.step of step 0 failed for row 7, sample 0") as caught:
        flow.run(out=tmp_path / "run", quiet=True)
    assert caught.value.at.text == "batch = game.rollout(batch, policy=actor, turn_tokens=1)"


# -- how episodes end ----------------------------------------------------------------------------------------------


class Ends(Echo):
    """Over as ``how`` says, after one action."""

    def __init__(self, how, begins="cd"):
        super().__init__(begins=begins)
        self.how = how

    def step(self, state, action):
        return state, "ab", 1.0, self.how


@pytest.mark.parametrize(("how", "reason"), [(True, "done"), ("won", "won"), ("out of fuel", "out of fuel")])
def test_an_episode_says_which_outcome_ended_it(actor, how, reason):
    played = fl.open(Ends(how)).rollout(prompts(), policy=actor, n=2)
    assert played.finish_reason.to_list() == [reason] * len(played)
    assert played.finished.values.all() and set(played.turns.to_list()) == {1}


def test_an_episode_that_nothing_ended_is_not_finished(actor):
    short = fl.open(Ends("")).rollout(prompts(), policy=actor, turns=2, turn_tokens=1)
    stopped = [row[-1] == 1 for row in short.response_ids.to_list()]
    assert short.finish_reason.to_list() == ["turns" if s else "length" for s in stopped]
    assert not short.finished.values.any() and set(short.turns.to_list()) == {2}
    full = fl.open(Ends("", begins="cd" * 9)).rollout(prompts(), policy=actor, turns=60)
    assert set(full.finish_reason.to_list()) == {"length"} and not full.finished.values.any()

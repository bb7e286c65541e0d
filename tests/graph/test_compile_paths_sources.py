"""Where the graph says data comes from, what values decide, and under which condition: the compiled record."""

import itertools
import math
import random
from math import sqrt

import flowrl as fl
from flowrl import rl
from flowrl.errors import At
from flowrl.graph.compile_paths import compile_graph
from flowrl.graph.decision_diagram import condition, diagram
from flowrl.graph.tracing.follow_branches import Path
from flowrl.graph.tracing.trace_program import trace
from flowrl.graph.tracing.trace_records import Trail

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=4)
hard = fl.data.rows([{"prompt": "12*12=", "answer": "144", "level": 3}], batch=4)
heldout = fl.data.rows([{"prompt": "2+2=", "answer": "4"}], batch=2)
texts = fl.data.rows([{"prompt": "1+1=", "text": "2"}], response="text", batch=2)
LEVELS = [prompts, hard]


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def made(batch: int):
    return fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=batch)


flow = fl.Flow("tests")
actor = flow.worker(fl.Actor, model="a/model")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, exact)


def graph_of(program):
    traced = trace(program, {}, name=program.__name__)
    assert [e.report() for e in traced.errors] == []
    return compile_graph(traced)


def incoming(graph, dst, *kinds):
    """``src: fields``, with the condition and what is special, of the edges into a node or a source."""
    return {
        f"{e.src}: {', '.join(e.fields)}"
        + (f" [{e.kind}{' repeats' if e.repeats else ''}]" if e.kind != "data" else "")
        + (f" if {e.branch}" if e.branch else "")
        for e in graph.edges
        if e.dst == dst and e.kind in (kinds or ("data", "carried", "control"))
    }


def sampled(batch, n=4):
    return reward.score(actor.generate(batch, n=n))


# -- sources --------------------------------------------------------------------------------------------------------


def test_every_source_is_told_apart_with_its_own_columns():
    def evaluated(steps=10):
        for step, batch in flow.steps(hard, steps):
            batch = rl.group_advantages(sampled(batch))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
            test = reward.score(actor.generate(flow.take(heldout), greedy=True))
            flow.log(step, heldout=test.rewards.mean())

    graph = graph_of(evaluated)
    assert [(s.id, s.name, s.describes, s.fields) for s in graph.sources] == [
        ("data.hard", "hard", "the list of rows, 4 rows a step", ("prompt", "prompt_ids", "answer", "level")),
        ("data.heldout", "heldout", "the list of rows, 2 rows a step", ("prompt", "prompt_ids", "answer")),
    ]
    assert graph.source_fields == ("prompt", "prompt_ids", "answer", "level")
    assert [s.line for s in graph.sources] == [
        graph.node("actor.update").line - 2,
        graph.node("actor.generate#2").line,
    ]
    assert incoming(graph, "actor.generate") == {"data.hard: prompt_ids, prompt, answer"}
    assert incoming(graph, "actor.generate#2") == {"data.heldout: prompt_ids, prompt, answer"}
    assert graph.sources[0].types["prompt_ids"] == "i32[*prompt]"


def test_a_source_is_called_as_the_program_calls_it():
    def named(steps=10):
        local = made(4)
        for step, batch in flow.steps(made(8), steps):
            more = flow.more(4)
            again = flow.take(LEVELS[1])
            other = flow.take(local)
            third = flow.take(
                made(batch=16),
            )
            batch = batch.concat(more, other, third).select("prompt_ids", "prompt", "answer")
            batch = batch.concat(again.select("prompt_ids", "prompt", "answer"))
            flow.log(step, actor.update(rl.group_advantages(sampled(batch)), loss=rl.ppo_clip()))

    assert [s.id for s in graph_of(named).sources] == ["data.made", "data.hard", "data.local", "data.made#2"]


def test_one_source_under_two_names_is_one():
    def twice(steps=10):
        same = prompts
        for step, batch in flow.steps(prompts, steps):
            batch = batch.concat(flow.take(same))
            flow.log(step, actor.update(rl.group_advantages(sampled(batch)), loss=rl.ppo_clip()))

    assert [s.id for s in graph_of(twice).sources] == ["data.prompts"]


def test_a_source_given_to_a_helper_has_the_name_of_the_program():
    def score(source):
        return reward.score(actor.generate(flow.take(source), greedy=True)).rewards.mean()

    def helped(steps=10):
        for step, batch in flow.steps(prompts, steps):
            flow.log(step, actor.update(rl.group_advantages(sampled(batch)), loss=rl.ppo_clip()))
            flow.log(step, heldout=score(heldout), hard=score(hard))

    assert [s.id for s in graph_of(helped).sources] == ["data.prompts", "data.heldout", "data.hard"]


def test_rows_of_pretraining_reach_the_update():
    def mixed(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(sampled(batch))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip(), pretraining=flow.take(texts)))

    (edge,) = (e for e in graph_of(mixed).edges if e.src == "data.texts")
    assert (edge.dst, edge.kind) == ("actor.update", "data") and {"tokens", "response_mask"} <= set(edge.fields)


def test_rows_of_the_data_are_carried_into_the_next_step():
    def late(steps=10):
        before = None
        for step, batch in flow.steps(prompts, steps):
            rows = batch if before is None else before
            flow.log(step, actor.update(rl.group_advantages(sampled(rows)), loss=rl.ppo_clip()))
            before = batch

    assert incoming(graph_of(late), "actor.generate") == {"data.prompts: prompt_ids, prompt, answer [carried]"}


# -- control --------------------------------------------------------------------------------------------------------


def test_a_condition_draws_an_edge_to_what_hangs_on_it_and_to_no_more():
    def careful(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = ref.logprobs(sampled(batch))
            if batch.rewards.mean() > 0.1:
                batch = rl.group_advantages(batch)
                flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.1)))

    graph = graph_of(careful)
    some = "rewards.mean() > 0.1"
    assert graph.node("actor.update").branch == some
    assert [(e.src, e.dst, e.fields, e.branch) for e in graph.edges_of("control")] == [
        ("batch.gt", "rl.group_advantages", (some,), some),
    ]


def test_a_reward_that_chooses_the_source_of_the_next_step_is_carried_there():
    def curriculum(steps=10):
        solved = False
        for step, batch in flow.steps(prompts, steps):
            if solved:
                batch = flow.take(hard).drop("level")
            batch = rl.group_advantages(sampled(batch))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
            solved = float(batch.rewards.mean()) > 0.8

    graph = graph_of(curriculum)
    before = "rewards.mean() > 0.8 in the step before"
    assert {s.id: s.branch for s in graph.sources} == {"data.prompts": None, "data.hard": before}
    assert incoming(graph, "data.hard") == {f"batch.mean: rewards.mean() > 0.8 [carried] if {before}"}
    assert "data.hard: prompt_ids, prompt, answer if " + before in incoming(graph, "actor.generate")


def test_a_number_that_another_outcome_of_this_step_changes_is_control():
    def cautious(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(ref.logprobs(sampled(batch)))
            kl = 0.1
            if float(batch.rewards.mean()) > 0.9:
                kl = 0.5
            flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=kl)))

    graph = graph_of(cautious)
    assert [(e.src, e.dst, e.fields, e.branch) for e in graph.edges_of("control")] == [
        ("batch.mean", "actor.update", ("rewards.mean() > 0.9",), None),
    ]
    assert graph.node("actor.update").loss == "ppo_clip(ppo(low=0.2, high=0.2), kl=0.1 or 0.5)"


def test_a_computed_number_is_written_as_it_is_computed():
    def adaptive(steps=10):
        kl = 0.1
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(ref.logprobs(sampled(batch)))
            metrics = actor.update(batch, loss=rl.ppo_clip(kl=kl))
            kl = kl * (1 + 0.1 * float(metrics.kl))
            flow.log(step, metrics)

    loss = graph_of(adaptive).node("actor.update").loss
    assert loss == "ppo_clip(ppo(low=0.2, high=0.2), kl=0.1 * (1 + 0.1 * actor.update.kl))"


def test_a_number_that_goes_through_math_is_no_constant():
    def adaptive(steps=10):
        kl = 0.1
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(ref.logprobs(sampled(batch)))
            metrics = actor.update(batch, loss=rl.ppo_clip(kl=kl, entropy=math.pi / 100))
            kl = min(0.2, 0.1 * math.exp(float(metrics.kl)) / sqrt(metrics.grad_norm))
            flow.log(step, metrics)

    graph = graph_of(adaptive)
    update = graph.node("actor.update")
    assert update.loss == (
        "ppo_clip(ppo(low=0.2, high=0.2), "
        "kl=0.2 or 0.1 * exp(actor.update.kl) / sqrt(actor.update.grad_norm), entropy=0.031415926535897934)"
    ) or update.loss == (
        "ppo_clip(ppo(low=0.2, high=0.2), "
        "kl=0.1 * exp(actor.update.kl) / sqrt(actor.update.grad_norm) or 0.2, entropy=0.031415926535897934)"
    )
    carried = next(e for e in graph.edges_of("carried") if e.src == e.dst == "actor.update")
    assert {"kl", "grad_norm"} & set(carried.fields) or "value" in carried.fields


# -- conditions -----------------------------------------------------------------------------------------------------


def test_either_of_two_conditions():
    def kept(steps=100):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(sampled(batch))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
            now = float(batch.rewards.mean())
            if step % 50 == 0 or step == steps - 1:
                actor.save("regular")
            if step > 10 and (step % 7 == 0 or now > 0.5):
                actor.save("other")

    graph = graph_of(kept)
    assert graph.node("actor.save").branch == "step % 50 == 0 or step == 99"
    said = graph.node("actor.save#2").branch
    assert said == "(step > 10 and step % 7 == 0) or (step > 10 and rewards.mean() > 0.5)"


def test_the_words_of_a_condition_are_true_on_exactly_the_paths_that_have_it():
    """For random programs of conditions: whatever a path was not asked, the words are true if the call was made on it."""
    rng = random.Random(1)
    worded = 0
    for _ in range(300):
        paths = _paths(rng, [f"c{n}" for n in range(4)])
        trails = [Trail(path=path) for path in paths]
        there = {number: rng.random() < 0.5 for number in range(len(trails))}
        said = condition(diagram(there, trails))
        worded += said is not None
        for number, path in enumerate(paths):
            told = {d.condition: d.outcome for d in path.taken}
            open_ = [n for n in ("c0", "c1", "c2", "c3") if n not in told]
            for rest in itertools.product((False, True), repeat=len(open_)):
                every = told | dict(zip(open_, rest, strict=True))
                holds = True if said is None else eval(said, every)
                assert holds == there[number] or said is None, (said, told)
        assert said is not None or len(set(there.values())) == 1
    assert worded > 200


def _paths(rng, names, told=()):
    """Every path of a random program, which asks other conditions, or none, after other outcomes."""
    if not names or rng.random() < 0.2:
        path = Path(told=tuple(outcome for _, outcome in told))
        for name, _ in told:
            path.ask(name, name, At("p.py", int(name[1:])), 2, frozenset(), place=name, loops=False)
        return [path]
    name = rng.choice(names)
    rest = [n for n in names if n != name]
    return [path for outcome in (False, True) for path in _paths(rng, rest, (*told, (name, outcome)))]


# -- lists that grow ------------------------------------------------------------------------------------------------


def test_a_loop_over_a_list_that_grows_says_that_it_repeats():
    def replay(steps=10):
        kept = []
        for step, batch in flow.steps(prompts, steps):
            batch = sampled(batch)
            both = batch
            for old in kept[-4:]:
                both = both.concat(old)
            kept.append(batch)
            flow.log(step, actor.update(rl.group_advantages(both), loss=rl.ppo_clip()))

    graph = graph_of(replay)
    assert {n.id: n.repeats for n in graph.nodes if n.op == "concat"} == {"batch.concat": True}
    assert not graph.node("actor.update").repeats
    assert incoming(graph, "batch.concat", "carried") == {
        "actor.generate: response_mask, tokens, temperature, finished, rollout_logprobs, versions [carried repeats]",
        "reward.score: rewards [carried repeats]",
    }


def test_rows_of_the_step_before_alone_do_not_repeat():
    def two(steps=10):
        old = None
        for step, batch in flow.steps(prompts, steps):
            batch = sampled(batch)
            both = batch if old is None else batch.concat(old)
            old = batch
            flow.log(step, actor.update(rl.group_advantages(both), loss=rl.ppo_clip()))

    graph = graph_of(two)
    assert not any(e.repeats for e in graph.edges) and not any(n.repeats for n in graph.nodes)


# -- names ----------------------------------------------------------------------------------------------------------


def test_a_renamed_field_keeps_the_name_it_was_made_under():
    def judged(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = sampled(batch).rename(rewards="scores", rollout_logprobs="theirs")
            batch = batch.with_columns({"rewards": batch.scores - 0.5})
            batch = rl.group_advantages(batch).rename(theirs="rollout_logprobs")
            flow.log(step, actor.update(batch.rename(scores="points"), loss=rl.ppo_clip()), points=batch.scores.mean())

    graph = graph_of(judged)
    found = {(e.src, e.dst): (e.fields, e.made) for e in graph.edges_of("data")}
    assert found["reward.score", "batch.sub"] == (("scores",), ("rewards",))
    read = ("tokens", "response_mask", "temperature", "finished", "rollout_logprobs", "versions")
    assert found["actor.generate", "actor.update"] == (read, ())
    assert found["reward.score", "batch.mean"] == (("scores",), ("rewards",))

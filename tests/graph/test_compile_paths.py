"""The graph of a program: its exact nodes, and each kind of edge."""

from pathlib import Path

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.graph.compile_paths import compile_graph
from flowrl.graph.tracing.trace_program import trace

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
heldout = fl.data.rows([{"prompt": "2+2=", "answer": "4"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


class Centre(fl.Worker):
    """Rewards against a number that the program keeps."""

    @fl.op(reads="rewards, response_mask", adds="advantages: f32[*response]", cost="local")
    def centre(self, batch, *, baseline=0.0): ...


class Game(fl.Env):
    """A game."""


flow = fl.Flow("tests")
actor = flow.worker(fl.Actor, model="a/model")
critic = flow.worker(fl.Critic, model="a/model")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, exact)
centre = flow.worker(Centre)
game = flow.worker(Game)

SAMPLED = "tokens, response_mask, temperature, finished, rollout_logprobs, versions"


def graph_of(program, **parameters):
    traced = trace(program, parameters, name=program.__name__)
    assert [e.report() for e in traced.errors] == []
    return compile_graph(traced)


def edges(graph, *kinds):
    """Edges as text: ``a -> b: fields``, with ``[kind]`` unless it is data, and the condition."""
    return {
        f"{e.src} -> {e.dst}"
        + (f": {', '.join(e.fields)}" if e.fields else "")
        + (f" [{e.kind}{'' if e.lag is None else f' {e.lag}'}]" if e.kind != "data" else "")
        + (f" if {e.branch}" if e.branch else "")
        for e in graph.edges
        if not kinds or e.kind in kinds
    }


def branches(graph):
    return {n.id: n.branch for n in graph.nodes if n.branch}


def test_what_a_condition_looks_at_does_not_control_what_it_was_made_of():
    """The filter hands on less where no update follows; it was made before anybody asked."""

    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = reward.score(actor.generate(batch, n=2))
            kept = batch.filter(batch.rewards > 0)
            if len(kept) > 0:
                flow.log(step, actor.update(kept, loss=rl.sft()))

    assert edges(graph_of(program), "control") == {
        "batch.count -> actor.update: len(batch) > 0 [control] if len(batch) > 0"
    }


def test_grpo():
    def grpo(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = actor.generate(batch, n=8)
            batch = reward.score(batch)
            batch = ref.logprobs(batch)
            batch = rl.group_advantages(batch)
            metrics = actor.update(batch, loss=rl.ppo_clip(kl=1e-3))
            flow.log(step, metrics, reward=batch.rewards.mean())

    graph = graph_of(grpo)
    assert [n.id for n in graph.nodes] == [
        "actor.generate",
        "reward.score",
        "ref.logprobs",
        "rl.group_advantages",
        "actor.update",
        "batch.mean",
    ]
    assert edges(graph) == {
        "data.prompts -> actor.generate: prompt_ids, prompt, answer",
        "actor.update -> actor.generate [weights 0]",
        "actor.generate -> reward.score: response_ids, prompt, answer",
        "actor.generate -> ref.logprobs: tokens, response_mask, temperature",
        "reward.score -> rl.group_advantages: rewards",
        "actor.generate -> rl.group_advantages: response_mask",
        f"actor.generate -> actor.update: {SAMPLED}",
        "ref.logprobs -> actor.update: ref_logprobs",
        "rl.group_advantages -> actor.update: advantages",
        "reward.score -> batch.mean: rewards",
    }
    assert graph.source_fields == ("prompt", "prompt_ids", "answer")
    assert (graph.paths, graph.capped, graph.program) == (1, False, "grpo")


def test_ppo():
    def ppo(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = actor.generate(batch)
            batch = reward.score(batch) | ref.logprobs(batch) | critic.values(batch)
            batch = rl.kl_penalty(batch, coef=0.1)
            batch = rl.gae(batch)
            critic_metrics = critic.update(batch)
            metrics = actor.update(batch, loss=rl.ppo_clip())
            flow.log(step, metrics, critic_metrics)

    graph = graph_of(ppo)
    assert [n.id for n in graph.nodes] == [
        "actor.generate",
        "reward.score",
        "ref.logprobs",
        "critic.values",
        "rl.kl_penalty",
        "rl.gae",
        "critic.update",
        "actor.update",
    ]
    assert edges(graph) == {
        "data.prompts -> actor.generate: prompt_ids, prompt, answer",
        "actor.update -> actor.generate [weights 0]",
        "critic.update -> critic.values [weights 0]",
        "actor.generate -> reward.score: response_ids, prompt, answer",
        "actor.generate -> ref.logprobs: tokens, response_mask, temperature",
        "actor.generate -> critic.values: tokens, response_mask",
        "actor.generate -> rl.kl_penalty: rollout_logprobs, response_mask",
        "ref.logprobs -> rl.kl_penalty: ref_logprobs",
        "actor.generate -> rl.gae: response_mask",
        "reward.score -> rl.gae: rewards",
        "critic.values -> rl.gae: values",
        "rl.kl_penalty -> rl.gae: token_rewards",
        "actor.generate -> critic.update: tokens, response_mask",
        "critic.values -> critic.update: values",
        "rl.gae -> critic.update: returns",
        f"actor.generate -> actor.update: {SAMPLED}",
        "rl.gae -> actor.update: advantages",
    }


def test_a_node_knows_its_call():
    def sample(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch, n=8), into={"rewards": "grades"})
            flow.log(step, grade=batch.grades.mean())

    graph = graph_of(sample)
    generate, score, mean = graph.nodes
    here = Path(__file__).read_text().splitlines()
    assert score.file.endswith("test_compile_paths.py")
    assert here[score.line - 1].strip() == score.source == generate.source
    assert (generate.rows, generate.cost, generate.updates, generate.external) == ("expand", "generate", None, False)
    assert (score.external, score.adds, score.reads) == (True, ("grades",), ("response_ids", "prompt", "answer"))
    assert (mean.worker, mean.op, mean.reads) == ("batch", "mean", ("grades",))
    assert generate.types["tokens"] == "i32[*token]"
    assert generate.signature.startswith("(prompt_ids: i32[*prompt]) -> (response_ids: i32[*response]")


# -- what goes from step to step ------------------------------------------------------------------------------------


def test_a_running_baseline_is_carried():
    def reinforce(steps=10):
        baseline = 0.0
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch))
            batch = centre.centre(batch, baseline=baseline)
            baseline = 0.9 * baseline + 0.1 * batch.rewards.mean()
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), baseline=baseline)

    graph = graph_of(reinforce)
    assert edges(graph, "carried") == {
        "batch.add -> centre.centre: value [carried]",
        "batch.add -> batch.mul: value [carried]",
    }
    assert "batch.mean -> batch.mul#2: rewards.mean" in edges(graph)
    assert graph.paths == 1


def test_an_adaptive_kl_by_arithmetic_is_carried():
    def adaptive(steps=10):
        kl = 0.1
        for step, batch in flow.steps(prompts, steps):
            batch = ref.logprobs(reward.score(actor.generate(batch, n=4)))
            batch = rl.group_advantages(batch)
            metrics = actor.update(batch, loss=rl.ppo_clip(kl=kl))
            kl = kl * (1 + 0.1 * (metrics.kl - 0.05))
            flow.log(step, metrics)

    assert "batch.mul#2 -> actor.update: value [carried]" in edges(graph_of(adaptive), "carried")


def test_an_adaptive_kl_that_is_read_is_carried():
    def adaptive(steps=10):
        kl = 0.1
        for step, batch in flow.steps(prompts, steps):
            batch = ref.logprobs(reward.score(actor.generate(batch, n=4)))
            batch = rl.group_advantages(batch)
            metrics = actor.update(batch, loss=rl.ppo_clip(kl=kl))
            kl = kl * (1 + 0.1 * float(metrics.kl))
            flow.log(step, metrics)

    assert edges(graph_of(adaptive), "carried") == {"actor.update -> actor.update: kl [carried]"}


def test_an_adaptive_kl_by_branch_is_carried_by_the_condition():
    def adaptive(steps=10):
        kl = 0.1
        for step, batch in flow.steps(prompts, steps):
            batch = ref.logprobs(reward.score(actor.generate(batch, n=4)))
            batch = rl.group_advantages(batch)
            metrics = actor.update(batch, loss=rl.ppo_clip(kl=kl))
            if float(metrics.kl) > 0.1:
                kl *= 1.5
            flow.log(step, metrics)

    graph = graph_of(adaptive)
    assert edges(graph, "carried") == {"actor.update -> actor.update: actor.update.kl > 0.1 [carried]"}
    assert graph.paths == 4 and branches(graph) == {}


def test_rows_of_the_step_before_are_carried():
    def replay(steps=10):
        old = None
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch, n=4))
            both = batch if old is None else batch.concat(old)
            old = batch
            flow.log(step, actor.update(rl.group_advantages(both), loss=rl.ppo_clip()))

    assert edges(graph_of(replay), "carried") == {
        "actor.generate -> batch.concat: response_mask, tokens, temperature, finished, rollout_logprobs, versions [carried]",
        "reward.score -> batch.concat: rewards [carried]",
    }


# -- branches -------------------------------------------------------------------------------------------------------


def test_an_evaluation_every_so_often():
    def evaluated(steps=100):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
            if step % 50 == 0:
                test = reward.score(actor.generate(flow.take(heldout), greedy=True))
                flow.log(step, heldout=test.rewards.mean())

    graph = graph_of(evaluated)
    rare = "step % 50 == 0"
    assert branches(graph) == {"actor.generate#2": rare, "reward.score#2": rare, "batch.mean": rare}
    assert {e for e in edges(graph) if "#2" in e} == {
        f"data.heldout -> actor.generate#2: prompt_ids, prompt, answer if {rare}",
        f"actor.update -> actor.generate#2 [weights 0] if {rare}",
        f"actor.generate#2 -> reward.score#2: response_ids, prompt, answer if {rare}",
        f"reward.score#2 -> batch.mean: rewards if {rare}",
    }


def test_the_other_side_of_a_condition():
    def either(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch, n=4))
            batch = rl.group_advantages(batch)
            if step < 100:
                actor.update(batch, loss=rl.sft())
            else:
                actor.update(batch, loss=rl.ppo_clip())

    graph = graph_of(either)
    assert branches(graph) == {"actor.update": "step < 100", "actor.update#2": "not (step < 100)"} or branches(
        graph
    ) == {
        "actor.update": "not (step < 100)",
        "actor.update#2": "step < 100",
    }


def test_a_condition_within_a_condition():
    def nested(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
            if step % 2 == 0:
                metrics = actor.update(batch, loss=rl.ppo_clip())
                if metrics.approx_kl > 0.1:
                    actor.update(batch, loss=rl.sft())

    graph = graph_of(nested)
    assert branches(graph) == {
        "actor.update": "step % 2 == 0",
        "batch.gt": "step % 2 == 0",
        "actor.update#2": "step % 2 == 0 and actor.update.approx_kl > 0.1",
    }
    assert edges(graph, "weights") == {
        "actor.update -> actor.generate [weights 0] if step % 2 == 0 in the step before"
        " and not (actor.update.approx_kl > 0.1) in the step before",
        "actor.update#2 -> actor.generate [weights 0] if step % 2 == 0 in the step before"
        " and actor.update.approx_kl > 0.1 in the step before",
    }
    assert graph.paths == 9


def test_a_refill_loop_ends_and_is_drawn_twice_at_most():
    def refill(steps=10):
        for step, batch in flow.steps(prompts, steps):
            kept = reward.score(actor.generate(batch, n=4))
            kept = kept.filter(kept.group_std("rewards") > 0)
            while len(kept) < 16:
                more = reward.score(actor.generate(flow.more(4), n=4))
                kept = kept.concat(more.filter(more.group_std("rewards") > 0))
            batch = rl.group_advantages(kept)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    graph = graph_of(refill)
    once, twice = "len(batch) < 16", "len(batch) < 16 again"
    assert branches(graph)["actor.generate#2"] == once and branches(graph)["actor.generate#3"] == twice
    assert "actor.generate#4" not in {n.id for n in graph.nodes}
    fields = "rewards, response_mask, tokens, temperature, finished, rollout_logprobs, versions"
    assert {
        f"batch.filter -> batch.concat: {fields} if {once}",
        f"batch.filter#2 -> batch.concat: {fields} if {once}",
        f"batch.concat -> batch.concat#2: {fields} if {twice}",
        f"batch.filter -> actor.update: {SAMPLED} if not ({once})",
        f"batch.concat -> actor.update: {SAMPLED} if {once} and not ({once}) again",
        f"batch.concat#2 -> actor.update: {SAMPLED} if {twice}",
    } <= edges(graph)


# -- fields that travel ---------------------------------------------------------------------------------------------


def test_fields_travel_through_what_makes_rows_anew_where_somebody_reads_them():
    def filtered(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = ref.logprobs(reward.score(actor.generate(batch, n=4)))
            batch = batch.filter(batch.rewards > 0)
            flow.log(step, actor.update(batch, loss=rl.sft()), ref=batch.ref_logprobs.mean())

    graph = graph_of(filtered)
    into = {e for e in edges(graph) if "-> batch.filter" in e}
    assert into == {
        "batch.gt -> batch.filter: value",
        "actor.generate -> batch.filter: tokens, response_mask, temperature, finished",
        "ref.logprobs -> batch.filter: ref_logprobs",
    }
    assert "batch.filter -> batch.mean: ref_logprobs" in edges(graph)


def test_remax_has_two_generates_of_the_same_rows():
    def remax(steps=10):
        for step, batch in flow.steps(prompts, steps):
            greedy = actor.generate(batch, greedy=True)
            batch = actor.generate(batch)
            greedy = reward.score(greedy, into={"rewards": "baseline"})
            batch = reward.score(batch) | greedy.select("baseline")
            batch = centre.centre(batch, baseline=batch.baseline.mean())
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    graph = graph_of(remax)
    assert edges(graph, "weights") == {
        "actor.update -> actor.generate [weights 0]",
        "actor.update -> actor.generate#2 [weights 0]",
    }
    assert graph.node("reward.score").adds == ("baseline",)
    assert graph.node("reward.score#2").adds == ("rewards",)
    assert {
        "actor.generate -> reward.score: response_ids, prompt, answer",
        "actor.generate#2 -> reward.score#2: response_ids, prompt, answer",
        "reward.score -> batch.mean: baseline",
        f"actor.generate#2 -> actor.update: {SAMPLED}",
    } <= edges(graph)


def test_arithmetic_on_fields_becomes_a_field_of_the_batch():
    def shaped(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch, n=4), into={"rewards": "grades"})
            batch = batch.with_columns({"rewards": batch.grades - 0.01 * batch.response_ids.lengths_column()})
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    graph = graph_of(shaped)
    assert {
        "actor.generate -> batch.lengths_column: response_ids",
        "batch.lengths_column -> batch.mul: value",
        "batch.mul -> batch.sub: value",
        "reward.score -> batch.sub: grades",
        "batch.sub -> rl.group_advantages: rewards",
    } <= edges(graph)


def test_select_drop_and_rename_are_no_nodes():
    def renamed(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch, n=4)).rename(rewards="grades")
            batch = batch.drop("prompt").select("grades", "response_mask")
            flow.log(step, grade=batch.grades.mean())

    graph = graph_of(renamed)
    assert [n.id for n in graph.nodes] == ["actor.generate", "reward.score", "batch.mean"]
    assert "reward.score -> batch.mean: grades" in edges(graph)


# -- weights, order, serves, stages ---------------------------------------------------------------------------------


def test_an_environment_is_served_by_its_policy():
    def play(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(game.rollout(batch, policy=actor, n=4))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    graph = graph_of(play)
    assert edges(graph, "serves", "weights") == {
        "actor -> game.rollout [serves]",
        "actor.update -> game.rollout [weights 0]",
    }
    assert "game.rollout -> rl.group_advantages: rewards, response_mask" in edges(graph)


def test_updates_of_one_worker_in_a_row_are_ordered():
    def twice(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
            actor.update(batch, loss=rl.sft())
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    graph = graph_of(twice)
    assert edges(graph, "order") == {"actor.update -> actor.update#2 [order]"}
    assert edges(graph, "weights") == {"actor.update#2 -> actor.generate [weights 0]"}


def test_a_read_that_no_data_ties_to_an_update_is_ordered_before_it():
    def looked(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
            old = actor.logprobs(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), old=old.old_logprobs.mean())

    graph = graph_of(looked)
    assert edges(graph, "order") == {"actor.logprobs -> actor.update [order]"}
    assert edges(graph, "weights") == {
        "actor.update -> actor.generate [weights 0]",
        "actor.update -> actor.logprobs [weights 0]",
    }


def test_what_lies_outside_of_the_steps_happens_once():
    def whole(steps=10):
        before = reward.score(actor.generate(flow.take(heldout), greedy=True))
        flow.log(0, before=before.rewards.mean())
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
        after = reward.score(actor.generate(flow.take(heldout), greedy=True))
        flow.log(steps, after=after.rewards.mean())
        actor.save("somewhere")

    graph = graph_of(whole)
    stages = {n.id: n.stage for n in graph.nodes}
    assert [i for i, s in stages.items() if s == "step"] == [
        "actor.generate#2",
        "reward.score#2",
        "rl.group_advantages",
        "actor.update",
    ]
    assert list(stages)[-4:] == ["actor.generate#3", "reward.score#3", "batch.mean#2", "actor.save"]
    assert edges(graph, "weights") == {
        "actor.update -> actor.generate#2 [weights 0]",
        "actor.update -> actor.generate#3 [weights 0]",
        "actor.update -> actor.save [weights 0]",
    }


def test_two_loops_are_two_parts_of_the_graph():
    def both(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch))
            flow.log(step, actor.update(batch.filter(batch.rewards > 0), loss=rl.sft()))
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=4)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    graph = graph_of(both)
    assert edges(graph, "weights") == {
        "actor.update -> actor.generate [weights 0]",
        "actor.update#2 -> actor.generate#2 [weights 0]",
    }
    assert edges(graph, "carried") == set()


# -- the same graph every time --------------------------------------------------------------------------------------


def scored(batch, n):
    return reward.score(actor.generate(batch, n=n))


def test_helpers_of_the_script_are_seen_through():
    def helped(steps=10):
        for step, batch in flow.steps(prompts, steps):
            first, second = scored(batch, 4), scored(batch, 2)
            batch = rl.group_advantages(first)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), other=second.rewards.mean())

    graph = graph_of(helped)
    assert [n.id for n in graph.nodes[:4]] == ["actor.generate", "reward.score", "actor.generate#2", "reward.score#2"]
    assert graph.node("actor.generate").source == "return reward.score(actor.generate(batch, n=n))"


def test_compiling_again_gives_the_same_record():
    def program(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(scored(batch, 4))
            if step % 3 == 0:
                actor.update(batch, loss=rl.sft())
            else:
                actor.update(batch, loss=rl.ppo_clip())

    assert graph_of(program).to_json() == graph_of(program).to_json()


@pytest.mark.parametrize("staleness", [0, 2])
def test_staleness_is_allowed_on_the_edges_that_generate(staleness):
    def grpo(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = actor.logprobs(rl.group_advantages(scored(batch, 4)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="old")))

    graph = compile_graph(trace(grpo, {}, name="grpo"), staleness=staleness)
    assert {e.dst: e.lag for e in graph.edges_of("weights")} == {"actor.generate": staleness, "actor.logprobs": 0}


def test_a_program_that_may_stop_early_says_so_only_of_what_comes_after():
    def early(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch, n=4))
            if batch.rewards.mean() > 0.9:
                break
            flow.log(step, actor.update(rl.group_advantages(batch), loss=rl.ppo_clip()))
        actor.save("somewhere")

    graph = graph_of(early)
    rest = "not (rewards.mean() > 0.9)"
    assert branches(graph) == {"rl.group_advantages": rest, "actor.update": rest}
    assert (graph.node("actor.save").stage, graph.node("reward.score").stage) == ("once", "step")
    assert "actor.update -> actor.generate [weights 0]" in edges(graph)


class Options:
    """Something without a repr of its own."""


def test_objects_that_are_made_anew_are_no_carried_choice():
    def optioned(steps=10):
        for step, batch in flow.steps(prompts, steps):
            batch = reward.score(actor.generate(batch, n=4))
            if batch.rewards.mean() > 0.5:
                flow.log(step, count=batch.count())
            batch = centre.centre(batch, baseline=Options())
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    assert edges(graph_of(optioned), "carried") == set()

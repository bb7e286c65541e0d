"""The graph as text: a line for each call, what it reads and adds, and what a plan adds to that."""

from __future__ import annotations

import re
from dataclasses import replace

from draw_samples import PLACED, SAMPLES, WILD

from flowrl.graph.draw import render
from flowrl.graph.record import Edge, Graph, Node


def test_text_of_a_program_with_an_environment() -> None:
    rows = [row.partition("  #")[0].rstrip() for row in render(SAMPLES["guess"], "text").splitlines()]
    assert (
        "\n".join(rows)
        == """\
program guess {
  worker actor: Actor
  worker game: GuessingGame
  data.prompts -> prompt_ids, secret
  game.rollout(prompt_ids, secret) -> response_ids, tokens, response_mask, rollout_logprobs, \
sampling_logprobs, versions, rewards rows=expand external serves<-actor weights<-actor.update lag=2
  rl.group_advantages(rewards, response_mask) -> advantages cost=local
  actor.update(tokens, response_mask, rollout_logprobs, advantages) updates=weights cost=train
  batch.mean(rewards) cost=local
  types {
    prompt_ids: i32[*prompt]
    secret: f32[]
    response_ids: i32[*response]
    tokens: i32[*token]
    response_mask: bool[*response]
    rollout_logprobs: f32[*response]
    sampling_logprobs: f32[*response]
    versions: i32[*response]
    rewards: f32[]
    advantages: f32[*response]
  }
}"""
    )


def test_text_marks_conditions_carried_values_and_what_happens_once() -> None:
    text = render(SAMPLES["ppo_adaptive"], "text")
    assert "  if step % 50 == 0 {\n    actor.generate#2(prompt_ids@data.prompts)" in text
    assert "-> token_rewards cost=local carried<-batch.mul#2  #" in text
    assert "  batch.mul(@batch.sub)" in text
    assert "  once {\n    actor.save() weights<-actor.update lag=0 order<-actor.update" in text
    assert re.search(r"batch\.mean#2\(rewards\).*# :29\n", text), "the rewards of the step, not those of the branch"
    assert text.splitlines()[0].endswith("# algorithms/ppo_adaptive.py, 2 paths")


def test_text_says_where_a_field_comes_from_when_it_is_not_the_last_one_above() -> None:
    grpo = SAMPLES["grpo"]
    again = replace(grpo.node("reward.score"), id="reward.score#2", line=20)
    nodes = (*grpo.nodes[:2], again, *grpo.nodes[2:])
    assert "batch.mean(rewards@reward.score)" in render(replace(grpo, nodes=nodes), "text")
    lost = replace(grpo, edges=tuple(e for e in grpo.edges if e.src != "rl.group_advantages"))
    assert "ref_logprobs, ?advantages)" in render(lost, "text")


def test_text_follows_a_field_through_other_rows() -> None:
    """After generate the prompt is that of the expanded rows; after a filter the tokens are the kept ones."""
    grpo = SAMPLES["grpo"]
    assert "reward.score(prompt, answer, response_ids) ->" in render(grpo, "text")
    kept = Node("batch.filter", "batch", "filter", reads=("tokens",), rows="filter")
    nodes = (*grpo.nodes[:2], kept, *grpo.nodes[2:])
    edges = [replace(e, src=kept.id) if e.dst == "ref.logprobs" else e for e in grpo.edges]
    text = render(
        replace(grpo, nodes=nodes, edges=(*edges, Edge("actor.generate", kept.id, "data", ("tokens",)))), "text"
    )
    assert "batch.filter(tokens) rows=filter" in text and "ref.logprobs(tokens, response_mask) ->" in text
    assert "rl.group_advantages(rewards@reward.score, response_mask@actor.generate) ->" in text


def test_a_changed_rule_changes_one_line_of_text() -> None:
    grpo = SAMPLES["grpo"]
    relaxed = replace(grpo, edges=tuple(replace(e, lag=1) if e.kind == "weights" else e for e in grpo.edges))
    before, after = (render(g, "text").splitlines() for g in (grpo, relaxed))
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(changed) == 1 and "lag=0" in changed[0][0] and "lag=1" in changed[0][1]


@WILD
def test_text_has_a_line_per_call(graph: Graph) -> None:
    rows = render(graph, "text").splitlines()
    for node in graph.nodes:
        start = " ".join(f"{node.id}(".splitlines())
        assert sum(row.strip().startswith(start) for row in rows) == 1


def test_a_plan_adds_blocks_to_the_text_and_a_line_for_the_weights_on_their_way() -> None:
    before, after = ([row.partition("  #")[0].rstrip() for row in render(g, "text").splitlines()] for g in _PAIR)
    added = [row for row in after if row not in before]
    assert [row for row in before if row not in after] == [row for row in before if row.startswith("  actor.generate")]
    assert (
        "\n".join(added[1:])
        == """\
  actor.publish() publish weights<-actor.update lag=0
  pools {
    rollout: devices 8-15 · 8 × h100-80
    train: devices 0-7 · 8 × h100-80
  places {
    actor.generate on rollout[dp=4,tp=2]: rows over dp; weights over tp
    reward.score on rollout
    ref.logprobs on train[fsdp=8]: rows over fsdp; weights over fsdp
    actor.update on train[fsdp=4,tp=2]: rows over fsdp; weights over fsdp x tp
    actor.publish on rollout
  moves {
    data.prompts -> actor.generate: data 4.1 kB (same pool)
    actor.generate -> reward.score: data 38 MB (same pool)
    actor.generate -> ref.logprobs: data 38 MB (network)
    reward.score -> rl.group_advantages: data 4.1 kB (same pool)
    actor.generate -> rl.group_advantages: data 38 MB (same pool)
    actor.generate -> actor.update: data 38 MB (network)
    rl.group_advantages -> actor.update: data 4.1 kB (same pool)
    ref.logprobs -> actor.update: data 4.1 kB (same pool)
    reward.score -> batch.mean: data 4.1 kB (same pool)
    actor.update -> actor.publish: weights 16 GB (network)
    actor.publish -> actor.generate: weights v(k)"""
    )


_PAIR = (SAMPLES["grpo"], PLACED["grpo split"])


def test_text_says_times_in_comments() -> None:
    rows = render(PLACED["ppo apart"], "text").splitlines()
    assert any(re.search(r"rollout: devices 8-15 .*# 91 % busy$", row) for row in rows)
    assert any(re.search(r"actor\.update on train\[.*# 2\.6 s · 36 %$", row) for row in rows)

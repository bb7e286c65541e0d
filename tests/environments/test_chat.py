"""A chat template that shows the policy another conversation than it had is found before the run, and named."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from chat_templates import CHATML, FORGETS, REWRITES, chat_tokenizer

from flowrl.analysis import chat_templates as chat_templates_of_checks
from flowrl.environments.chat import forgotten_text, ids_behind
from flowrl.errors import CheckError, ModelError

USER = {"role": "user", "content": "x"}
TOOL = {"role": "tool", "name": "tool", "content": "x"}
#: As Qwen3 does: a thought is there until the user speaks again; what tools give is no matter of the user.
QWEN = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


NO_TOOLS = CHATML.replace(
    "<|im_start|>{{ m.role }}",
    "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|im_start|>{{ m.role }}",
)


def test_a_template_that_keeps_what_was_said_is_told_nothing_of():
    for following in ([], [USER], [TOOL], [TOOL, USER], [USER, USER]):
        assert forgotten_text(following, chat_tokenizer(CHATML)) == ""
    assert forgotten_text([TOOL], chat_tokenizer(NO_TOOLS)) == "", "messages that are refused are told of elsewhere"


def test_a_thought_that_is_dropped_is_named_with_its_turn_and_text():
    """That of turn 1 goes when the user speaks behind turn 2; a tool alone leaves it there."""
    qwen = chat_tokenizer(QWEN)
    assert forgotten_text([TOOL], qwen) == ""
    assert forgotten_text([USER], qwen) == (
        "once a message of user follows, turn 1 has 'Answer 1.<|im_end|>\\n<|im_start|>user\\nx<|im_end|>\\n<|im_start|...' "
        "where it had '<think>\\nThought 1.\\n</think>\\n\\nAnswer 1.'"
    )
    assert forgotten_text([TOOL, USER], qwen).startswith("once a message of user follows, turn 1 has 'Answer 1.")
    assert forgotten_text([USER, TOOL, USER], qwen).startswith("once a message of user follows, turn 1 has 'Answer 1.")


def test_a_template_that_leaves_all_thoughts_out_is_named():
    assert forgotten_text([USER], chat_tokenizer(FORGETS)) == (
        "turn 1 has '\\n\\nAnswer 1.<|im_end|>\\n' where the answer is '<think>\\nThought 1.\\n</think>\\n\\nAnswer 1.'"
    )


def test_history_that_is_rewritten_later_is_named():
    """The answer is there until two more messages follow."""
    cuts = CHATML.replace("{{ m.content }}", "{{ '...' if loop.index0 + 2 < messages | length else m.content }}")
    found = forgotten_text([USER], chat_tokenizer(cuts))
    assert (
        found.startswith("once a message of user follows, turn 1 has '...<|im_end|>")
        and "'Question.<|im_end|>" in found
    )


def test_an_answer_that_is_rewritten_is_an_error_that_shows_it():
    with pytest.raises(ModelError) as error:
        ids_behind([USER], chat_tokenizer(REWRITES), last=None)
    assert "turn 1 has 'flowrlanswer<|im_end|>\\n" in error.value.what and "keeps what the assistant" in error.value.fix


def open_flow(tmp_path, template, *, kind="agent", runtime="local", tools=False):
    """Run a flow whose policy's tokenizer has a template: no step may begin where that is an error."""
    from letters import model_of

    import flowrl as fl
    from flowrl.environments import AgentEnvironment, Environment

    def build():
        return chat_tokenizer(template)

    class Chat(Environment):
        def rows(self):
            return [{"prompt": "?"}] * 2

        def respond(self, state):
            STEPS.append("respond")
            return "why?"

    class Agent(AgentEnvironment):
        def rows(self):
            return [{"prompt": "?"}] * 2

        def agent(self, task):
            STEPS.append("agent")
            return "done"

    STEPS.clear()
    flow = fl.Flow("templates")
    base = model_of(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    config = {**base.config, "vocab_size": len(build()), "num_key_value_heads": 4}
    actor = flow.worker(fl.Actor, fl.Model(config=config, tokenizer=build), max_tokens=2, lr=None, name="actor")
    game = flow.worker(Agent if kind == "agent" else Chat, name="game")
    source = (Agent if kind == "agent" else Chat)().source(batch=2)

    @flow.program
    def train(steps: int = 1):
        for step, batch in flow.steps(source, steps):
            batch = game.rollout(batch, policy=actor, turns=2)
            flow.log(step, reward=batch.rewards.mean())

    flow.run(out=tmp_path / "run", quiet=True, runtime=runtime)


STEPS: list[str] = []


@pytest.mark.parametrize("runtime", ["local", "eager"])
@pytest.mark.parametrize("kind", ["agent", "chat"])
@pytest.mark.parametrize("at_hand", [True, False])
def test_a_template_that_cannot_go_on_ends_the_run_before_its_first_step(tmp_path, monkeypatch, kind, runtime, at_hand):
    """By the check before anything is loaded; as the flow opens, where a tokenizer was not at hand before."""
    if kind == "agent":
        pytest.importorskip("h11", reason="the gateway needs the package h11")
    if not at_hand:
        monkeypatch.setattr(chat_templates_of_checks, "find_tokenizer", lambda said: None)
    with pytest.raises((ModelError, CheckError), match="writes an answer anew once messages follow it") as error:
        open_flow(tmp_path, REWRITES, kind=kind, runtime=runtime)
    assert isinstance(error.value, CheckError) == at_hand
    at = error.value.errors[0].at if isinstance(error.value, CheckError) else error.value.at
    assert STEPS == [] and at is not None and at.file.endswith("test_chat.py")
    assert "game = flow.worker(" in Path(__file__).read_text().splitlines()[at.line - 1], "as it opens, not as it plays"


@pytest.mark.parametrize("kind", ["agent", "chat"])
def test_a_template_that_drops_thoughts_is_told_of_in_the_events_of_the_run(tmp_path, kind):
    if kind == "agent":
        pytest.importorskip("h11", reason="the gateway needs the package h11")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_flow(tmp_path, QWEN, kind=kind)
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert said.count("breaks the prefix: once a message of user follows, turn 1 has") == 1


def test_an_agent_whose_tools_a_template_refuses_is_told_of(tmp_path):
    pytest.importorskip("h11", reason="the gateway needs the package h11")
    open_flow(tmp_path, NO_TOOLS)
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert "refuses messages of tool after an answer: no tools. Calls of agents that use tools are refused." in said

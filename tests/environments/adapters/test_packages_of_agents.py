"""Agents of real packages: openai, anthropic, LangChain and smolagents ask the gateway, each as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_package import packages, said_by

pytest.importorskip("h11", reason="the gateway needs the package h11")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    others = ("openai>=2", "anthropic>=0.60", "langchain>=1", "langchain-openai>=1", "smolagents>=1.20")
    return packages("agents", tmp_path_factory.mktemp("packages"), *others)


def expect_played(found: dict[str, Any]) -> None:
    """Both episodes are over, in one branch, whose tokens are all there and those that the engine saw; an update on them
    makes the better one more probable."""
    assert found["outcomes"] == ["finished"] * 2 and found["why"] == ["done"] * 2
    assert found["delivered"] == 1 and found["gap"] < 1e-4
    trained, sampled = found["tokens"]
    assert trained == sampled and found["grad_norm"] > 0, "all that was sampled is trained, once"
    assert found["more"] > 0, "what had the better reward is more probable"


@pytest.mark.parametrize(
    "agent", ["OpenAIChat", "OpenAIAsync", "OpenAIResponses", "OpenAIKeptResponses", "AnthropicMessages"]
)
def test_clients_of_two_protocols_have_conversations_of_one_branch(folder, agent):
    found = said_by("agent_play.py", folder, agent)[agent]
    expect_played(found)
    assert found["calls"] == [2, 2] and found["forks"] == [0, 0]


def test_pieces_of_a_stream_are_its_text_to_each_client(folder):
    found = said_by("agent_play.py", folder, "Streams")["Streams"]
    expect_played(found)
    assert found["calls"] == [3, 3] and found["forks"] == [0, 0]


def test_an_agent_of_langchain_goes_on_with_its_conversation(folder):
    found = said_by("agent_play.py", folder, "LangChain")["LangChain"]
    expect_played(found)
    assert found["calls"] == [2, 2] and found["forks"] == [0, 0]


def test_an_agent_of_smolagents_asks_until_its_steps_are_over(folder):
    found = said_by("agent_play.py", folder, "SmolAgents")["SmolAgents"]
    expect_played(found)
    assert min(found["calls"]) >= 2

"""The metadata of a card has what the run knows, as the hub reads it, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.data.identity import identity
from flowrl.runtime.driver.card_metadata import card_metadata, front_matter
from flowrl.runtime.driver.model_card import model_card
from flowrl.runtime.storage import run_inputs

BASE = {"library_name": "transformers", "tags": ["flowrl", "reinforcement-learning"]}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def record(model: str = "Qwen/Qwen3-0.6B", *data: dict[str, str], worker: str = "actor") -> dict[str, Any]:
    """What run.json has of a program for each of ``data``, which updates ``worker``; names are JSON, digests are not."""
    graphs = {
        f"train-{n}": {"nodes": [{"worker": worker, "op": "update", "updates": "weights"}]} for n in range(len(data))
    }
    workers = {
        "actor: class": "actor.Actor",
        "actor: model.name": model if "(" in model else json.dumps(model or None),
        "actor: lr": "1e-06",
    }
    return {
        "id": "0c5e",
        "script": "train.py",
        "graphs": graphs,
        "inputs": {
            "workers": workers,
            "data": [{name: json.dumps(said) for name, said in some.items()} for some in data],
        },
    }


def cached_card(cache: Path, name: str, text: str) -> None:
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "README.md").write_text(text)


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gpt2", "gpt2"),
        ("actor (4f2a90c1d7e3)", None),  # a folder of this machine
        ("runs/first/model/actor", None),
        ("/home/me/model", None),
        ("../model", None),
        ("", None),  # random weights
        ("a: b\n- c", None),
    ],
)
def test_the_base_model_is_named_where_it_is_on_the_hub(model: str, base: str | None) -> None:
    assert card_metadata(record(model), "actor") == BASE | ({"base_model": base} if base else {})


def test_data_sets_of_the_hub_are_named_that_the_model_was_trained_on() -> None:
    first = {"source: batch": "32", "source: rows": "openai/gsm8k[train]", "source 2: rows": "9f2c41d07a3e"}
    mixed = {"source: math.rows": "open-r1/OpenR1-Math-220k[train], streamed by 1000", "source: a.prompt": "b/c[d]"}
    stratum = {"source: rows": "openai/gsm8k[train]", "source: hard.rows": "my/levels[train[:50%]] where level is 3"}
    made = {"source: rows": "additions(index)", "source: local.rows": "the list of rows"}
    found = card_metadata(record("gpt2", first, mixed, stratum, made), "actor")["datasets"]
    assert found == ["openai/gsm8k", "open-r1/OpenR1-Math-220k", "my/levels"]
    assert "datasets" not in card_metadata(record("gpt2", first, worker="critic"), "actor"), "an evaluation's, say"


@pytest.mark.parametrize("lacks", [{}, {"inputs": None, "graphs": None}, {"inputs": {"workers": None, "data": None}}])
def test_a_record_that_lacks_all_gives_what_is_always_so(lacks: dict[str, Any]) -> None:
    assert card_metadata(lacks, "actor") == BASE


def test_a_data_set_is_named_though_its_condition_has_several_lines() -> None:
    data = {"source: rows": "my/levels[train] where level\n is 3"}
    assert card_metadata(record("gpt2", data), "actor")["datasets"] == ["my/levels"]


def test_it_reads_what_a_run_records_of_its_models_and_data() -> None:
    def given(source: Any) -> dict[str, str]:
        return dict(run_inputs._flat("source", identity(source)))

    easy = fl.data.hf("openai/gsm8k", "main", split="train", batch=4, prompt="question")
    streamed = fl.data.hf("open-r1/OpenR1-Math-220k", streaming=True, batch=4, prompt="problem")
    mixed = fl.data.mix({"easy": easy, "own": fl.data.rows([{"prompt": "1+1="}], batch=1)}, batch=4)
    actor = fl.Flow("train").worker(fl.Actor, "Qwen/Qwen3-0.6B", name="actor", lr=1e-6)
    said = record("", {}, {})
    said["inputs"]["data"] = [given(mixed), given(streamed)]
    said["inputs"]["workers"] = dict(run_inputs._worker(actor))  # type: ignore[arg-type]
    found = card_metadata(said, "actor")
    assert found["base_model"] == "Qwen/Qwen3-0.6B"
    assert found["datasets"] == ["openai/gsm8k", "open-r1/OpenR1-Math-220k"]


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("Qwen3ForCausalLM", "text-generation"),
        ("Qwen2ForSequenceClassification", "text-classification"),
        ("Qwen2ForTokenClassification", "token-classification"),
        ("SomethingElse", None),
    ],
)
def test_the_task_is_that_of_the_saved_architecture(tmp_path: Path, architecture: str, task: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert card_metadata({}, "actor", tmp_path).get("pipeline_tag") == task


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"architectures": []}', '{"architectures": "x"}', '{"architectures": null}']
)
def test_a_configuration_that_says_nothing_gives_no_task(tmp_path: Path, text: str) -> None:
    assert card_metadata({}, "actor", tmp_path) == BASE
    (tmp_path / "config.json").write_text(text)
    assert card_metadata({}, "actor", tmp_path) == BASE


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\nlanguage: en\n---\n# Base\n", {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_name": "mine", "license_link": "LICENSE"},
        ),
        ("---\nlicense: [a, b]\n---\n", {}),
        ("# no metadata\n---\nlicense: mit\n---\n", {}),
        ("---\nlicense: 'unclosed\n---\n", {}),
        ("---\n- a\n---\n", {}),
        ("", {}),
    ],
)
def test_the_licence_is_that_of_the_base_models_card_in_the_cache(
    no_cache: Path, card: str, licence: dict[str, str]
) -> None:
    cached_card(no_cache, "Qwen/Qwen3-0.6B", card)
    found = card_metadata(record(), "actor")
    assert {name: value for name, value in found.items() if name.startswith("license")} == licence


def test_the_hub_reads_the_card(no_cache: Path, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    cached_card(no_cache, "Qwen/Qwen3-0.6B", "---\nlicense: apache-2.0\n---\n")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    data = {"source: rows": "openai/gsm8k[train]"}
    text = model_card(record("Qwen/Qwen3-0.6B", data), "actor", {"program": "train", "step": 3}, folder=tmp_path)
    read = hub.ModelCard(text).data
    assert isinstance(read, hub.ModelCardData) and read.library_name == "transformers"
    assert (read.base_model, read.datasets, read.license) == ("Qwen/Qwen3-0.6B", ["openai/gsm8k"], "apache-2.0")
    assert (read.pipeline_tag, read.tags) == ("text-generation", ["flowrl", "reinforcement-learning"])
    made = hub.ModelCardData(**card_metadata(record("Qwen/Qwen3-0.6B", data), "actor", tmp_path))
    assert made.to_dict() == read.to_dict()
    assert front_matter(read.to_dict()).startswith("---\n") and "# actor, trained with flowrl" in text

"""What the hub reads at the top of a model's card: base model, data sets, licence, task. Only what the run knows of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ...hub import cached_file

_ON_HUB = r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?"  # the name of a model or of a data set
_DATA_SET = re.compile(rf"({_ON_HUB})\[.+\](?:, streamed by \d+)?(?: where .*)?", re.DOTALL)
_LICENCE = ("license", "license_name", "license_link")
#: What a model is used for, by the end of the name of its architecture.
_TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
}


def card_metadata(record: Mapping[str, Any], worker: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the metadata of the card of a worker's model, as ``ModelCardData`` of huggingface_hub has it.

    ``record`` is run.json, ``folder`` where the model was saved. A base model or a data set that lies in a folder of
    this machine is left out, and so is a licence that the card of the base model in the local cache does not say.
    """
    base = _base_model(record, worker)
    data = list(dict.fromkeys(_data_sets(record, worker)))
    found: dict[str, Any] = {"library_name": "transformers"}
    found |= {"pipeline_tag": task} if (task := _task(folder)) else {}
    found |= {"base_model": base} if base else {}
    found |= {"datasets": data} if data else {}
    found |= _licence(base) if base else {}
    return {**found, "tags": ["flowrl", "reinforcement-learning"]}


def front_matter(metadata: Mapping[str, Any]) -> str:
    """Return metadata as the lines between the dashes at the top of a card.

    >>> print(front_matter({"library_name": "transformers", "tags": ["flowrl"]}))
    ---
    library_name: transformers
    tags:
    - flowrl
    ---
    """
    return f"---\n{yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)}---"


def _base_model(record: Mapping[str, Any], worker: str) -> str:
    """The name on the hub of the model that a worker began with; empty where it has none."""
    workers: Mapping[str, str] = (record.get("inputs") or {}).get("workers") or {}
    said = _named(workers.get(f"{worker}: model.name", workers.get(f"{worker}: model")))
    return said if re.fullmatch(_ON_HUB, said) else ""


def _data_sets(record: Mapping[str, Any], worker: str) -> Iterator[str]:
    """The names on the hub of what the programs draw from that update a worker."""
    data: Any = (record.get("inputs") or {}).get("data") or ()
    programs = zip((record.get("graphs") or {}).values(), data, strict=False)
    for graph, sources in programs:
        if any(node.get("worker") == worker and node.get("updates") for node in graph.get("nodes", ())):
            for name, said in sources.items():
                if re.search(r"[ .]rows$", name) and (match := _DATA_SET.fullmatch(_named(said))):
                    yield match[1]


def _named(said: Any) -> str:
    """A name that a record has as JSON; empty for the digest of a folder, and for none."""
    try:
        name = json.loads(said) if isinstance(said, str) else None
    except ValueError:
        return ""
    return name if isinstance(name, str) else ""


def _task(folder: Path | None) -> str:
    """What a saved model is for, by its configuration; empty where that does not say so."""
    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder is not None else {}
    except (OSError, ValueError):
        return ""
    architectures = known.get("architectures") if isinstance(known, dict) else None
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return next((task for end, task in _TASKS.items() if named.endswith(end)), "")


def _licence(base: str) -> dict[str, str]:
    """What the card of a base model says of its licence, where that card is on this machine."""
    card = cached_file(base, "README.md")
    try:
        text = card.read_text(encoding="utf-8") if card is not None else ""
        _, begin, rest = text.partition("---\n")
        known = yaml.safe_load(rest.partition("\n---")[0]) if begin and text.startswith("---") else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(known, dict) or not isinstance(known.get("license"), str):
        return {}
    return {name: known[name] for name in _LICENCE if isinstance(known.get(name), str)}

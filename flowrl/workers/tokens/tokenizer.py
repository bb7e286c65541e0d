"""A tokenizer from what a user said: a hub name, a folder, a function that builds one, or the tokenizer itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ...graph.stand_ins.values import is_handle

#: Classes of a tokenizer that is all in its ``tokenizer.json``.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def find_tokenizer(said: Any, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that ``said`` names, builds or is. Raises what transformers raises for one that cannot be read.

    Raises ModelError for one with Python files of its own, which are run only with ``trust_remote_code``.
    """
    if isinstance(said, (str, Path)):
        try:
            return _read(Path(said).expanduser(), str(said), revision, trust_remote_code)
        except ValueError as error:
            refuse_code(error, f"The tokenizer of '{said}'")
            raise
    return said() if callable(said) and not hasattr(said, "encode") else said


class Tokenizers:
    """The tokenizers of a flow, each read once, in whatever threads it is asked for. ``workers`` are classes and
    arguments by name, in the order of their declaration; ``of_worker`` gives the tokenizer of one."""

    def __init__(self, workers: Mapping[str, tuple[type, Mapping[str, Any]]], of_worker: Callable[[str], Any]) -> None:
        self._workers, self._of_worker = workers, of_worker
        self._known: dict[int, tuple[Any, Any]] = {}  # with what named it, so that the id stays its own
        self._by_worker: dict[str, Any] = {}
        self._reading = threading.RLock()  # what reads them is imported by one thread

    def find(self, said: Any) -> Any:
        """Return the tokenizer of a handle, a worker, a function, a name or a folder; of the flow's actor for None.

        Raises ModelError where no worker has one, and what :func:`find_tokenizer` raises.
        """
        with self._reading:
            if said is None or is_handle(said):
                name: str = said.name if said is not None else actor_of(self._workers)
                if name not in self._by_worker:
                    self._by_worker[name] = self._of_worker(name)
                return self._by_worker[name]
            if hasattr(said, "tokenizer"):  # a worker: what an op is handed where its call names a handle
                return said.tokenizer
            if id(said) not in self._known:
                self._known[id(said)] = (said, find_tokenizer(said))
            return self._known[id(said)][1]


def refuse_code(error: Exception, what: str) -> None:
    """Raise ModelError where transformers has refused to run Python files that lie beside a model."""
    if "trust_remote_code=True" in str(error):
        raise ModelError(
            f"{what} has Python files of its own to be loaded with (auto_map), and they are not run.",
            fix="If you trust them, write model=fl.Model('NAME or folder', trust_remote_code=True).",
        ) from None


def actor_of(workers: Mapping[str, tuple[type, Mapping[str, Any]]]) -> str:
    """The worker whose tokenizer is the flow's: the first actor that is trained, else one that is not, else any model.

    ``workers`` are classes and arguments by name, in the order of their declaration. ModelError where there is none.
    """
    actors = [name for name, (cls, _) in workers.items() if hasattr(cls, "generate")]
    trained = [name for name in actors if _is_trained(*workers[name])]
    models = [name for name, (cls, _) in workers.items() if hasattr(cls, "build")]
    found = next(iter([*trained, *actors, *models]), None)
    if found is None:
        raise ModelError(
            "No worker of this flow has a tokenizer.",
            fix="Give tokenizer=, a hub name, a folder or a function that builds one.",
        )
    return found


def _is_trained(cls: Any, arguments: Mapping[str, Any]) -> bool:
    return cls.is_trained(arguments)


def _read(folder: Path, name: str, revision: str | None, trusted: bool) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    about = folder / "tokenizer_config.json"
    whole = about.is_file() and (folder / "tokenizer.json").is_file()
    if whole and json.loads(about.read_text()).get("tokenizer_class") in _GENERIC:
        # Beside some kinds of model, Qwen2 among them, AutoTokenizer would take that kind's own, whatever stands there.
        return PreTrainedTokenizerFast.from_pretrained(str(folder), trust_remote_code=False)
    return AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=trusted)

"""A value of the command line, as YAML says it: ``2e-6``, ``[0.9, 0.95]``, ``{r: 16}``."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, ClassVar, cast

from .errors import At, FlowError, UsageError, cut

_FIX = "Write a value, a list or {NAME: VALUE}; a text with such characters in quotes."
_WRITTEN_OUT = r'Leave such characters out, or write them out in double quotes, as in "\x1b[A".'

#: What is no text without quotes: the core schema of YAML 1.2 and ``None``, without 010, 0o17 and 0x1f.
_WORDS = (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", "~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9](?:_?\d)*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:0|[1-9](?:_?\d)*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)


def read_value(text: str, title: str, *, plain_texts: bool = False) -> Any:
    """Return the value that a text says. Raises UsageError where it says none; ``title`` is what errors call it.

    It is YAML in which few words are no texts: ``true`` and ``false``, ``null``, ``~`` and Python's ``None``, and
    numbers in digits, as Python writes them. ``no``, ``010``, ``1:30`` and dates are texts. With ``plain_texts`` so is
    all else that begins with no quote and no bracket, as it stands: ``What: now``.

    >>> read_value("2e-6", "--arg actor.lr"), read_value("{r: 16, targets: [q_proj]}", "--arg actor.lora")
    (2e-06, {'r': 16, 'targets': ['q_proj']})
    """
    import yaml

    loader, word = cast("Any", _loader()("")), text.strip()
    if plain_texts and not word.startswith(("[", "{", "'", '"')):
        node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, word, (True, False)), word)
        if node.tag.endswith(":str"):
            return text
    else:
        node = compose_value(text, title)
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _no_yaml(text, title, error, UsageError) from None


def compose_value(text: str, title: str, kind: type[FlowError] = UsageError) -> Any:
    """Return the YAML node of a value, whose marks have ``title`` as the name. Raises ``kind`` for what is no YAML."""
    import yaml

    try:
        loader = cast("Any", _loader()(text))  # nodes have no types
        loader.name = title
        mark = loader.get_mark()
        node = loader.get_single_node()
    except (yaml.YAMLError, RecursionError) as error:
        raise _no_yaml(text, title, error, kind) from None
    return node or yaml.ScalarNode("tag:yaml.org,2002:null", "", mark, mark)


def _no_yaml(text: str, title: str, error: Exception, kind: type[FlowError]) -> FlowError:
    unreadable = getattr(error, "reason", None)  # of a character that stands nowhere in YAML
    why = unreadable or getattr(error, "problem", None) or str(error) or type(error).__name__
    at, fix = At(_printable(title), 0), _WRITTEN_OUT if unreadable else _FIX
    return kind(f"{_printable(text)} is no YAML: {why}.", at=at, fix=fix)


def _printable(text: str) -> str:
    """A text as a message has it: what a terminal would act on is written out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut(text, 80))


@cache
def _loader() -> Any:
    """The safe loader of YAML, which takes ``2e-6`` for a text and ``no`` for False otherwise."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[Any] = {}

    for kind, form, first in _WORDS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{form})$"), list(first))
    return Loader

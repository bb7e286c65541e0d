"""A value of the command line, as YAML says it: ``2e-6``, ``[0.9, 0.95]``, ``{r: 16}``."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, cast

from .errors import At, FlowError, UsageError, cut

_FIX = "Write a value, a list or {NAME: VALUE}; a text with such characters in quotes."
_WRITTEN_OUT = r'Leave such characters out, or write them out in double quotes, as in "\x1b[A".'


def read_value(text: str, title: str) -> Any:
    """Return the value that a text says. Raises UsageError where it says none; ``title`` is what errors call it.

    It is YAML, where numbers may be written as Python does, ``None`` and ``none`` are null, and a date is a text.

    >>> read_value("2e-6", "--arg actor.lr"), read_value("{r: 16, targets: [q_proj]}", "--arg actor.lora")
    (2e-06, {'r': 16, 'targets': ['q_proj']})
    """
    import yaml

    node = compose_value(text, title)
    try:
        return cast("Any", _loader()("")).construct_document(node)
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
    """The safe loader of YAML, which takes ``2e-6`` for a text otherwise."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^[Nn]one$"), list("Nn"))
    rules = cast("dict[str, list[tuple[str, Any]]]", cast("Any", Loader).yaml_implicit_resolvers)
    for first, found in rules.items():
        rules[first] = [(tag, form) for tag, form in found if not tag.endswith(":timestamp")]
    return Loader

"""Write docs/mistakes.md from tests/wrong: ``python docs/make_mistakes.py``. A test keeps them equal."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
HEAD = """\
# Mistakes

Every kind of mistake that `flowrl check` knows, by the class of its error, with the programs that show it
([what they say](wrong_programs.md)); and what it cannot know. A mistake is found at the first of these
moments at which it can be known: when the script is loaded, in the trace, when models open, at the first call.

## What check knows

The page is made from the programs in `tests/wrong/` by `docs/make_mistakes.py`; a test holds
each of them.
"""
CLASSES = {
    "FieldError": "fields: missing, of another type, written twice",
    "RowsError": "rows: put together without being the same",
    "ProgramError": "the program, and the values of its calls",
    "WorkerError": "workers: how they are declared, and whether they are used",
    "ModelError": "models, optimizers and sampling",
    "DataError": "data",
    "RewardError": "rewards and environments",
    "UsageError": "the script as a whole",
}
TAIL = """\

## Values

What an argument may be is declared beside it, for flowrl's own ops, losses and workers as for yours
([`fl.takes`](language.md#something-of-your-own)). A value that is written in the program is looked at in the trace;
one that the program computes, or that depends on the step, is looked at by the call itself, with the same words.

## What check cannot know

| what | when it is found |
|---|---|
| whether a number that the program computes is allowed | at the call that is given it |
| what a reward, an op or an environment of yours returns; its failures | at its first call, with row and line |
| whether user code hangs, exits, forks or crashes ([what then](workers.md)) | when it does, with row and line |
| the shape of what a loss of yours gives; a field that it looks up under a computed name | at the first update |
| a field that an op of yours looks up under a computed name | at its first call, with its line |
| whether a model or tokenizer by name exists, and fits into memory | when models open, before the first step |
| what is in rows after the first 32 of a file | when they are drawn |
| whether a text has half of a surrogate pair | when it is encoded, with file and row |
| whether weights or fields become infinite or no numbers | at the first result that is not finite: they are named |
| whether a service answers | at the call: `retries=`, `on_error="mark"`, `max_failed=` |
| whether anything is learned | a warning after 10 updates with `grad_norm` 0, or at the end of a shorter program |
| paths beyond the 64 that are followed | when they run |
| what hangs on a number that [Python is given](language.md), if none of 0 to 5 and 10 shows it | when it is met |
| what the program does to files and services itself | never: such things belong into ops |
"""


def page() -> str:
    """The page: kinds of mistakes by class of error, then what check cannot know."""
    kinds: dict[str, list[str]] = {name: [] for name in CLASSES}
    programs = sorted((TESTS / "wrong").glob("*.py"), key=lambda path: int(path.name.partition("_")[0]))
    for number, path in enumerate(programs, 1):
        text = path.read_text()
        message = ast.get_docstring(ast.parse(text), clean=False) or ""
        title = text.partition('"""')[2].partition('"""')[2].strip().splitlines()[0].removeprefix("# ").rstrip(".")
        for name in dict.fromkeys(re.findall(r"^(\w+Error): ", message, re.MULTILINE)):
            kinds.setdefault(name, []).append(f"- [{title}](wrong_programs.md#wrong-{number:02d})")
    parts = [f"### `{name}`: {CLASSES.get(name, '')}\n\n" + "\n".join(found) for name, found in kinds.items() if found]
    return HEAD + "\n" + "\n\n".join(parts) + "\n" + TAIL


if __name__ == "__main__":
    (HERE / "mistakes.md").write_text(page())

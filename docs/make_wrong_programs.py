"""Write docs/wrong_programs.md from tests/wrong: ``python docs/make_wrong_programs.py``. A test keeps the two equal."""

import ast
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "tests" / "wrong"
HEAD = """\
# Wrong programs

What `flowrl check` says of programs with a mistake in them. It runs the program on stand-ins, loads no model and
imports no torch. Each message says what is wrong, at which line, what there is, and how to mend it. All mistakes of a
program are reported together.

The programs lie in `tests/wrong/`; a test compares each with its message, letter by letter. This page is made from them
by `docs/make_wrong_programs.py`.
"""


def page() -> str:
    """The page: a list of contents, then each program's mistake and message."""
    found = [(path, *_read(path)) for path in sorted(PROGRAMS.glob("*.py"), key=number_of)]
    contents = "".join(f"{i}. [{title}](#{_anchor(i)})\n" for i, (_, title, _) in enumerate(found, 1))
    entries = [
        f"({_anchor(i)})=\n## {i}. {title}\n\n`tests/wrong/{path.name}`\n\n```text\n{message}\n```\n"
        for i, (path, title, message) in enumerate(found, 1)
    ]
    return "\n".join([HEAD, contents, *entries])


def number_of(path: Path) -> int:
    """The number that a program's name begins with."""
    return int(path.name.partition("_")[0])


def _anchor(number: int) -> str:
    return f"wrong-{number:02d}"


def _read(path: Path) -> tuple[str, str]:
    """What the mistake is (the comment below the docstring), and the message (the docstring)."""
    text = path.read_text()
    message = ast.get_docstring(ast.parse(text), clean=False) or ""
    comment = text.partition('"""')[2].partition('"""')[2].strip().splitlines()[0]
    return comment.removeprefix("# ").removesuffix("."), message.strip()


if __name__ == "__main__":
    (HERE / "wrong_programs.md").write_text(page())

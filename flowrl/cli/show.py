"""``flowrl show``: serve one local page that follows live runs and opens finished ones."""

from __future__ import annotations

import argparse
import os
import sqlite3
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from html import escape
from pathlib import Path

from ..errors import UsageError
from ..show.answers import Answers
from ..show.follow_runs import Follower
from ..show.server import open_server
from ..show.store import open_cache
from .arguments.options import read_known
from .help import new_parser


def show_command(words: Sequence[str]) -> int:
    """Serve the page until Ctrl-C. Returns the exit status."""
    options = read_options(words)
    try:
        follower = Follower(options.run, open_cache())
    except (OSError, sqlite3.Error) as error:
        what = f"The index of a run cannot be made: {error}."
        raise UsageError(what, fix="Let XDG_CACHE_HOME name a folder that can be written.") from None
    if not follower.runs:
        named = " and ".join(map(str, options.run))
        raise UsageError(f"{named} holds no run.", fix="Name the folder that flowrl run --out wrote, or one above it.")
    answers = Answers(follower)
    server = open_server(answers, options.port)
    follower.start()
    several = f"{len(follower.runs)} runs" if len(follower.runs) > 1 else "1 run"
    print(f"{several}; Ctrl-C ends it. Only this machine can open the page:\n  {server.address}", flush=True)
    with opened(server.address) if options.browser else nullcontext():
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
        finally:
            server.server_close()
            follower.stop()
            answers.drawings.close()
    return 0


def read_options(words: Sequence[str]) -> argparse.Namespace:
    """The options of this command. Raises UsageError."""
    if not words:
        raise UsageError("flowrl show needs the folder of a run, or of several.", fix="Write flowrl show RUN.")
    parser = new_parser("show", "RUN")
    parser.add_argument("run", type=Path, nargs="+", help="the folder of a run, or one that holds runs")
    parser.add_argument("--port", type=int, metavar="N", help="the port on this machine; default: a free one from 8765")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="print the address and open nothing")
    fix = "See flowrl show --help."
    options, unknown = read_known(parser, words, fix)
    if unknown:
        raise UsageError(f"'{unknown[0]}' is no option here.", fix=fix)
    return options


@contextmanager
def opened(address: str) -> Iterator[None]:
    """Open a browser there. The address goes through a file of this user, as others can read command lines."""
    handle, name = tempfile.mkstemp(prefix="flowrl-show-", suffix=".html")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            refresh = f'<meta http-equiv="refresh" content="0; url={escape(address)}">'
            file.write(f"<!doctype html>{refresh}<title>flowrl</title>")
        with suppress(webbrowser.Error):
            webbrowser.open(Path(name).as_uri())
        yield
    finally:
        os.unlink(name)

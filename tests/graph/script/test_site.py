"""What is the user's code, and what is a library's, by where it lies."""

import os
import subprocess
import sys

import pytest

from flowrl.graph.script.site import call_lines, source_path

CODE = """
import bought, json, one_file, torch, written
from flowrl.graph.script.site import is_users
print([is_users(x) for x in (bought, bought.call, one_file, json, torch, written, written.call)])
"""


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_installed_in_a_folder_on_the_path_is_a_library(tmp_path, beside):
    """As by ``pip install --target``, or by Debian; what lies beside it, or in a folder of modules alone, is not."""
    packages, mine = tmp_path / "packages", tmp_path / ("packages" if beside else "mine")
    (packages / "bought").mkdir(parents=True)
    mine.mkdir(exist_ok=True)
    for file in (packages / "bought" / "__init__.py", packages / "one_file.py", mine / "written.py"):
        file.write_text("def call():\n    return None\n")
    for name, record in (
        ("bought", "bought/__init__.py,sha256=0,1\nbought-1.0.dist-info/RECORD,,\n../../bin/bought,,\n"),
        ("one_file", "one_file.py,,\n"),
    ):
        (packages / f"{name}-1.0.dist-info").mkdir()
        (packages / f"{name}-1.0.dist-info" / "RECORD").write_text(record)
    unread = tmp_path / "unread"
    unread.mkdir(mode=0)
    path = os.pathsep.join([str(packages), str(mine), str(unread / "below"), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", CODE], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.stdout.decode().split("\n")[0] == "[False, False, False, False, False, True, True]", (
        done.stderr.decode()
    )


def test_a_loops_condition_has_one_place_each_time_and_two_on_a_line_have_two():
    places = []

    class Asked:
        def __bool__(self):
            places.append(source_path(code)[0])
            return len(places) < 6

    code, a, b = sys._getframe().f_code, Asked(), Asked()
    while a and b:
        pass
    assert places == places[:2] * 3 and places[0] != places[1]


def test_a_call_in_a_function_that_calls_itself_has_the_same_lines_however_deep():
    def lines(depth):
        if depth:
            return lines(depth - 1)
        return call_lines(code)

    code = sys._getframe().f_code
    deep = [lines(depth)[1:] for depth in range(1, 7)]
    assert len(deep[0]) == 2 and deep == deep[:1] * 6

"""What is the user's code, and what is a library's, by where it lies."""

import os
import subprocess
import sys


def test_what_is_installed_in_a_folder_on_the_path_is_a_library(tmp_path):
    """As by ``pip install --target``, or by Debian; a folder of modules alone is the user's."""
    for folder in ("packages", "mine"):
        (tmp_path / folder).mkdir()
    (tmp_path / "packages" / "bought.py").write_text("def call():\n    return None\n")
    (tmp_path / "packages" / "bought-1.0.dist-info").mkdir()
    (tmp_path / "mine" / "written.py").write_text("def call():\n    return None\n")
    code = "import bought, json, torch, written; from flowrl.graph.script.site import is_users; "
    code += "print([is_users(x) for x in (bought, bought.call, json, torch, written, written.call)])"
    path = os.pathsep.join([str(tmp_path / "packages"), str(tmp_path / "mine"), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.stdout.decode().split("\n")[0] == "[False, False, False, False, True, True]", done.stderr.decode()

"""One version: that of the package is that of the project file."""

import tomllib
from pathlib import Path

import flowrl


def test_the_package_and_the_project_file_agree():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == flowrl.__version__

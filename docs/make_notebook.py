"""Write docs/notebook.ipynb from docs/notebook.md: ``python docs/make_notebook.py``. A test keeps them equal."""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE, NOTEBOOK = HERE / "notebook.md", HERE / "notebook.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```\n?", re.M | re.S)


def notebook() -> str:
    """Return the notebook: the page's texts as cells of Markdown, its programs as cells of code."""
    cells = [_cell(number, text.strip()) for number, text in enumerate(BLOCK.split(PAGE.read_text())) if text.strip()]
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    record = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _cell(number: int, text: str) -> dict[str, object]:
    """A cell; those of an odd number are programs."""
    common = {"id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
    if number % 2 == 0:
        return {"cell_type": "markdown", **common}
    return {"cell_type": "code", "execution_count": None, **common, "outputs": []}


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook())

"""Take the pictures of docs/show.md: ``python docs/make_show.py RUNS``. It needs Chromium.

RUNS is a folder with runs, of which ``tool_use`` is opened. Those of the page were made with

    flowrl run algorithms/tool_use.py --program warmup,evaluate,tool_use,evaluate --out RUNS/tool_use
    flowrl run algorithms/ppo.py --preset vapo --steps 120 --prompts-per-step 192 --seed 0 --out RUNS/ppo-0   # and 1
    flowrl run algorithms/grpo.py --plan PLAN --steps 6 --prompts-per-step 24 --seed 0 --no-save --out RUNS/overlap
    flowrl run algorithms/grpo.py --runtime ray --plan RANKS --steps 5 --prompts-per-step 24 --no-save --out RUNS/ranks

``show_tokens`` is of a shorter run of tool_use, ``--program warmup,tool_use --warmup.steps 120 --tool_use.steps 21``.
PLAN is ``algorithms/plans/disaggregated_cpu.yaml``, RANKS ``ranks_2_cpu.yaml`` beside it. ``--only show_time`` after
RUNS takes one of them.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from PIL import Image

from flowrl.show.answers import Answers
from flowrl.show.find_runs import run_id
from flowrl.show.follow_runs import Follower
from flowrl.show.server import open_server

IMAGES = Path(__file__).parent / "images"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=6000")
DARK = "--blink-settings=preferredColorScheme=0"
#: By picture: the view with its words, the run, the size of the window, and whether the screen is dark.
PICTURES = {
    "show_curves": ("curves", "ppo-0", (1360, 760), False),
    "show_tokens": ("rows?tab=tokens&order=worst", "tool_use", (1360, 600), False),
    "show_graph": ("graph", "tool_use", (1360, 800), True),
    "show_time": ("time?at={last_update}", "overlap", (1360, 900), False),
    "show_ranks": ("time?at={last_update}", "ranks", (1360, 560), False),
}


def main(runs: Path, only: str = "") -> None:
    """Write all pictures, or one of them."""
    assert CHROMIUM is not None, "Chromium takes the pictures"
    with tempfile.TemporaryDirectory() as folder:
        follower = Follower([runs], Path(folder))
        while follower.look():
            pass
        answers = Answers(follower)
        server = open_server(answers, 0)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for name, (view, run, size, dark) in PICTURES.items():
                if only not in ("", name):
                    continue
                view = view.replace("{last_update}", str(last_update(runs / run)))
                words = f"{'&' if '?' in view else '?'}run={run_id(runs / run)}"
                take(f"{server.address}#/{view}{words}", IMAGES / f"{name}.webp", size, dark=dark, folder=Path(folder))
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            follower.stop()
            answers.drawings.close()


def last_update(run: Path) -> int:
    """Where the line of the run's last update begins in its timeline, by which the page knows it."""
    path = run / "timeline.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    places = [place for place, line in enumerate(lines) if b'"actor.update"' in line]
    return sum(map(len, lines[: places[-1]])) if places else 0


def take(address: str, out: Path, size: tuple[int, int], *, dark: bool, folder: Path) -> None:
    """Write what a window of this size shows at an address."""
    shot = folder / "shot.png"
    window = [f"--window-size={size[0]},{size[1]}", f"--screenshot={shot}", f"--user-data-dir={folder / 'profile'}"]
    command = [str(CHROMIUM), *FLAGS, *([DARK] if dark else []), *window, address]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    made = io.BytesIO()
    Image.open(shot).convert("RGB").save(made, "WEBP", quality=82, method=6)
    out.write_bytes(made.getvalue())
    print(out, len(made.getvalue()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3] if sys.argv[2:3] == ["--only"] else "")

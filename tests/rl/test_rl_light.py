"""Naming the library's ops and losses loads no mathematics."""

import subprocess
import sys


def test_signatures_need_no_torch():
    code = (
        "import sys\n"
        "from flowrl import rl\n"
        "rl.ppo_clip(kl=0.1), rl.value_clip(), rl.sft(), str(rl.gae), rl.group_advantages\n"
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The process of a server of SGLang, in a Python that has it: started with JSON on its standard input.

It ends with the process that began it, and its own processes with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

LOOK = 1.0  # seconds between two looks at whether the process that began this one is there


def arguments(opened: dict[str, Any]) -> list[str]:
    """Return the arguments of SGLang's own launcher."""
    found = [
        f"--model-path={opened['folder']}",
        f"--host={opened['host']}",
        f"--port={opened['port']}",
        f"--api-key={opened['key']}",
        f"--dtype={opened['dtype']}",
        "--load-format=dummy",  # weights come with the first publish
        "--skip-tokenizer-init",
        "--enable-custom-logit-processor",
        "--disable-overlap-schedule",  # a row's tokens are known before its next one is drawn
        f"--max-running-requests={opened['rows']}",
        f"--max-total-tokens={opened['kv_tokens']}",
        "--skip-server-warmup",
        "--log-level=warning",
        "--device=cpu",
        "--attention-backend=torch_native",
        "--sampling-backend=pytorch",
        "--disable-cuda-graph",
    ]
    if opened["positions"] is not None:
        found.append(f"--context-length={opened['positions'] + 8}")  # SGLang keeps some back; the limit is the client's
    if not opened["prefix_cache"]:
        found.append("--disable-radix-cache")
    return found


def watch_parent(parent: int) -> None:
    """End this process and those that it has started soon after the one that began it, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Serve until somebody ends this process."""
    opened = json.loads(sys.stdin.readline())
    watch_parent(opened["parent"])
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(arguments(opened)))


if __name__ == "__main__":
    main()

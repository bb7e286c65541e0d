"""An event loop in a thread of its own, for the clients of packages that are called from several threads."""

from __future__ import annotations

import asyncio
import threading


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """Return a loop that runs in a thread of this name until ``loop.call_soon_threadsafe(loop.stop)``."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name=name).start()
    return loop

"""A gateway: agents that know nothing of flowrl talk to the policy as they talk to an API, and are trained by it.

docs/agents.md shows one.
"""

from __future__ import annotations

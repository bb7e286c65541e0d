"""Serves the example environment of OpenEnv, with room for many sessions; prints its address once it is there."""

from __future__ import annotations

import contextlib
import sys
import tempfile

import uvicorn
from openenv.cli.commands.init import init
from openenv.core.env_server.http_server import create_app


class Server(uvicorn.Server):
    """Tells its port."""

    async def startup(self, sockets=None):
        await super().startup(sockets=sockets)
        print(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            init("echo_env", output_dir=folder)
        sys.path.append(folder)
        from echo_env.models import EchoAction, EchoObservation
        from echo_env.server.echo_env_environment import EchoEnvironment

    app = create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=64)
    Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")).run()

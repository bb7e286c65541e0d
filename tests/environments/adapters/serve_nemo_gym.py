"""Serves a resources server of NeMo Gym, in its own Python: says where it listens, and where the rows of its example are."""

from __future__ import annotations

import importlib
import socket
import sys
from pathlib import Path

import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig

if __name__ == "__main__":
    name = sys.argv[1]
    module = importlib.import_module(f"resources_servers.{name}.app")
    kind = next(
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, SimpleResourcesServer) and found.__module__ == module.__name__
    )
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    config = kind.model_fields["config"].annotation(host="127.0.0.1", port=port, entrypoint="app.py", name=name)
    nobody = BaseServerConfig(host="127.0.0.1", port=9)  # it asks no other server
    server = kind(
        config=config, server_client=ServerClient(head_server_config=nobody, global_config_dict=DictConfig({}))
    )
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    print(f"http://127.0.0.1:{port} {Path(str(module.__file__)).parent / 'data' / 'example.jsonl'}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])

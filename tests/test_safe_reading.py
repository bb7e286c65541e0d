"""Nothing in the source reads a pickle, runs code of a model folder, or opens a port that asks nobody who is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    f for folder in ("flowrl", "algorithms", "benchmarks", "docs") for f in (ROOT / folder).rglob("*.py")
    if "peers" not in f.parts and "_build" not in f.parts
)  # fmt: skip

#: Modules whose whole purpose is what is not done here.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "joblib", "shelve", "xmlrpc", "telnetlib"}
#: Names that are not used, whatever they are taken from, and why.
NAMES = {
    "broadcast_object_list": "it unpickles what ranks send; use backends/messages.py",
    "all_gather_object": "it unpickles what ranks send; use backends/messages.py",
    "gather_object": "it unpickles what ranks send; use backends/messages.py",
    "scatter_object_list": "it unpickles what ranks send; use backends/messages.py",
    "send_object_list": "it unpickles what ranks send; use backends/messages.py",
    "recv_object_list": "it unpickles what ranks send; use backends/messages.py",
    "TCPStore": "anybody who reaches its port can write to it",
    "init_rpc": "it unpickles what ranks send",
    "unsafe_load": "it makes any object of Python",
    "full_load": "use safe_load",
    "UnsafeLoader": "it makes any object of Python",
    "FullLoader": "use safe_load",
    "read_pickle": "it is a pickle",
    "mktemp": "another user can be there first; use mkdtemp",
}
#: Calls that have to say these words.
SAY = {
    ("from_pretrained", "*"): {"trust_remote_code"},
    ("from_pretrained", "_auto(head)"): {"trust_remote_code", "use_safetensors", "weights_only"},
    ("load", "torch"): {"weights_only"},
    ("load", "np"): {"allow_pickle"},
    ("load", "numpy"): {"allow_pickle"},
}
#: What may be said only so, unless it is a name that comes from the driver.
VALUES = {"trust_remote_code": False, "weights_only": True, "allow_pickle": False, "shell": False}
#: File and what it does, and why that is right.
ALLOWED = {
    (
        "flowrl/runtime/distributed/ray/start_ranks.py",
        "cloudpickle",
    ): "Ray pickles between processes that show its token",
    ("flowrl/environments/verify/sandboxed.py", "exec"): "runs code of a model, in the sandbox that it has built",
    (
        "flowrl/environments/adapters/taskset_environment.py",
        "exec",
    ): "runs a program of the installed package verifiers, which that has as a text and not as a module",
}


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Lines, and what is wrong there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names]
            modules = [getattr(node, "module", None) or "", *(names if isinstance(node, ast.Import) else ())]
            for name in {m.partition(".")[0] for m in modules} & MODULES | {"cloudpickle"} & {*names, *modules}:
                yield node.lineno, name
            yield from ((node.lineno, name) for name in names if name in NAMES)
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in wrong_call(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tcp://"):
            yield node.lineno, "tcp://"


def wrong_call(node: ast.Call) -> Iterator[str]:
    function, owner = ast.unparse(node.func).rpartition(".")[::-2]
    said = {k.arg: k.value for k in node.keywords}
    wanted = SAY.get((function, owner)) or (SAY.get((function, "*")) if owner else None) or set()
    if None not in said:
        yield from (f"{function} without {word}" for word in wanted - set(said))
    for word, right in VALUES.items():
        value = said.get(word)
        if isinstance(value, ast.Constant) and value.value is not right:
            yield f"{word}={value.value}"
    if (
        owner == "yaml"
        and function in ("load", "load_all")
        and "Safe" not in ast.unparse(said.get("Loader", node.func))
    ):
        yield "yaml.load"
    if ast.unparse(node.func) in ("eval", "exec", "os.system", "os.popen", "marshal.load", "marshal.loads"):
        yield function
    if function == "bind" and node.args and ast.unparse(node.args[0]).startswith(("('',", "('0.0.0.0'", "('::'")):
        yield "bind to all interfaces"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_file_reads_nothing_that_can_run(file):
    name = str(file.relative_to(ROOT))
    found = [(line, what) for line, what in faults(file.read_text()) if (name, what) not in ALLOWED]
    assert not found, [f"{name}:{line}: {what}: {NAMES.get(what, '')}" for line, what in found]


WRONG = """
import pickle
from pickle import loads
import os, pickle as p
from ray import cloudpickle
torch.load(f)
torch.load(f, weights_only=False)
np.load(f)
np.load(f, allow_pickle=True)
yaml.load(f)
yaml.load(f, Loader=yaml.Loader)
yaml.unsafe_load(f)
dist.broadcast_object_list([1], 0)
from torch.distributed import all_gather_object
_torch.TCPStore(host, port)
AutoConfig.from_pretrained(name)
AutoModel.from_pretrained(name, trust_remote_code=True)
_auto(head).from_pretrained(name, trust_remote_code=x)
subprocess.run(x, shell=True)
os.system(x)
tempfile.mktemp()
eval(x)
marshal.loads(x)
held.bind(("", 0))
init_process_group(init_method="tcp://here")
"""
RIGHT = """
from safetensors.torch import load_file
torch.load(f, weights_only=True)
np.load(f, allow_pickle=False)
yaml.safe_load(f)
yaml.load(f, Loader=yaml.SafeLoader)
json.load(f)
model.eval()
platform.system()
message.system
held.bind(("127.0.0.1", 0))
AutoConfig.from_pretrained(name, trust_remote_code=trusted)
AutoConfig.from_pretrained(name, **options)
re.compile(x)
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_what_is_wrong_is_found(line):
    assert list(faults(line))


@pytest.mark.parametrize("line", RIGHT.strip().splitlines())
def test_what_is_right_is_let_be(line):
    assert not list(faults(line))

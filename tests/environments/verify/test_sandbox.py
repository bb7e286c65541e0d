"""Code from a model is run where it can do nothing: what it tries is contained, and is an outcome of its row."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from flowrl.environments import verify
from flowrl.environments.verify import sandbox
from flowrl.environments.verify.unit_tests import OUTCOMES, is_same

LIMITS = verify.Limits(cpu_seconds=1, seconds=10, memory_mb=192, file_mb=2, output_kb=16, processes=8)


def run(code, tests=("assert done",), **more):
    return verify.unit_tests(code, list(tests), limits=LIMITS, **more)


def refused(code):
    """Code that tries something, and says ``done`` where the attempt was refused."""
    lines = "\n".join("    " + line for line in code.strip().splitlines())
    return f"done = False\ntry:\n{lines}\nexcept (OSError, ValueError, ImportError, AttributeError) as error:\n    done = True\n"


# -- what passes and what does not ------------------------------------------------------------------------------------


def test_programs_functions_and_checks_pass_where_they_are_right():
    assert run("print(int(input()) + 1)", [{"input": "1\n", "output": "2"}, {"input": "9", "output": "10  \n\n"}]) == 1
    code = "class Solution:\n    def add(self, a, b):\n        return (a, [a + b])\ndef half(x): return x / 3"
    calls = [
        {"call": "add", "arguments": [1, 2], "result": (1, [3])},
        {"call": "half", "arguments": [1], "result": 0.33333333333},
    ]
    assert run(code, calls) == 1
    assert run("def f(): return 7", ["assert f() == 7", "import math\nassert math.sqrt(49) == f()"]) == 1


ENDINGS = {
    "a thread": """
import sys, threading, time
def main():
    time.sleep(0.3)
    print(int(input()) + 1)
sys.setrecursionlimit(1 << 20)
threading.stack_size(1 << 26)
threading.Thread(target=main).start()""",
    "a thread, and exit": """
import sys, threading, time
threading.Thread(target=lambda: (time.sleep(0.3), print(int(input()) + 1))).start()
sys.exit()""",
    "an executor": """
import concurrent.futures, time
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.3), print(int(input()) + 1)))""",
    "at exit": """
import atexit, io, sys
sys.stdout = io.StringIO()
atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))
print(int(input()) + 1)""",
    "at exit, and exit": """
import atexit, sys
atexit.register(lambda: print(int(input()) + 1))
sys.exit(0)""",
    "what is raised at exit": """
import atexit, sys
print(int(input()) + 1)
atexit.register(sys.exit, 3)
atexit.register(lambda: 1 / 0)""",
    "another standard output": """
import io, sys
sys.stdout = io.StringIO()
sys.__stdout__.write(str(int(input()) + 1))""",
    "a closed standard output": """
import sys
print(int(input()) + 1)
sys.stdout.close()""",
    "no standard output": """
import sys
print(int(input()) + 1)
sys.stdout = None""",
    "a file that is left open": """
import os
file = os.fdopen(1, "w")
file.write(str(int(input()) + 1))
def again(): file.write("?")""",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_ends_as_one_of_python_does(name):
    found = verify.unit_tests(ENDINGS[name], [{"input": "1", "output": "2"}])
    assert (found.outcome, found.why) == ("passed", "")


def test_a_thread_that_never_ends_is_ended_by_a_limit():
    for code, limits in (
        ("while True: pass", verify.Limits(cpu_seconds=1)),
        ("import time; time.sleep(60)", verify.Limits(seconds=1)),
    ):
        code = f"import threading\ndef main():\n    {code}\nthreading.Thread(target=main).start()\nprint(2)"
        assert verify.unit_tests(code, [{"input": "", "output": "2"}], limits=limits).outcome == "timed_out"
    daemon = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint(2)"
    assert verify.unit_tests(daemon, [{"input": "", "output": "2"}]).outcome == "passed"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("print(1)", "print(1)"),
        ("```\nfirst\n```\nand\n```python\nlast\n```", "last\n"),
        ("1. So:\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()\n"),
        ("```python\n    if x:\n\n        y()\n```", "if x:\n\n    y()\n"),
        ("```python\r\n    y()\r\n```", "y()\r\n"),
    ],
)
def test_the_code_of_a_response_is_its_last_block(response, code):
    assert verify.code_of(response) == code


def test_a_share_of_the_tests_is_the_reward_and_the_first_failure_the_outcome():
    tests = [{"input": str(i), "output": str(i % 2)} for i in range(4)]
    found = run("print(1)", tests)
    assert (float(found), found.outcome, found.passed, found.total) == (0.5, "failed", 2, 4)
    assert found.why == "it gave '1\\n', not '0'"
    assert run("print(1)", tests, partial=False) == 0
    assert found.scores == {name: float(name == "failed") for name in OUTCOMES}


def test_tests_may_be_a_column_of_json():
    tests = json.dumps([{"input": "", "output": "3"}, "assert True"])
    assert verify.unit_tests("print(3)", tests, limits=LIMITS) == 1


@pytest.mark.parametrize("tests", [[], "{}", [{"input": "1"}], [{"call": "f"}], [3]])
def test_tests_that_are_none_are_an_error_and_no_reward(tests):
    with pytest.raises(ValueError):
        verify.unit_tests("print(1)", tests)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("def f(:", "crashed"),
        ("raise ValueError('no')", "crashed"),
        ("import sys; sys.exit(3)", "crashed"),
        ("import os; os._exit(0)", "crashed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed"),
        ("def deep(): return deep()\ndeep()", "crashed"),
        ("done = False", "failed"),
        ("", "refused"),
        ("\0", "refused"),
        ("x = '\ud800'", "refused"),
        ("#" * 200_000, "refused"),
    ],
)
def test_how_code_ends_has_a_name(code, outcome):
    found = run(code)
    assert (found, found.outcome) == (0, outcome) and found.why


def test_what_is_expected_is_not_in_the_sandbox():
    spy = "import gc, os, sys\nwhole = open('/proc/self/maps').read()\nprint('x')"
    seen = (
        "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected-word' in map(str, [*o.values()])]\n"
        "def f(): return len(found)"
    )
    assert run(spy, [{"input": "", "output": "expected-word"}]).outcome == "failed"
    assert run(seen, [{"call": "f", "result": "expected-word"}]).why == "it gave 0, not 'expected-word'"
    forged = "import os\nos.write(3, b'{\"done\": true}')\nos._exit(0)"
    assert run(forged, ["assert False"]).outcome == "crashed"


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (1, True, False),
        (1, 1.0, True),
        (10**400, 1.0, False),
        ([1], (1,), True),
        ({"1": 2}, {1: 2}, True),
        ([1], 1, False),
    ],
)
def test_values_are_compared_as_json(given, expected, same):
    assert is_same(given, expected) is same


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        pytest.param("while True: pass", "timed_out", id="endless loop"),
        pytest.param("9**9**9", "timed_out", id="endless loop in C"),
        pytest.param(
            "import signal\nsignal.signal(signal.SIGXCPU, lambda *a: 0)\nwhile True: pass", "timed_out", id="deaf"
        ),
        pytest.param(
            "import os\nfor _ in range(6):\n    if not os.fork():\n        break\nwhile True: pass",
            "timed_out",
            id="several",
        ),
        pytest.param("x = []\nwhile True: x.append(bytearray(1 << 20))", "out_of_memory", id="memory bomb"),
        pytest.param("x = bytearray(1 << 40)", "out_of_memory", id="too much at once"),
        pytest.param(
            "import os, time\nos.fork(), os.fork()\nx = b'x' * (100 << 20)\ntime.sleep(9)",
            "out_of_memory",
            id="shared out",
        ),
        pytest.param("while True: print('x' * 1000)", "killed", id="endless output"),
        pytest.param("import os\nwhile True: os.write(2, b'x' * 1000)", "killed", id="endless errors"),
        pytest.param("import os\nwhile True: os.write(3, b'x' * 1000)", "killed", id="endless result"),
    ],
)
def test_limits_hold(code, outcome):
    found = run(code, ["pass", "pass", "pass"])
    assert (found, found.outcome, found.total) == (0, outcome, 3)


def test_a_sleeper_is_ended_by_the_clock():
    limits = verify.Limits(cpu_seconds=1, seconds=0.3)
    found = verify.unit_tests("import time; time.sleep(60)", ["pass"], limits=limits)
    assert (found.outcome, found.why) == ("timed_out", "it broke the limit of seconds")


def test_a_fork_bomb_has_as_many_processes_as_it_may():
    bomb = """
import os
import shutil
made = 0
while True:
    try:
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
        made += 1
    except OSError:
        break
"""
    before = len(os.listdir("/proc"))
    found = run(bomb + "while True: pass")
    assert found.outcome == "timed_out"
    assert run(bomb + "done = made < 8").outcome in ("passed", "timed_out")
    assert len([p for p in os.listdir("/proc") if p.isdigit()]) < before + 100


def test_threads_are_counted_too():
    code = refused(
        "import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(0.5,)).start()"
    )
    found = run(code.replace("except (", "except (RuntimeError, "))
    assert found.outcome == "passed"


def test_files_are_few_and_small():
    big = "import os\nwith open('/tmp/x', 'wb') as f:\n    for _ in range(100): f.write(b'x' * 100_000)"
    many = "for i in range(100): open(f'/tmp/{i}', 'wb').write(b'x' * 100_000)"
    assert run(refused(big)).outcome == run(refused(many)).outcome == "passed"
    assert run("open('/tmp/a', 'w').write('7')\ndone = open('/tmp/a').read() == '7'").outcome == "passed"


# -- escapes ----------------------------------------------------------------------------------------------------------


ESCAPES = [
    "open('/usr/flowrl-was-here', 'w')",
    "open('/flowrl-was-here', 'w')",
    "open('/etc/passwd')",
    "open('/root/.bashrc')",
    f"open({__file__!r})",
    "import os; os.symlink('/', '/tmp/all'); open('/tmp/all/etc/passwd')",
    "import os; os.symlink('/proc/1/root/etc/passwd', '/tmp/x'); open('/tmp/x')",
    "open('/proc/1/root/etc/passwd')",
    "open('/proc/1/mem', 'rb').read(1)",
    "open('/proc/1/environ', 'rb').read()",
    "import os; os.listdir('/proc/1/fd')",
    "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "open('/proc/sys/user/max_user_namespaces', 'w').write('9')",
    "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "import os; os.chroot('/tmp')",
    "import os; os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0)); open('/tmp/sda', 'rb')",
    "import os; os.setuid(0)",
    "import os; os.kill(1, 9); raise OSError('it is there')",
    "open('/dev/kmsg')",
    "import os; [os.fstat(fd) for fd in range(4, 64)]",
    "import socket; socket.create_connection(('127.0.0.1', 80), timeout=1)",
    "import socket; socket.create_connection(('8.8.8.8', 53), timeout=1)",
    "import socket; socket.getaddrinfo('example.com', 80)",
    "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
]


def test_escapes_are_refused():
    found = run("pass", [refused(code) + f"assert done, {code!r}" for code in ESCAPES])
    assert found == 1, (found.passed, found.why)


CALLS = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
def refuses(name, *given):
    return getattr(libc, name)(*given) == -1 and ctypes.get_errno() in (1, 22)
"""
REACH_OUT = [
    "refuses('ptrace', 0, 0, 0, 0)",
    "refuses('ptrace', 16, 1, 0, 0)",
    "refuses('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "refuses('mount', b'none', b'/', b'', 32 | 4096, None)",
    "refuses('umount2', b'/tmp', 2)",
    "all(refuses('unshare', flag) for flag in (0x10000000, 0x20000, 0x40000000))",
    "refuses('setns', 0, 0)",
    "refuses('process_vm_readv', 1, None, 0, None, 0, 0)",
    "libc.syscall(425, 4, None) == -1 and ctypes.get_errno() == 1",
    "refuses('pivot_root', b'/tmp', b'/tmp')",
    "refuses('sethostname', b'x', 1)",
]


def test_system_calls_that_reach_out_are_refused():
    found = run(CALLS, [f"assert {call}, {call!r}" for call in REACH_OUT])
    assert found == 1, found.why


def test_nobody_outside_is_seen_or_told_anything():
    code = """
import os, signal
seen = sorted(int(name) for name in os.listdir('/proc') if name.isdigit())
try:
    os.kill(os.getppid(), signal.SIGKILL)
except OSError:
    pass
for pid in range(2, 3000):
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
done = seen == [1, os.getpid()] and os.getppid() == 1
"""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert run(code, ["assert done", "assert done"]) == 1  # the second one too: who watches is there
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_server_of_this_machine_is_not_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (
            run(refused(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)")).outcome
            == "passed"
        )


def test_secrets_of_the_environment_are_not_there(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert run("import os\ndone = 'SECRET_TOKEN' not in os.environ").outcome == "passed"


def test_what_a_test_leaves_running_ends_with_it(tmp_path):
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\ndone = True"
    began = time.monotonic()
    assert run(code) == 1 and time.monotonic() - began < LIMITS.seconds


# -- the sandbox itself -----------------------------------------------------------------------------------------------


def test_a_sandbox_that_fails_is_no_reward(monkeypatch):
    from flowrl.environments.verify import sandbox

    monkeypatch.setattr(sandbox, "_shown", lambda packages: (["/usr/bin"], ["/nowhere"]))
    with pytest.raises(verify.VerifierFailed):
        monkeypatch.setattr(sandbox, "_PROGRAM", Path("/nowhere.py"))
        run("done = True")
    monkeypatch.setattr(sandbox.platform, "system", lambda: "Darwin")
    with pytest.raises(verify.VerifierFailed, match="there is no sandbox on Darwin"):
        run("done = True")


def test_a_sandbox_that_dies_midway_is_no_reward(monkeypatch):
    from flowrl.environments.verify.sandbox import Sandbox

    def killed(self, seconds, receive=Sandbox.receive):
        if seconds != 30.0:
            threading.Timer(0.2, self._process.kill).start()
        return receive(self, seconds)

    monkeypatch.setattr(Sandbox, "receive", killed)
    with pytest.raises(verify.VerifierFailed, match="the sandbox has ended"):
        run("import time; time.sleep(5)")


def test_limits_are_numbers_above_0():
    for wrong in ({"seconds": 0}, {"cpu_seconds": 0.5}, {"memory_mb": True}):
        with pytest.raises(ValueError):
            verify.Limits(**wrong)


def test_packages_are_there_where_they_are_asked_for():
    assert run("import numpy").outcome == "crashed"
    limits = verify.Limits(memory_mb=1024)
    assert (
        verify.unit_tests(
            "import numpy\ndone = numpy.ones(3).sum() == 3", ["assert done"], limits=limits, packages=True
        )
        == 1
    )


def test_packages_may_lie_below_tmp(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("site")
    folder.chmod(0o755)
    (folder / "mine.py").write_text("three = 3")
    shown, path = sandbox._shown(False)
    wider = [*shown, str(folder)], [*path, str(folder)]
    monkeypatch.setattr(sandbox, "_shown", lambda packages: wider)
    code = f"import mine\nopen('/tmp/own', 'w').write('x')\ntry:\n    open('{folder}/new', 'w')\nexcept OSError:\n    print(mine.three)"
    assert run(code, [{"input": "", "output": "3"}]) == 1
    assert [file.name for file in folder.iterdir() if file.suffix != ".pyc" and file.name != "__pycache__"] == [
        "mine.py"
    ]


def test_an_ordinary_user_has_it_too():
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or not os.path.exists(python) or subprocess.check_output([python, "-V"]) < b"Python 3.11":
        pytest.skip("it takes root, to become somebody else, and a Python of 3.11 that everybody may run")
    package = Path(verify.__file__).parents[3]
    code = (
        "import os\nfrom flowrl.environments import verify\nassert os.geteuid() == 4321\n"
        f"limits = verify.Limits(**{vars(LIMITS)})\n"
        "bomb = 'import os\\nfor _ in range(20):\\n    if not os.fork():\\n        os._exit(0)'\n"
        "found = [verify.unit_tests(code, ['assert done'], limits=limits) for code in ('done = True', 'open(\"/usr/x\", \"w\")', bomb)]\n"
        "print([each.outcome for each in found], found[1].why, found[2].why)"
    )
    with tempfile.TemporaryDirectory() as folder:  # not below pytest's own, which each start of pytest closes to others
        os.chmod(folder, 0o755)
        shutil.copytree(package / "flowrl", Path(folder) / "flowrl")
        ran = subprocess.run(
            [python, "-B", "-c", code],
            user=4321,
            group=4321,
            extra_groups=[],
            cwd=folder,
            env={},
            capture_output=True,
            text=True,
        )
    assert ran.stdout.startswith("['passed', 'crashed', 'crashed'] OSError: [Errno 30] Read-only file system"), (
        ran.stderr
    )
    assert "BlockingIOError" in ran.stdout

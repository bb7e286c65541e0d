"""Commands of a shell that nobody trusts: they are contained, end in a way that has a name, and share their files."""

from __future__ import annotations

import os
import socket

import pytest

from flowrl.environments.verify import Limits, VerifierFailed, run_command
from flowrl.environments.verify.commands import files_below, text_of

LIMITS = Limits(cpu_seconds=1, seconds=60, memory_mb=192, file_mb=2, output_kb=16, processes=8)


def run(command, files=(), **more):
    return run_command(command, list(files), places=["/app"], **{"cwd": "/app", "limits": LIMITS, **more})


def test_files_stay_and_processes_do_not():
    first = run(
        "mkdir -p d/e; echo 3 > d/e/f; ln -s /etc/passwd l; chmod 700 d/e/f; mkfifo p; sleep 600 & echo $!; exit 4"
    )
    assert (first.end, first.status, first.output) == ("done", 4, f"{first.output.strip()}\n")
    assert [entry["path"] for entry in first.files] == ["/app/d", "/app/l", "/app/d/e", "/app/d/e/f"]
    then = run(f"cat d/e/f; stat -c %a d/e/f; readlink l; kill -0 {first.output.strip()}; echo 4 >> d/e/f", first.files)
    assert then.output.startswith("3\n700\n/etc/passwd\n") and "No such process" in then.output
    assert text_of(then.files, "/app/d/e/f") == "3\n4\n" and text_of(first.files, "/app/d/e/f") == "3\n"
    assert text_of(then.files, "/app/l") is None


def test_odd_names_and_bytes_go_in_and_come_out():
    first = run(r"printf '\xff\x00\x01' > $'a\xff b'; echo x > ' '; echo y > '$(id)'")
    then = run(r"od -An -tx1 $'a\xff b'; cat ' ' '$(id)'; ls -A | wc -l", first.files)
    assert then.output == " ff 00 01\nx\ny\n3\n"


def test_variables_and_folder_are_those_that_are_given():
    found = run("pwd; echo $A; env | cut -d= -f1 | sort | tr '\\n' ' '", env={"A": "b c", "HOME": "/app"})
    assert found.output.startswith("/app\nb c\nA HOME LANG ")
    assert run("pwd", cwd="/app/gone").output == "/tmp\n"


def test_files_of_a_folder_are_laid_out(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.sh").write_text("echo hello")
    (tmp_path / "sub" / "a.sh").chmod(0o755)
    os.symlink("/etc/passwd", tmp_path / "link")
    found = run("sub/a.sh; cat link; echo x > sub/b; rm sub/a.sh", files_below(tmp_path, "/app"))
    assert found.output.startswith("hello\n") and "No such file" in found.output
    assert {entry["path"] for entry in found.files} == {"/app/link", "/app/sub", "/app/sub/b"}
    assert (tmp_path / "sub" / "a.sh").exists() and not (tmp_path / "sub" / "b").exists()


def test_files_that_cannot_be_laid_out_are_no_matter_of_the_command():
    with pytest.raises(VerifierFailed, match="its files cannot be laid out"):
        run("true", [{"path": "/usr/x", "mode": 0o644, "data": ""}])
    assert run("echo \0").status == 126


@pytest.mark.parametrize(
    ("command", "end", "why"),
    [
        pytest.param("while :; do :; done", "timed_out", "cpu_seconds", id="endless loop"),
        pytest.param("trap '' XCPU TERM; while :; do :; done", "timed_out", "cpu_seconds", id="deaf"),
        pytest.param("yes", "killed", "output", id="endless output"),
        pytest.param("yes >&2", "killed", "output", id="endless errors"),
        pytest.param("for i in {1..9}; do truncate -s 1900k $i; done", "killed", "files", id="files with holes"),
        pytest.param(
            "python3 -c 'import os\nfor i in range(300): os.mkdir(15 * \"x\"), os.chdir(15 * \"x\")'",
            "killed", "files", id="deep folders",
        ),
        pytest.param(
            "for i in 1 2 3; do python3 -c 'import time; x = b\"x\" * (90 << 20); time.sleep(50)' & done; wait",
            "out_of_memory", "memory", id="memory shared out",
        ),
    ],
)  # fmt: skip
def test_limits_hold_and_have_names(command, end, why):
    found = run("echo kept > kept", [])
    broke = run(command, found.files)
    assert broke.end == end and broke.why in (
        f"it broke the limit of {why}",
        "it broke the limit of seconds" * (end == "timed_out"),
    )
    assert text_of(broke.files, "/app/kept") == "kept\n", "what was there before is there"


def test_a_sleeper_is_ended_by_the_clock():
    found = run("echo begun; sleep 600", limits=Limits(cpu_seconds=1, seconds=0.5))
    assert (found.end, found.output, found.why) == ("timed_out", "begun\n", "it broke the limit of seconds")


def test_a_fork_bomb_has_as_many_processes_as_it_may():
    found = run(":(){ :|:& };: 2>/dev/null; wait", limits=Limits(1, 3.0, 192, 2, 16, 8))
    assert found.end in ("timed_out", "killed", "done")
    count = run(
        "for i in {1..20}; do sleep 5 & done 2>/dev/null; ls -d /proc/[0-9]* | wc -l",
        limits=Limits(1, 4.0, 192, 2, 16, 8),
    )
    assert count.end in ("timed_out", "done") and (not count.output.strip().isdigit() or int(count.output) <= 10)


def test_one_process_has_the_memory_that_it_may():
    assert "MemoryError" in run("python3 -c 'bytearray(10**9)'").output


def test_files_are_few_and_small():
    found = run("head -c 9m /dev/zero > big; stat -c %s big; for i in {1..30}; do head -c 1m /dev/zero > $i; done")
    assert "No space left" in found.output or "File size limit" in found.output
    assert sum(len(entry.get("data", "")) for entry in found.files) <= 3 << 20
    many = run(
        "i=0; while : $((i++)); do echo > $i || break; done 2>&1 | tail -1", limits=Limits(9, 30.0, 192, 2, 16, 8)
    )
    assert "No space left" in many.output


ESCAPES = [
    "echo > /usr/flowrl-was-here",
    "echo > /flowrl-was-here",
    "cat /etc/passwd",
    "ls /root/.bashrc",
    "ln -s / all && cat all/etc/passwd",
    "ln -s /proc/1/root x && cat x/etc/passwd",
    "cat /proc/1/environ",
    "ls /proc/1/fd",
    "head -c1 /proc/1/mem",
    "echo x > /proc/sys/kernel/hostname",
    "echo -1000 > /proc/self/oom_score_adj",
    "kill -9 1",
    "mknod sda b 8 0",
    "mount -t tmpfs none /tmp",
    "umount /app",
    "unshare -r id",
    "chroot /tmp",
    "su",
    "sudo id",
    "chown 0 .",
    "cp /bin/bash b && chmod u+s b && ./b -pc '[ $EUID = 0 ]'",
    "cat /dev/kmsg",
    "dd if=/dev/sda count=1",
    "exec 9<>/dev/tcp/127.0.0.1/80",
    "exec 9<>/dev/udp/8.8.8.8/53",
    "true >&3",
    "true >&5",
    "strace -p 1",
    "python3 -c 'import ctypes; l = ctypes.CDLL(None, use_errno=True); raise SystemExit(l.ptrace(16, 1, 0, 0) == -1)'",
    "python3 -c 'import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)'",
    "ulimit -u 1000",
    "ulimit -v unlimited",
]


def test_escapes_are_refused():
    lines = "\n".join(f"({command}) >/dev/null 2>&1 && echo {i}" for i, command in enumerate(ESCAPES))
    found = run(lines + "\necho over", limits=Limits(20, 60.0, 512, 4, 16, 16))
    assert found.output == "over\n", [ESCAPES[int(i)] for i in found.output.split()[:-1]]


def test_a_command_that_ends_all_that_it_can_ends_itself():
    found = run("sleep 9 & (kill -9 -1); echo alive")
    assert (found.end, found.status, found.output) == ("done", 137, "")


def test_a_server_of_this_machine_is_not_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run(f"exec 9<>/dev/tcp/127.0.0.1/{port}").status != 0


def test_nobody_outside_is_seen_and_no_secret_is_there(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert run("ls -d /proc/[0-9]* | wc -l; env | grep -c SECRET; hostname").output.startswith(
        ("3\n0\n", "4\n0\n", "2\n0\n")
    )


def test_what_is_left_behind_leads_nowhere():
    """A link that one command leaves is not followed when files are laid out for the next one."""
    left = run("ln -s /usr d; ln -s /etc/shadow f; echo x > g")
    assert [entry["path"] for entry in left.files] == ["/app/d", "/app/f", "/app/g"]
    forged = [*left.files, {"path": "/app/d/x", "mode": 0o644, "data": ""}]
    with pytest.raises(VerifierFailed, match="cannot be laid out"):
        run("true", forged)

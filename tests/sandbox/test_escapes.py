"""Attacks on the sandbox, each really attempted behind every combination of walls that calls itself full, and, where it
is harmless, without walls. There it must succeed; otherwise its failure behind walls would prove nothing."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from walled import FULL, LIMITS, attack, bystander, opened, outside, without_walls

from pvg.sandbox.sandbox import Limits, Program, Sandbox, probe

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"), pytest.mark.slow]


@pytest.fixture(scope="module", params=list(FULL))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    found = opened(request.param)
    if found is None:
        pytest.skip("needs a kernel with these walls; pvg was seen to refuse without them")
    with found:
        yield found


@pytest.fixture(scope="module")
def control() -> Iterator[Sandbox]:
    with without_walls() as found:
        yield found


@pytest.fixture
def namespaces() -> None:
    """Without them, no program may start a process."""
    if "namespaces" not in probe().walls:
        pytest.skip("needs user namespaces")


# --- limits -----------------------------------------------------------------------------------------------------------

FORK_BOMB = """
import os, time
def attack(most):
    for count in range(most):
        try:
            pid = os.fork()
        except OSError:
            return count
        if pid == 0:
            time.sleep(600)
            os._exit(0)
    return most
"""


def test_no_process_is_started_unless_it_was_asked_for(sandbox: Sandbox) -> None:
    assert attack(sandbox, FORK_BOMB, 60).value == 0


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("kind", ["all walls", "no landlock"])
def test_a_fork_bomb_ends_at_the_limit_and_leaves_nobody(kind: str) -> None:
    box = opened(kind)
    if box is None:
        return
    with box:
        few, many = (
            box.run(Program.of_function(FORK_BOMB, "attack", [[60]]), Limits(cpu_s=3.0, processes=count))
            for count in (4, 100)
        )
        assert 0 < few.cases[0].value < 60
        assert many.cases[0].value == 60  # the bomb is live: only the limit stopped it
        # Children that sleep for ten minutes hold the outputs open: that it ended "ok" says that they are dead.
        assert few.status == many.status == "ok"


THREADS = """
import threading, time
def attack(most):
    threading.stack_size(32768)
    started = 0
    try:
        for _ in range(most):
            threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
            started += 1
    except RuntimeError:
        return started
    time.sleep(3)
    return started
"""


def test_threads_are_few(sandbox: Sandbox) -> None:
    bomb = sandbox.run(Program.of_function(THREADS, "attack", [[200]]))
    if "namespaces" in sandbox.isolation.walls:
        assert bomb.cases[0].value <= 16
    else:
        assert (bomb.status, bomb.cases[0].error) == ("threads", "it started too many threads")
    assert attack(sandbox, THREADS.replace("time.sleep(3)", ""), 10).value == 10


MEMORY_BOMB = (
    "def attack(mb):\n    held = []\n    for _ in range(mb):\n        held.append(bytearray(2**20))\n    return mb\n"
)


def test_a_memory_bomb_ends_at_the_limit(sandbox: Sandbox) -> None:
    assert attack(sandbox, MEMORY_BOMB, 200, limits=Limits(memory_mb=64)).error.startswith("MemoryError")
    assert attack(sandbox, MEMORY_BOMB, 200, limits=Limits(memory_mb=512)).value == 200
    outside = Program(MEMORY_BOMB + "attack(200)\n", "attack", ("[1]",))
    assert sandbox.run(outside, Limits(memory_mb=64)).status == "memory"


@pytest.mark.parametrize("stream", [1, 2, 3])
def test_endless_output_ends_at_the_limit(sandbox: Sandbox, stream: int) -> None:
    """3 is where results are reported: a program may write there, and gains nothing."""
    endless = f"import os\ndef attack(most):\n    for _ in range(most):\n        os.write({stream}, b'x' * 1000)\n"
    program = Program.of_function(endless, "attack", [[10**9]])
    assert sandbox.run(program, Limits(output_kb=64)).status == "output"
    small = sandbox.run(Program.of_function(endless, "attack", [[10]]), Limits(output_kb=64))
    assert small.status == "ok"
    assert len(small.stdout) <= 10_000


def test_endless_loops_and_waiting_end_at_their_limits(sandbox: Sandbox) -> None:
    loop = sandbox.run(Program("while True: pass", None, ("",)), Limits(cpu_s=0.2))
    assert (loop.status, loop.cases[0].error) == ("timeout", "its CPU time was used up")
    wait = sandbox.run(Program("import time; time.sleep(1000)", None, ("",)), Limits(wall_s=0.3))
    assert wait.status == "stalled"


def test_a_program_cannot_raise_its_limits(sandbox: Sandbox) -> None:
    source = """
import resource
def attack():
    raised = []
    for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"):
        which = getattr(resource, name)
        soft, hard = resource.getrlimit(which)
        try:
            resource.setrlimit(which, (hard + 1, hard + 1))
        except (OSError, ValueError):
            continue
        raised.append(name)
    return raised
"""
    assert attack(sandbox, source).value == []


FILL = """
def attack(files, kb):
    for number in range(files):
        with open(f"file-{number}", "wb") as file:
            file.write(bytes(kb * 1024))
    return files
"""


def test_files_fill_the_scratch_folder_and_no_disk(sandbox: Sandbox) -> None:
    assert (
        "OSError" in attack(sandbox, FILL, 1000, 100).error
        or "PermissionError" in attack(sandbox, FILL, 1000, 100).error
    )
    assert "Error" in attack(sandbox, FILL, 1, 2000).error  # one file that is larger than the folder
    if "namespaces" in sandbox.isolation.walls:
        assert attack(sandbox, FILL, 5, 100).value == 5


# --- files ------------------------------------------------------------------------------------------------------------

READ = """
import os
def attack(secret, folder):
    found = []
    depth = "../" * 20
    ways = {
        "plain": secret,
        "upwards": depth + secret,
        "by proc": "/proc/self/root" + secret,
        "by init": "/proc/1/root" + secret,
        "by parent": "/proc/%d/cwd/" % os.getppid() + depth + secret,
    }
    for way, path in ways.items():
        try:
            if "secret" in open(path).read():
                found.append(way)
        except OSError:
            pass
    for number in range(200):  # a folder that was never closed
        try:
            if "secret" in os.fdopen(os.open(secret.lstrip("/"), os.O_RDONLY, dir_fd=number)).read():
                found.append("descriptor %d" % number)
        except OSError:
            pass
    for place in (".", folder):
        for make in (os.symlink, os.link):
            try:
                make(secret, place + "/" + make.__name__)
                if "secret" in open(place + "/" + make.__name__).read():
                    found.append(make.__name__)
            except OSError:
                pass
    return sorted(set(found))
"""


def test_files_outside_cannot_be_read(sandbox: Sandbox, control: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    assert {"plain", "upwards", "by proc", "symlink", "link"} <= set(
        attack(control, READ, str(secret), str(tmp_path)).value
    )
    assert attack(sandbox, READ, str(secret), str(tmp_path)).value == []


WRITE = """
import os
def attack(folder, theirs):
    done = []
    for way, act in {
        "create": lambda: open(folder + "/new", "w").close(),
        "append": lambda: open(theirs, "a").write("mine"),
        "truncate": lambda: os.truncate(theirs, 0),
        "mode": lambda: os.chmod(theirs, 0o777),
        "folder": lambda: os.mkdir(folder + "/folder"),
        "fifo": lambda: os.mkfifo(folder + "/fifo"),
        "rename": lambda: os.rename(theirs, folder + "/renamed"),
        "library": lambda: open(os.__file__ + ".new", "w").close(),
        "source": lambda: open(os.__file__, "a").close(),
    }.items():
        try:
            act()
            done.append(way)
        except OSError:
            pass
    return done
"""


def test_files_outside_cannot_be_written(sandbox: Sandbox, control: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    theirs = tmp_path / "theirs"

    def tried(box: Sandbox) -> tuple[list[str], str | None]:
        theirs.write_text("theirs")
        theirs.chmod(0o666)
        (tmp_path / "renamed").unlink(missing_ok=True)
        done = attack(box, WRITE, str(tmp_path), str(theirs)).value
        return done, theirs.read_text() if theirs.exists() else None

    assert tried(sandbox) == ([], "theirs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
    harmless = WRITE.replace('"library"', "#").replace('"source"', "#").replace('"fifo"', "#")
    # The control has no leave to write files at all (RLIMIT_FSIZE), but to make, move and cut them.
    theirs.write_text("theirs")
    done = attack(control, harmless, str(tmp_path), str(theirs)).value
    assert {"create", "truncate", "folder", "rename"} <= set(done)


def test_the_programs_before_leave_nothing(sandbox: Sandbox) -> None:
    leave = "import builtins\ndef attack():\n    builtins.len = lambda x: 7\n    open('left', 'w').write('left')\n"
    attack(sandbox, leave)
    look = "import os\ndef attack():\n    return [len([]), os.path.exists('left')]\n"
    assert attack(sandbox, look).value == [0, False]


def test_other_peoples_packages_are_hidden(sandbox: Sandbox) -> None:
    """Among them pvg, whose templates hold the references of the problems that it makes."""
    source = """
import importlib, os, sys
def attack(place):
    found = []
    for name in ("pvg", "numpy", "pip"):
        try:
            importlib.import_module(name)
            found.append(name)
        except ImportError:
            pass
    for folder in (place, os.path.dirname(os.__file__) + "/site-packages"):
        try:
            found += os.listdir(folder)
        except OSError:
            pass
    return found
"""
    import pvg

    assert attack(sandbox, source, str(Path(pvg.__file__).parent)).value == []


# --- the network, other processes, the environment --------------------------------------------------------------------

CONNECT = """
import socket
def attack(port, name):
    reached = []
    for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, "\\0" + name)):
        try:
            with socket.socket(family) as found:
                found.connect(address)
                reached.append(family.name)
        except OSError:
            pass
    for family, kind in ((socket.AF_INET, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW)):
        try:
            socket.socket(family, kind, 1).close()
            reached.append("raw")
        except OSError:
            pass
    return reached
"""


def test_the_network_cannot_be_reached(sandbox: Sandbox, control: Sandbox) -> None:
    name = f"pvg-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + name)
        unix.listen()
        port = tcp.getsockname()[1]
        assert attack(control, CONNECT, port, name).value == ["AF_INET", "AF_UNIX"]
        assert attack(sandbox, CONNECT, port, name).value == []


SIGNAL = "import os\ndef attack(pid, number):\n    os.kill(pid, number)\n    return 'sent'\n"


def test_other_processes_cannot_be_signalled(sandbox: Sandbox, control: Sandbox) -> None:
    with bystander() as other:
        for pid in (other.pid, os.getpid(), 1, -other.pid):
            assert attack(sandbox, SIGNAL, pid, 0).value is None or pid == 1  # 1 may be the program itself
        assert attack(sandbox, SIGNAL, other.pid, 9).value is None
        own = "import os\ndef attack():\n    if os.getpid() == 1:\n        os.kill(-1, 9)\n    return 'alone'\n"
        assert attack(sandbox, own).value in (None, "alone")
        assert other.poll() is None
        assert attack(control, SIGNAL, other.pid, 9).value == "sent"
        assert other.wait(30) == -9


BY_FILE = """
import fcntl, os
def attack(pid):
    reading, writing = os.pipe()
    fcntl.fcntl(reading, 10, 9)  # F_SETSIG, SIGKILL
    fcntl.fcntl(reading, fcntl.F_SETOWN, pid)
    fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_NONBLOCK | 0o20000)  # O_ASYNC
    os.write(writing, b"x")
    return "sent"
"""


def test_the_kernel_signals_nobody_for_a_program(sandbox: Sandbox, control: Sandbox) -> None:
    """Nor where the system call filter stands alone: Landlock before version 6 lets signals pass."""
    with bystander() as other:
        assert attack(sandbox, BY_FILE, other.pid).value is None
        with Sandbox("reduced", LIMITS, workers=1, mechanisms={"seccomp"}) as alone:
            if "seccomp" in alone.isolation.walls:
                assert attack(alone, BY_FILE, other.pid).value is None
                assert "have_a_process_signalled" not in alone.isolation.open_
        assert other.poll() is None
        assert attack(control, BY_FILE, other.pid).value == "sent"
        assert other.wait(30) == -9
        assert "have_a_process_signalled" in control.isolation.open_


PTRACE = """
import ctypes, os
def attack(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(16, pid, None, None) == 0:  # PTRACE_ATTACH
        os.waitpid(pid, 0x40000000)  # __WALL
        libc.ptrace(17, pid, None, None)
        return "attached"
    try:
        with open("/proc/%d/mem" % pid, "rb"):
            return "opened"
    except OSError:
        return ""
"""


def ptrace_is_restricted() -> bool:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return scope.exists() and scope.read_text().strip() != "0"


def test_other_processes_cannot_be_traced(sandbox: Sandbox) -> None:
    with bystander() as other:
        assert attack(sandbox, PTRACE, other.pid).value == ""
        if not ptrace_is_restricted():
            assert outside(PTRACE, other.pid) == "attached"


ENVIRONMENT = """
import os
def attack(pid):
    found = [" ".join(os.environ)]
    for who in ("self", "1", str(pid), str(os.getppid())):
        try:
            found.append(open("/proc/%s/environ" % who, "rb").read().decode())
        except OSError:
            pass
    return " ".join(found)
"""


def test_no_environment_can_be_read(sandbox: Sandbox) -> None:
    with bystander(PVG_TEST_SECRET="secret") as other:
        assert "PVG_TEST_SECRET" in outside(ENVIRONMENT, other.pid)
        assert "PVG_TEST_SECRET" not in attack(sandbox, ENVIRONMENT, other.pid).value
        names = set(attack(sandbox, ENVIRONMENT, other.pid).value.split())
        assert names <= {"PYTHONHASHSEED", "LC_CTYPE"}


DAEMON = """
import os, time
def attack(seconds):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(seconds)  # its outputs stay open as long as it lives
        os._exit(0)
    os.wait()
    return "gone"
"""


@pytest.mark.usefixtures("namespaces")
def test_a_daemon_dies_with_its_program(control: Sandbox) -> None:
    """It holds the outputs open: an end before the wall clock's limit says that it is dead."""
    limits = Limits(cpu_s=3.0, wall_s=2.0, processes=4)
    left = control.run(Program.of_function(DAEMON, "attack", [[5]]), limits)
    assert (left.status, left.cases[0].value) == ("stalled", "gone")
    for kind in ("all walls", "no landlock"):
        if (box := opened(kind)) is not None:
            with box:
                ended = box.run(Program.of_function(DAEMON, "attack", [[600]]), Limits(wall_s=30.0, processes=4))
            assert (ended.status, ended.cases[0].value) == ("ok", "gone")


# --- the walls themselves ---------------------------------------------------------------------------------------------

CALLS = """
import ctypes, errno, platform
NUMBERS = {
    "x86_64": dict(execve=59, ptrace=101, mount=165, unshare=272, setns=308, chroot=161, memfd_create=319, bpf=321,
                   perf_event_open=298, keyctl=250, io_uring_setup=425, process_vm_readv=310, userfaultfd=323,
                   open_by_handle_at=304, kexec_load=246, init_module=175, pidfd_open=434, pidfd_getfd=438, symlink=88,
                   shmget=29, setuid=105, personality=135, open_tree=428, mknod=133, inotify_init=253, clone3=435),
    "aarch64": dict(execve=221, ptrace=117, mount=40, unshare=97, setns=268, chroot=51, memfd_create=279, bpf=280,
                    perf_event_open=241, keyctl=219, io_uring_setup=425, process_vm_readv=270, userfaultfd=282,
                    open_by_handle_at=265, kexec_load=104, init_module=105, pidfd_open=434, pidfd_getfd=438,
                    symlinkat=36, shmget=194, setuid=146, personality=92, open_tree=428, mknodat=33,
                    inotify_init1=26, clone3=435),
}
def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    answers = {}
    for name, number in NUMBERS[platform.machine()].items():
        ctypes.set_errno(0)
        result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
        answers[name] = errno.errorcode.get(ctypes.get_errno(), "none") if result == -1 else "done"
    return sorted(set(answers.values()) - {"EPERM"} - ({"ENOSYS"} if answers["clone3"] == "ENOSYS" else set()))
"""


def test_system_calls_that_programs_do_not_need_are_denied(sandbox: Sandbox, control: Sandbox) -> None:
    assert attack(sandbox, CALLS).value == []
    assert "EFAULT" in attack(control, CALLS.replace("execve=59, ", "").replace("setuid=105, ", "")).value


def test_calls_of_another_kind_of_machine_end_the_program(sandbox: Sandbox) -> None:
    if os.uname().machine != "x86_64":
        return
    x32 = "import ctypes\ndef attack():\n    return ctypes.CDLL(None).syscall(0x40000000 | 39)\n"
    assert sandbox.run(Program.of_function(x32, "attack", [[]])).status == "killed"


def test_privileges_are_gone(sandbox: Sandbox) -> None:
    source = """
import ctypes, os
def attack():
    gained = []
    for name, act in {
        "root": lambda: os.setuid(0),
        "chroot": lambda: os.chroot("."),
        "exec": lambda: os.execv("/bin/true", ["true"]),
        "device": lambda: os.mknod("device", 0o20666, os.makedev(1, 3)),
        "nice": lambda: os.nice(-5),
        "time": lambda: __import__("time").clock_settime(0, 0),
    }.items():
        try:
            act()
            gained.append(name)
        except OSError:
            pass
    return gained
"""
    assert attack(sandbox, source).value == []


def test_crashes_and_early_exits_are_no_answers(sandbox: Sandbox) -> None:
    crash = (
        "import ctypes\ndef attack(way):\n    if way:\n        ctypes.string_at(0)\n    import os\n    os._exit(0)\n"
    )
    for way in (1, 0):
        ended = sandbox.run(Program.of_function(crash, "attack", [[way]]))
        assert ended.cases[0].value is None
        assert ended.cases[0].error
    endless = Program("import sys\nsys.setrecursionlimit(10**8)\ndef f(): return f()\nf()", None, ("",))
    deep = sandbox.run(endless, Limits(memory_mb=16))
    assert deep.cases[0].error
    assert attack(sandbox, "def attack():\n    return 'well'\n").value == "well"  # and the sandbox is


def test_no_exit_code_speaks_for_pvg(sandbox: Sandbox) -> None:
    for code in (1, 7, 80, 81, 84, 255):  # 81 once said that the walls do not stand, which ends the run
        ended = sandbox.run(Program(f"import os\nos._exit({code})", None, ("",)))
        assert (ended.status, ended.exit) == ("killed", code)


def test_whoever_closes_its_outputs_is_watched_all_the_same(sandbox: Sandbox) -> None:
    closed = "import os\nos.closerange(0, 64)\n"
    assert sandbox.run(Program(closed + "while True: pass", None, ("",)), Limits(cpu_s=0.2)).status == "timeout"
    waits = Program(closed + "import time\ntime.sleep(600)", None, ("",))
    assert sandbox.run(waits, Limits(wall_s=0.3)).status == "stalled"


@pytest.mark.usefixtures("namespaces")
def test_namespaces_alone_keep_most_of_it(tmp_path: Path) -> None:
    """The second line where the first, the system call filter, would have a hole."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tmp_path.chmod(0o777)
    with (
        Sandbox("reduced", LIMITS, workers=1, mechanisms={"namespaces"}) as box,
        bystander(PVG_TEST_SECRET="secret") as other,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        assert attack(box, READ, str(secret), str(tmp_path)).value == []
        assert attack(box, WRITE, str(tmp_path), str(secret)).value == []
        assert attack(box, CONNECT, server.getsockname()[1], "nobody").value == []
        assert attack(box, SIGNAL, other.pid, 9).value is None
        assert attack(box, PTRACE, other.pid).value == ""
        assert "PVG_TEST_SECRET" not in attack(box, ENVIRONMENT, other.pid).value
        assert other.poll() is None
    assert secret.read_text() == "secret"


KERNEL = """
import ctypes, os
def works(act):
    child = os.fork()
    if child == 0:
        os._exit(0 if act() >= 0 else 1)
    return os.waitpid(child, 0)[1] == 0
def attack():
    libc = ctypes.CDLL(None)
    found = []
    if works(lambda: libc.unshare(0x10000000 | 0x20000 | 0x40000000 | 0x20000000)):  # user, mount, net, pid
        found.append("namespaces")
    if libc.syscall(444, None, ctypes.c_size_t(0), 1) >= 3:
        found.append("landlock")
    if os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        found.append("seccomp")
    return found
"""


def test_what_the_kernel_has_is_used_and_holds() -> None:
    """Otherwise a wall that broke would be a wall that is not there, and all tests above would see the refusal."""
    there = set(outside(KERNEL))
    # A mount may be refused where a namespace is given (AppArmor): then the sandbox must say so.
    assert probe().walls | set(probe().refused) >= there
    assert probe().walls >= there - {"namespaces"}
    for kind, mechanisms in FULL.items():
        found = probe(mechanisms)
        if found.walls == mechanisms:
            assert found.complaints == [], kind

"""Hostile programs, made at random from a seed. Each kind tries one way, with numbers and places of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Targets:
    """What programs go for on this machine. folder: all may write there; secret: a file in it, with a text.

    port: where a server listens on 127.0.0.1; socket: name of an abstract unix socket. victim: process id of one that
    runs as the same user. word: stands in the command lines of all that a program starts.
    """

    folder: str
    secret: str
    port: int
    socket: str
    victim: int
    word: str


@dataclass(frozen=True)
class HostileProgram:
    """A program of one kind."""

    kind: str
    code: str


Kind = Callable[[random.Random, Targets], str]
KINDS: dict[str, Kind] = {}
_QUIET = "import os, sys, time, signal, socket, threading, ctypes\n"


def kind(make: Kind) -> Kind:
    """Register a kind of program by its function's name."""
    KINDS[make.__name__.replace("_", " ")] = make
    return make


def make_program(seed: int, targets: Targets) -> HostileProgram:
    """The program of this seed; kinds take turns."""
    names = sorted(KINDS)
    name = names[seed % len(names)]
    return HostileProgram(name, _QUIET + KINDS[name](random.Random(seed), targets))


def _each(paths: list[str], action: str) -> str:
    return f"for path in {paths!r}:\n    try:\n        {action}\n    except OSError:\n        pass\n"


@kind
def fork_bomb(chance: random.Random, targets: Targets) -> str:
    body = chance.choice(["pass", "time.sleep(100)", "bytearray(1 << 24); time.sleep(100)", "os.setsid()"])
    return (
        f"while True:\n    try:\n        if os.fork() == 0:\n            {body}\n    except OSError:\n        {body}\n"
    )


@kind
def thread_bomb(chance: random.Random, targets: Targets) -> str:
    return (
        "def wait():\n    while True: time.sleep(100)\n"
        "try:\n    while True: threading.Thread(target=wait, daemon=True).start()\nexcept RuntimeError: pass\n"
        f"time.sleep({chance.choice([0, 100])})\n"
    )


@kind
def allocation(chance: random.Random, targets: Targets) -> str:
    size = chance.choice([1 << 31, 1 << 29, 1 << 34])
    one = f"kept.append(bytearray({size}))"
    many = f"kept.append(bytearray({1 << chance.randint(20, 26)}))"
    return f"kept = []\nwhile True:\n    {chance.choice([one, many])}\n"


@kind
def allocation_in_many_processes(chance: random.Random, targets: Targets) -> str:
    return (
        f"while True:\n    try: os.fork()\n    except OSError: break\nkept = b'x' * {chance.randint(150, 250) << 20}\n"
    )


@kind
def reading_proc(chance: random.Random, targets: Targets) -> str:
    paths = ["/proc/1/environ", "/proc/1/root/etc/shadow", f"/proc/{targets.victim}/environ", "/proc/kcore"]
    paths += [f"/proc/{targets.victim}/root{targets.secret}", f"/proc/1/root{targets.secret}", "/proc/keys"]
    paths += [f"/proc/{chance.randint(1, 5000)}/cwd/{targets.secret}", f"/proc/self/root{targets.secret}"]
    return _each(chance.sample(paths, len(paths)), "print(open(path, 'rb').read(1000))")


@kind
def writing_proc(chance: random.Random, targets: Targets) -> str:
    paths = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches", "/proc/self/mem"]
    paths += ["/proc/self/uid_map", "/proc/self/setgroups", "/proc/1/oom_score_adj", "/proc/sys/kernel/hostname"]
    text = chance.choice(["c", "0 0 1", "|/tmp/x", "-1000", "3"])
    return _each(chance.sample(paths, len(paths)), f"open(path, 'w').write({text!r})")


@kind
def reading_sys_and_devices(chance: random.Random, targets: Targets) -> str:
    paths = ["/sys/kernel/debug", "/sys/class/dmi/id/product_uuid", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda"]
    paths += ["/dev/tty", "/dev/console", "/dev/fuse", "/dev/kvm", "/sys/fs/cgroup/cgroup.procs"]
    return _each(chance.sample(paths, len(paths)), "print(path, open(path, 'rb').read(16))")


@kind
def reading_files(chance: random.Random, targets: Targets) -> str:
    paths = [targets.secret, "/etc/shadow", "/etc/passwd", "/root/.ssh/id_rsa", "/home", "/var/run/docker.sock"]
    paths += [f"/tmp/{'../' * chance.randint(1, 9)}{targets.secret}", f"/job/..{targets.secret}"]
    return _each(paths, "print(open(path, 'rb').read(1000))")


@kind
def symlinks(chance: random.Random, targets: Targets) -> str:
    to = chance.choice([targets.secret, targets.folder, "/", "/proc/1/root", "/job/../.."])
    return (
        f"os.symlink({to!r}, '/tmp/link')\n"
        f"try: print(open('/tmp/link' + {chance.choice(['', targets.secret])!r}).read())\nexcept OSError: pass\n"
        "try: open('/tmp/link/owned', 'w').write('x')\nexcept OSError: pass\n"
        f"try: os.link({targets.secret!r}, '/tmp/hard')\nexcept OSError: pass\n"
        "try: os.rename('/job', '/tmp/job')\nexcept OSError: pass\n"
    )


@kind
def writing_outside(chance: random.Random, targets: Targets) -> str:
    paths = [f"{targets.folder}/owned", targets.secret, "/usr/bin/owned", "/usr/lib/owned", "/job/main.py", "/owned"]
    paths += ["/etc/owned", "/dev/owned", "/var/tmp/owned", "/run/owned", f"/tmp/..{targets.folder}/owned"]
    tries = _each(chance.sample(paths, len(paths)), "open(path, 'a').write('owned')")
    return tries + f"try: os.chmod('/job', 0o777); os.remove({targets.secret!r})\nexcept OSError: pass\n"


@kind
def huge_files(chance: random.Random, targets: Targets) -> str:
    place = chance.choice(["/tmp", "/dev/shm", "/tmp/a/b"])
    how = chance.choice(["file.truncate(1 << 40)", "[file.write(bytes(1 << 20)) for _ in range(4096)]"])
    return (
        f"os.makedirs({place!r}, exist_ok=True)\nn = 0\n"
        f"while n < 5000:\n    n += 1\n    try:\n        with open(f'{place}/{{n}}', 'wb') as file: {how}\n"
        "    except OSError: break\n"
    )


@kind
def many_files(chance: random.Random, targets: Targets) -> str:
    make = chance.choice(
        ["os.mkdir(name)", "open(name, 'w').close()", "os.symlink('x' * 200, name)", "os.mkfifo(name)"]
    )
    return f"n = 0\nwhile True:\n    n += 1; name = f'/tmp/{{n}}'\n    try: {make}\n    except OSError: break\n"


@kind
def network(chance: random.Random, targets: Targets) -> str:
    hosts = ["127.0.0.1", "0.0.0.0", "10.0.0.1", "169.254.169.254", "8.8.8.8"]
    return (
        f"for host in {chance.sample(hosts, len(hosts))!r}:\n"
        f"    for port in ({targets.port}, 22, 53, 80):\n"
        "        try: socket.create_connection((host, port), timeout=0.05).sendall(b'out')\n"
        "        except OSError: pass\n"
        "    try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', (host, 53))\n"
        "    except OSError: pass\n"
    )


@kind
def unix_sockets(chance: random.Random, targets: Targets) -> str:
    paths = [f"\\0{targets.socket}", f"{targets.folder}/socket", "/run/dbus/system_bus_socket", "/var/run/docker.sock"]
    listed = ", ".join(f"'{path}'" for path in chance.sample(paths, len(paths)))
    return (
        f"for path in ({listed}):\n"
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):\n"
        "        try:\n            one = socket.socket(socket.AF_UNIX, kind); one.connect(path); one.send(b'out')\n"
        "        except OSError: pass\n"
    )


@kind
def raw_sockets(chance: random.Random, targets: Targets) -> str:
    families = ["AF_PACKET, socket.SOCK_RAW", "AF_INET, socket.SOCK_RAW, 1", "AF_NETLINK, socket.SOCK_RAW"]
    families += ["AF_VSOCK, socket.SOCK_STREAM", "AF_INET6, socket.SOCK_STREAM", "AF_ALG, socket.SOCK_SEQPACKET, 0"]
    tries = [f"try: print(socket.socket(socket.{one}).bind(('', 0)))\nexcept Exception: pass\n" for one in families]
    return "".join(chance.sample(tries, len(tries)))


@kind
def endless_output(chance: random.Random, targets: Targets) -> str:
    stream = chance.choice(["1", "2"])
    return f"while True: os.write({stream}, b'{chance.choice(['a', chr(10), 'xy'])}' * {1 << chance.randint(0, 16)})\n"


@kind
def signals(chance: random.Random, targets: Targets) -> str:
    pids = ["-1", "0", "1", "os.getppid()", str(targets.victim), f"-{targets.victim}"]
    number = chance.choice(["SIGKILL", "SIGTERM", "SIGSTOP", "SIGINT", "SIGSEGV"])
    return "".join(
        f"try: os.kill({pid}, signal.{number})\nexcept OSError: pass\n" for pid in chance.sample(pids, len(pids))
    )


@kind
def ignored_signals(chance: random.Random, targets: Targets) -> str:
    return (
        "for number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        + chance.choice(["while True: pass\n", "time.sleep(100)\n", "os.close(1); os.close(2)\nwhile True: pass\n"])
    )


@kind
def zombies(chance: random.Random, targets: Targets) -> str:
    return (
        f"for n in range({chance.randint(2, 40)}):\n    try:\n        if os.fork() == 0: os._exit(0)\n"
        f"    except OSError: break\ntime.sleep({chance.choice([0, 0.1, 100])})\n"
    )


@kind
def sessions_of_their_own(chance: random.Random, targets: Targets) -> str:
    ends = chance.choice(["os._exit(0)", "time.sleep(100)", "os.kill(os.getpid(), signal.SIGKILL)"])
    return (
        f"for n in range({chance.randint(1, 6)}):\n    try:\n        if os.fork() == 0:\n            os.setsid()\n"
        f"            if os.fork() == 0:\n                os.execv('/usr/bin/sleep', ['{targets.word}', '1000'])\n"
        f"            os._exit(0)\n    except OSError: break\n{ends}\n"
    )


@kind
def namespaces(chance: random.Random, targets: Targets) -> str:
    flags = chance.choice([0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x10020000, 0x02000000])
    return (
        f"libc = ctypes.CDLL(None)\nprint(libc.unshare({flags}))\n"
        f"print(libc.mount(b'{targets.folder}', b'/tmp', b'none', 4096, None))\n"
        "print(libc.mount(b'proc', b'/tmp', b'proc', 0, None), libc.umount2(b'/usr', 2), libc.chroot(b'/tmp'))\n"
        f"try: print(open('/tmp/secret').read())\nexcept OSError: pass\n"
    )


@kind
def other_rights(chance: random.Random, targets: Targets) -> str:
    tries = ["os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.chroot('/')", "os.nice(-20)", "os.seteuid(0)"]
    tries += ["__import__('resource').setrlimit(__import__('resource').RLIMIT_NPROC, (9999, 9999))"]
    tries += ["os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))", "os.execv('/usr/bin/su', ['su', '-c', 'id'])"]
    return "".join(f"try: {one}\nexcept (OSError, ValueError): pass\n" for one in chance.sample(tries, len(tries)))


@kind
def tracing(chance: random.Random, targets: Targets) -> str:
    pid = chance.choice(["1", "os.getppid()", str(targets.victim)])
    return (
        f"libc = ctypes.CDLL(None)\nprint(libc.ptrace(16, {pid}, 0, 0), libc.ptrace(0x4206, {pid}, 0, 0))\n"
        f"try: print(open(f'/proc/{{{pid}}}/mem', 'rb').read(10))\nexcept OSError: pass\n"
        f"try: print(os.pidfd_open({pid}))\nexcept OSError: pass\n"
    )


@kind
def descriptors(chance: random.Random, targets: Targets) -> str:
    return (
        "for fd in range(3, 1024):\n    try:\n        print(fd, os.read(fd, 100))\n    except OSError: pass\n"
        "    try: os.write(fd, b'owned')\n    except OSError: pass\n"
        "kept = []\ntry:\n    while True: kept.append(os.pipe())\nexcept OSError: pass\n"
    )


@kind
def spinning(chance: random.Random, targets: Targets) -> str:
    copies = chance.randint(0, 3)
    return f"for _ in range({copies}):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass\n"


@kind
def deep_recursion(chance: random.Random, targets: Targets) -> str:
    return chance.choice(
        [
            "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()\n",
            "x = '(' * 200000 + ')' * 200000\ntry: eval(x)\nexcept (MemoryError, RecursionError, SyntaxError): pass\n",
            "10 ** 10 ** 9\n",
            "ctypes.string_at(0)\n",
        ]
    )

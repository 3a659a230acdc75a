"""Test hosts out of Linux namespaces, on a bridge of their own.

A host has its own network, processes, mounts, name and IPC; an sshd, a home, /tmp, /run and /dev/shm of its own; a
limit of memory; and a copy of this Python's virtual environment, in which `pip install` changes nothing outside. Its
user `ubuntu` is root there, and may log in on all others.

`scripts/test-hosts` runs pytest in network, PID and mount namespaces that hosts are made below of. So the bridge is
invisible from outside, nothing reaches the machine's own network, and all of it ends with pytest, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NETWORK = "10.0.0"
GATEWAY = f"{NETWORK}.254"  # the bridge; it forwards nothing
BRIDGE = "hosts"
PROGRAMS = ("ip", "unshare", "nsenter", "mount", "rsync", "ssh", "ssh-keygen", "/usr/sbin/sshd")
VENV = Path(sys.prefix).resolve()
CGROUPS = Path("/sys/fs/cgroup", "memory" if Path("/sys/fs/cgroup/memory").is_dir() else "")
LIMITS = ("memory.limit_in_bytes", "memory.max")  # of version 1 and 2 of the kernel's interface
MEMORY = 4 << 30  # bytes that a host may use; its files are in memory too
HOME = Path("/run/home")
MODULES = Path("/run/modules")  # Python modules that every host can import
START_S = 20.0
STOP_S = 10.0
COMMAND_S = 60.0

# What a shell on a host knows. pip finds what it needs in the environment, and nothing else.
BASHRC = f"""\
export PATH={VENV}/bin:$PATH PYTHONPATH={MODULES}
export PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
"""

SSHD = f"""\
HostKey {MODULES}/host_key
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
PrintMotd no
MaxStartups 100
Subsystem sftp internal-sftp
"""


def what_is_missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may make namespaces"
    if [name for _, name in socket.if_nameindex() if name not in ("lo", BRIDGE)]:
        return "not in namespaces of its own: scripts/test-hosts starts it in them, where that is permitted"
    probe = CGROUPS / f"hosts-{secrets.token_hex(4)}-probe"
    try:
        probe.mkdir()
        has_limit = any((probe / limit).exists() for limit in LIMITS)
        probe.rmdir()
    except OSError as error:
        return f"no memory cgroup: {error}"
    return None if has_limit else "no memory cgroup"


class Host:
    """One host, which is up.

    name: its own, and of its link on the bridge. ip: its address. folder: where the files of all hosts are. cgroup: to
    be made. All methods raise TimeoutExpired rather than hang.
    """

    def __init__(self, name: str, ip: str, folder: Path, cgroup: Path):
        self.name, self.ip = name, ip
        self._root = folder / name
        self._root.mkdir(mode=0o700, exist_ok=True)
        self._log = self._root / "log"
        self._cgroup = cgroup
        self._cgroup.mkdir()
        for limit in LIMITS:
            if (self._cgroup / limit).exists():
                (self._cgroup / limit).write_text(str(MEMORY))
        init = [sys.executable, __file__, name, ip, str(self._root), str(self._cgroup)]
        unshare = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--mount-proc"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*unshare, *init], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._pid = self._wait_for(self._find_init, "process")
            # A new host may get the address of one that is gone. With the same MAC address nobody has to ask again.
            mac = f"02:00:00:00:00:{int(ip.rpartition('.')[2]):02x}"
            _ip(f"link add name {name} type veth peer name eth0 address {mac} netns {self._pid}")
            _ip(f"link set dev {name} master {BRIDGE} up")
            self._wait_for(self._answers, "sshd")
        except BaseException:
            self.stop()
            raise

    def run(self, command: str, timeout: float = COMMAND_S, check: bool = True) -> str:
        """Run a command in bash, as a login of the host's user would; returns what it prints to either output."""
        done = subprocess.run(
            self._inside(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {command}\nexit code {done.returncode}\n{done.stdout[-8000:]}")
        return done.stdout

    def start(self, command: str, **options) -> subprocess.Popen:
        """Start a command in bash, as `run` does, without waiting. options: of Popen."""
        return subprocess.Popen(self._inside(command), **{"stdin": subprocess.DEVNULL, **options})

    def path(self, path: str) -> Path:
        """A file in the host's home, for this process."""
        return self._root / "home" / path

    def cut_network(self) -> None:
        """Let nothing in or out, silently: what runs goes on, and nobody is told."""
        _ip(f"link set dev {self.name} down")

    def mend_network(self) -> None:
        """Undo `cut_network`."""
        _ip(f"link set dev {self.name} up")

    def pause(self, paused: bool = True) -> None:
        """Stop all processes of the host, as a host that hangs; or let them go on."""
        for pid in (self._cgroup / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGSTOP if paused else signal.SIGCONT)

    def stop(self) -> None:
        """End the host and everything on it, at once; nobody is told, as if its power had gone."""
        subprocess.run(["ip", "link", "del", "dev", self.name], stderr=subprocess.DEVNULL, timeout=STOP_S)
        self._process.kill()  # and the kernel its child, which is the init of all others
        self._process.wait(STOP_S)
        deadline = time.monotonic() + STOP_S
        while self._cgroup.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # processes are still ending
                self._cgroup.rmdir()
            time.sleep(0.02)

    def _inside(self, command: str) -> list[str]:
        environment = [f"HOME={HOME}", "USER=ubuntu", "TERM=xterm", "LANG=C.UTF-8", f"PATH={os.environ['PATH']}"]
        enter = ["nsenter", "-t", str(self._pid), "--net", "--pid", "--mount", "--uts", "--ipc", f"--wdns={HOME}"]
        # What is started is the host's, with its memory too.
        join = f"echo 0 > {self._cgroup}/cgroup.procs"
        script = f"source ~/.bashrc\n{command}"
        return ["bash", "-c", f'{join}; exec "$@"', "enter", "env", "-i", *environment, *enter, "bash", "-c", script]

    def _find_init(self) -> int | None:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self.ip, 22), timeout=0.1).close()
            return True
        return False

    def _wait_for(self, found, what):
        deadline = time.monotonic() + START_S
        while not (result := found()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"host {self.name} has no {what}: {self._log.read_text()}")
            time.sleep(0.01)
        return result


class Hosts:
    """The bridge, and all hosts on it."""

    def __init__(self):
        # One folder for all tests: each sees a file system of its own there, which ends with its namespaces.
        self._folder = Path(tempfile.gettempdir(), "test-hosts")
        self._folder.mkdir(exist_ok=True)
        self._id = f"hosts-{secrets.token_hex(4)}"  # of the cgroups, which have no namespace
        _run("mount", "-t", "tmpfs", "tmpfs", str(self._folder))
        (self._folder / "modules").mkdir()
        for old in CGROUPS.glob("hosts-*"):  # of tests that were killed; those that are in use stay
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > 60:
                    old.rmdir()
        self.modules = self._folder / "modules"  # see MODULES; what is put here later, hosts see too
        for name in ("host_key", "id_ed25519"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self._folder / "modules" / name))
        _ip("link set lo up")
        _ip(f"link add {BRIDGE} type bridge")
        _ip(f"addr add {GATEWAY}/24 dev {BRIDGE}")
        _ip(f"link set {BRIDGE} up")
        self._hosts: dict[str, Host] = {}

    def start(self, name: str, number: int) -> Host:
        """Make a host. number: the last part of its address."""
        cgroup = CGROUPS / f"{self._id}-{name}"
        self._hosts[name] = host = Host(name, f"{NETWORK}.{number}", self._folder, cgroup)
        return host

    def stop(self, name: str) -> None:
        """End a host, if it is there, and its files with it."""
        if (host := self._hosts.pop(name, None)) is not None:
            host.stop()
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def reboot(self, name: str) -> Host:
        """End a host and make it again with what it had on its disk: home, and what was installed."""
        self._hosts[name].stop()
        return self.start(name, int(self._hosts[name].ip.rpartition(".")[2]))

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def names(self) -> list[str]:
        """Of all hosts that were not stopped."""
        return list(self._hosts)

    def close(self) -> None:
        """End all hosts, and the bridge."""
        for name in self.names():
            self.stop(name)
        _ip(f"link del {BRIDGE}")
        _run("umount", "-l", str(self._folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=COMMAND_S)


def _ip(arguments: str) -> None:
    _run("ip", *arguments.split())


def _become_host(name: str, ip: str, root: Path, cgroup: Path) -> None:
    """Set a host up, as its first process in its new namespaces, and become its sshd."""
    (cgroup / "cgroup.procs").write_text("0")
    modules = root.parent / "modules"
    socket.sethostname(name)
    _run("mount", "--make-rprivate", "/")
    is_new = not (root / "home").exists()
    shutil.rmtree(root / "tmp", ignore_errors=True)
    for each in ("home", "tmp", "upper", "work"):
        (root / each).mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    _run("mount", "-t", "tmpfs", "-o", "size=2g,mode=1777", "tmpfs", "/dev/shm")
    layers = f"lowerdir={VENV},upperdir={root}/upper,workdir={root}/work"
    _run("mount", "-t", "overlay", "-o", layers, "overlay", str(VENV))
    # The host may see its own part of the cgroup only, from which Ray takes its limit.
    _run(
        "mount", "--bind", str(cgroup), "/sys/fs/cgroup/memory" if cgroup.parent.name == "memory" else "/sys/fs/cgroup"
    )

    MODULES.mkdir()
    _run("mount", "--bind", str(modules), str(MODULES))
    _run("mount", "-o", "remount,bind,ro", str(MODULES))
    HOME.mkdir()
    _run("mount", "--bind", str(root / "home"), str(HOME))
    if is_new:
        (HOME / ".ssh").mkdir(mode=0o700)
        shutil.copy(modules / "id_ed25519", HOME / ".ssh")  # with its mode
        shutil.copy(modules / "id_ed25519.pub", HOME / ".ssh" / "authorized_keys")
        (HOME / ".bashrc").write_text(BASHRC)
    files = {
        "passwd": f"ubuntu:x:0:0::{HOME}:/bin/bash\n" + Path("/etc/passwd").read_text(),
        "hosts": f"127.0.0.1 localhost\n{ip} {name}\n",
        "resolv.conf": "nameserver 127.0.0.1\n",
    }
    for file, text in files.items():
        Path("/run", file).write_text(text)
        _run("mount", "--bind", f"/run/{file}", f"/etc/{file}")
    Path("/run/sshd").mkdir()
    Path("/run/sshd_config").write_text(SSHD)

    # Last, as all of the above may be below the machine's own /tmp.
    for path in (VENV, Path(sys.base_prefix), Path(__file__).resolve().parents[2]):
        if path.is_relative_to("/tmp"):
            seen = root / "tmp" / path.relative_to("/tmp")
            seen.mkdir(parents=True, exist_ok=True)
            _run("mount", "--rbind", str(path), str(seen))
    (root / "tmp").chmod(0o1777)
    _run("mount", "--rbind", str(root / "tmp"), "/tmp")

    deadline = time.monotonic() + START_S
    while "eth0" not in [each for _, each in socket.if_nameindex()]:
        assert time.monotonic() < deadline, "no network"
        time.sleep(0.01)
    _ip("link set lo up")
    _ip(f"addr add {ip}/24 dev eth0")
    _ip("link set eth0 up")
    _ip(f"route add default via {GATEWAY}")  # Ray looks for its own address by it
    environment = {"HOME": str(HOME), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    sshd = ["/usr/sbin/sshd", "-D", "-f", "/run/sshd_config", "-E", "/run/sshd.log"]
    os.execve(sshd[0], sshd, environment)


if __name__ == "__main__":
    _become_host(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))

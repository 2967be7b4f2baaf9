"""Further programs as in `programs.py`."""

CAPABILITIES = """
def sets():
    with open("/proc/self/status") as file:
        return any(line.startswith(("CapI", "CapP", "CapE", "CapA")) and int(line.split()[1], 16) for line in file)
attempt(sets)
attempt(lambda: libc.prctl(47, 2, 0, 0, 0) == 0)
attempt(os.setuid, 0) if os.getuid() else escaped("root")
"""
MACHINE = """
for path in ("/proc/cmdline", "/proc/version"):
    attempt(lambda: bool(open(path).read()))
"""
HOST_CGROUP = """
attempt(lambda: any(line.rstrip().rpartition(":")[2] != "/" for line in open("/proc/self/cgroup")))
for path in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified"):
    attempt(os.mkdir, f"{path}/{name}")
attempt(os.listdir, "/sys/fs/cgroup")
"""
WATCH_PYTHON = """
watch = libc.inotify_init()
attempt(lambda: watch >= 0 and libc.inotify_add_watch(watch, os.path.dirname(os.__file__).encode(), 1) >= 0)
"""
SOCKET_FAMILIES = """
for family in range(46):
    for kind in (1, 2, 3, 5):
        attempt(lambda: os.close(made) or True if (made := libc.socket(family, kind, 0)) >= 0 else False)
"""
SECRET_MEMORY = """
made = call(447, 447, 0)
attempt(lambda: made >= 0 and os.ftruncate(made, 1 << 30) is None)
"""
MEMORY_FILE = "attempt(lambda: call(319, 279, ctypes.addressof(ctypes.create_string_buffer(b'x')), 0) + 1)"
EXECUTE_AT = """
try:
    opened = os.open("/usr/bin/true", os.O_RDONLY)
except OSError:
    opened = -1
child = fork()
if child == 0:
    path, arguments = ctypes.create_string_buffer(b""), (ctypes.c_char_p * 2)(b"true", None)
    call(322, 281, opened, ctypes.addressof(path), ctypes.addressof(arguments), 0, 0x1000)
    os._exit(1)
if child > 0:
    attempt(lambda: os.waitpid(child, 0)[1] == 0)
"""
RAISED_LIMITS = """
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE,
             resource.RLIMIT_NOFILE):
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY:
        escaped(kind)
    else:
        try:
            resource.setrlimit(kind, (hard + 1, hard + 1))
            escaped(kind)
        except (ValueError, OSError):
            pass
"""
SIGNALS_TO_PARENTS = """
for pid in {os.getppid(), 1, 2} - {os.getpid()}:
    for number in (0, 10, 15, 19, 9) if pid < 3 else (0,):
        try:
            os.kill(pid, number)
        except OSError:
            continue
        if os.getppid() > 2 and number == 0:
            escaped(pid)
"""
FORKS_IN_SESSIONS = """
count = 0
for _ in range(100):
    child = fork()
    if child == 0:
        os.setsid()
        time.sleep(1)
        os._exit(0)
    count += child > 0
if count > 60:
    escaped(count)
"""
PIPES_IN_FLIGHT = """
import array
one, other = socket.socketpair()
sent = 0
def send():
    global sent
    while sent < 1000:
        read_end, write_end = os.pipe()
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read_end, write_end]))])
        os.write(write_end, bytes(65536))
        os.close(read_end)
        os.close(write_end)
        sent += 2
one.setblocking(False)
attempt(send)
if sent > 500:
    escaped(sent)
"""
UNNAMED_FILES = """
for place in (folder, "/var/tmp", "/dev/shm", os.path.dirname(os.__file__)):
    attempt(lambda: os.open(place, os.O_TMPFILE | os.O_RDWR) >= 0)
"""
DEVICE_NODES = """
import stat
for place in (os.getcwd(), "/tmp", "/dev/shm"):
    attempt(lambda: os.mknod(f"{place}/{name}", stat.S_IFBLK | 0o600, os.makedev(254, 0)) is None and escaped())
    attempt(lambda: os.open(f"{place}/{name}", os.O_RDONLY) >= 0)
"""
DISKS = """
for path in ("/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/mem", "/dev/kvm", "/dev/fuse", "/dev/net/tun", "/dev/shm"):
    attempt(lambda: os.open(path, os.O_RDONLY) >= 0)
"""
LINK_TO_A_SECRET = """
for place in ("/tmp", os.getcwd(), folder):
    for make in (os.link, os.symlink):
        path = f"{place}/{name}.{make.__name__}"
        try:
            make(secret, path)
        except OSError:
            continue
        attempt(read, path)
        os.unlink(path)
"""
WAY_UP = """
for steps in range(1, 12):
    attempt(read, "../" * steps + secret.lstrip("/"))
    attempt(read, "/proc/self/cwd/" + "../" * steps + secret.lstrip("/"))
attempt(lambda: os.chroot("/tmp") is None and escaped())
for number in range(3, 64):
    attempt(lambda: os.fchdir(number) is None and read("." + secret))
"""
MAGIC_LINKS = """
attempt(lambda: os.open("/proc/self/exe", os.O_WRONLY) >= 0)
for number in range(3):
    attempt(lambda: secret_text in os.readlink(f"/proc/self/fd/{number}").encode())
for place in ("map_files", "task"):
    try:
        names = os.listdir(f"/proc/self/{place}")
    except OSError:
        continue
    for each in names:
        attempt(lambda: os.open(f"/proc/self/{place}/{each}", os.O_WRONLY) >= 0)
for pid in others():
    attempt(lambda: os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY) >= 0 and
            os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"))
"""
PYTHONS_FOLDERS = """
for module in (os, socket, ctypes, struct):
    path = module.__file__
    for mode in ("r+b", "ab", "wb"):
        attempt(lambda: open(path, mode) is not None)
    attempt(lambda: os.rename(path, path + name) is None and escaped())
    attempt(lambda: os.chmod(path, 0o777) is None and os.stat(path).st_mode & 2)
"""
INPUT_OF_OTHERS = """
attempt(lambda: os.ftruncate(0, 1 << 20) is None and escaped())
attempt(lambda: os.write(0, b"x"))
attempt(lambda: os.open("/proc/self/fd/0", os.O_RDWR) >= 0 and os.write(os.open("/proc/self/fd/0", os.O_RDWR), b"x"))
"""
DESCRIPTORS_OF_OTHERS = """
for pid in others():
    handle = call(434, 434, pid, 0)
    if handle >= 0:
        for number in range(8):
            if call(438, 438, handle, number, 0) >= 0:
                escaped((pid, number))
"""
NEW_MOUNTS = """
kind = ctypes.create_string_buffer(b"tmpfs")
attempt(lambda: call(430, 430, ctypes.addressof(kind), 0) >= 0)
place = ctypes.create_string_buffer(b"/tmp")
attempt(lambda: call(428, 428, -100, ctypes.addressof(place), 1) >= 0)
"""
FILE_WATCH = "attempt(lambda: call(300, 262, 0, 0) >= 0)"
CLOCK = "attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()) is None and escaped())"
KEYRINGS = """
attempt(lambda: call(250, 219, 0, -3, 0) > 0)
attempt(lambda: call(250, 219, 1, 0) > 0)
"""
TRACED = "attempt(lambda: call(101, 117, 0, 0, 0, 0) == 0 and escaped())"
OWN_MEMORY = """
def rewrite():
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        return memory.write(b"x")
attempt(rewrite)
with_memory = [f"/proc/{pid}/mem" for pid in others()]
for path in with_memory:
    attempt(lambda: os.open(path, os.O_WRONLY) >= 0)
"""
IGNORED_CHILDREN = """
action = (ctypes.c_long * 20)(0, 2 | 0x4000000)
attempt(lambda: libc.sigaction(17, action, None) == 0)
attempt(lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN) is not None and signal.getsignal(17) == 1)
"""

# Without a sandbox they need root, do no harm that can be seen, or are the rules of every system.
NEED_ROOT = (
    *("CAPABILITIES", "RAISED_LIMITS", "SIGNALS_TO_PARENTS", "DEVICE_NODES", "MAGIC_LINKS", "PYTHONS_FOLDERS"),
    *("INPUT_OF_OTHERS", "NEW_MOUNTS", "FILE_WATCH", "CLOCK", "WAY_UP", "UNNAMED_FILES", "DESCRIPTORS_OF_OTHERS"),
    *("OWN_MEMORY", "SECRET_MEMORY"),
)
MORE = {
    name: (text, name not in NEED_ROOT)
    for name, text in list(globals().items())
    if isinstance(text, str) and name.isupper()
}

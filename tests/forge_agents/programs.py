"""What agents run in the tests of commands: programs that try what they may not do."""

LOOK = """
import json, os, pathlib
def read(path):
    try:
        return pathlib.Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""
text = "".join(read(p) for name in os.listdir("/proc") for p in (f"/proc/{name}/environ", f"/proc/{name}/cmdline"))
def writable(path):
    try:
        open(path + "/forge-test", "w").close()
    except OSError:
        return False
    return True
print(json.dumps({
    "file": [read(path) for path in PATHS],
    "environ": MARK[::-1] in text,
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())[:3],
    "writable": [path for path in ("/", "/usr", "/etc", "/root", os.path.dirname(os.__file__)) if writable(path)],
    "runs": [str(p) for p in pathlib.Path("/").glob("tmp/forge-*")],
}))
"""

ASK = """
import json, os, socket, sys, urllib.request
def reaches(address, family=socket.AF_INET):
    try:
        with socket.socket(family) as client:
            client.settimeout(3)
            client.connect(address)
            return True
    except OSError:
        return False
url = os.environ.get("OPENAI_BASE_URL")
def ask(size):
    request = urllib.request.Request(url + "/chat", b"x" * size, {"Authorization": os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request, timeout=20))
OTHER, ABSTRACT = json.loads(sys.argv[1])
print(json.dumps({
    "answers": [ask(10), ask(3_000_000)] if url else [],
    "loopback": reaches(("127.0.0.1", OTHER)),
    "network": reaches(("1.1.1.1", 53)),
    "abstract": reaches("\\0" + ABSTRACT, socket.AF_UNIX),
    "kinds": [family for family in (17, 40) if not denied(family)],
}))
"""

KERNEL = """
import ctypes, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)
tried = {
    "namespaces": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "memory": lambda: os.memfd_create("x"),
    "keys": lambda: libc.syscall(250, 0, -3, 1),
    "root": lambda: os.setuid(0),
    "clone": lambda: subprocess.run(["unshare", "-U", "true"], check=True, stderr=subprocess.DEVNULL) and 0,
}
for name, attempt in tried.items():
    try:
        print(name * (attempt() not in (-1,)), end="")
    except (OSError, subprocess.CalledProcessError):
        pass
with open("/proc/self/status") as file:
    print([line.split()[1] for line in file if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Seccomp:"))])
"""

DENIED = """
import socket
def denied(family):
    try:
        socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_RAW).close()
    except OSError:
        return True
    return False
"""

FORBIDDEN = """
import asyncio, sys
from forge_envs.environment import InfrastructureError
from forge_agents.command import AgentCommand, CommandRunner
async def main():
    try:
        await CommandRunner().start()
    except InfrastructureError as error:
        print("rejected:", error)
    async with CommandRunner(allow_unsafe=True) as runner:
        daemon = "(setsid sh -c 'sleep 1000; :' $0 &); echo $OPENAI_API_KEY; pwd; exit 4"
        result = await runner.run(AgentCommand(["sh", "-c", daemon, sys.argv[1]]), url="http://127.0.0.1:9", key="k1")
        print(runner.level, result.status, result.exit_code, result.stdout.split() == ["k1", str(result.folder)])
        print((await runner.run(AgentCommand(["sh", "-c", "sleep 1000; :", sys.argv[1]], timeout=0.5))).status)
asyncio.run(main())
"""

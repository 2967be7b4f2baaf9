"""A seccomp filter that denies system calls which affect more than a program, or have been used to escape sandboxes."""

import ctypes
import errno
import struct
from collections.abc import Sequence

from .syscalls import MACHINE, find_number, make_call

_KERNEL = (
    # mounts and namespaces
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick"),
    *("mount_setattr", "unshare", "setns", "open_by_handle_at", "name_to_handle_at", "fanotify_init"),
    # the machine
    *("acct", "bpf", "perf_event_open", "keyctl", "add_key", "request_key", "userfaultfd", "quotactl", "quotactl_fd"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon", "swapoff"),
    *("syslog", "vhangup", "sethostname", "setdomainname", "settimeofday", "clock_settime", "adjtimex"),
    *("clock_adjtime", "personality", "iopl", "ioperm", "modify_ldt", "vmsplice", "nfsservctl", "lookup_dcookie"),
    *("uselib", "ustat", "sysfs"),
)
# Memory that belongs to no process, and is therefore not limited.
_UNOWNED_MEMORY = ("memfd_create", "memfd_secret", "shmget", "shmat", "shmctl", "shmdt")
_DENIED = (
    # sockets; a pair of connected ones is permitted below
    *("socket", "connect", "bind", "listen", "accept", "accept4", "sendmmsg"),
    # other processes
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd"),
    *("pidfd_open", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "tkill", "setpriority", "ioprio_set"),
    *("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr", "migrate_pages", "move_pages"),
    # watches of the files that all programs share: few for each user, and they show who reads what
    *("inotify_init", "inotify_init1", "inotify_add_watch"),
    # IPC: outlives the process, and objects of others are reachable by number
    *("semget", "semop", "semctl", "semtimedop"),
    *("msgget", "msgsnd", "msgrcv", "msgctl"),
    *("mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr"),
)
# A program is one process, unless the settings allow more.
_PROCESS_CALLS = ("fork", "vfork", "execve", "execveat")
# ENOSYS: callers of clone3 fall back to clone; io_uring would bypass this filter.
_UNIMPLEMENTED = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
_NEWEST = 449  # futex_waitv, the newest system call that was examined; newer ones are not implemented in the sandbox

# The kernel's constants of architectures, which have different numbers of system calls.
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The bit in the numbers of the x32 interface, which are other numbers for the same calls.
_X32 = 0x40000000
_NEW_NAMESPACES, _THREAD = 0x7E020080, 0x10000
_UNIX, _STREAM = 1, 1
_FAMILIES = (_UNIX, 2, 10, 16)  # of sockets: UNIX, IPv4, IPv6, and netlink, by which programs list addresses
_CHILD_ENDED = 17  # SIGCHLD
_PARENT_DEATH = 1
# Commands of fcntl by which input on a descriptor sends a chosen signal to a chosen process.
_SET_OWN, _SET_SIGNAL, _SET_OWN_EX, _NOTIFY = 8, 10, 15, 1026
_IOCTLS = (0x8901, 0x8902, 0x5412, 0x541C)  # the same by ioctl; and TIOCSTI, which injects terminal input

# Actions and instructions of BPF. An instruction is (code, instructions to skip if true, and if false, operand).
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x50000
_LOAD, _AND, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
Instruction = tuple[int, int, int, int]
_PERMIT, _DENY = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)


def _load_argument(index: int) -> Instruction:
    # Arguments have 64 bits, and start at byte 16 of the kernel's structure. Those that are tested use the lower half.
    return (_LOAD, 0, 0, 16 + 8 * index)


def filter_program(*, forks: bool, network: bool) -> bytes:
    """Return the filter as BPF code, which denies, permits or ends the process for each system call.

    Args:
        forks: whether the program may start processes and execute files.
        network: whether the program is a command that may use sockets, such as an agent. Then only those calls are
            denied that change mounts, namespaces or the machine, or create memory that belongs to no process.
    """
    # The numbers of the rules hold for one architecture: calls by those of another, or of x32, end the process. Calls
    # that are newer than _NEWEST fail with ENOSYS.
    code: list[Instruction] = [
        *((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURE[MACHINE]), (_RETURN, 0, 0, _KILL)),
        (_LOAD, 0, 0, 0),
    ]
    if MACHINE == "x86_64":
        code += [(_ABOVE, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    code += [(_ABOVE, 0, 1, _NEWEST + 1), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]

    def add_rule(name: str, *then: Instruction) -> None:
        # For a call of this name run the instructions `then`, the last of which must return; otherwise skip them.
        if (call_number := find_number(name)) is not None:
            code.extend([(_EQUAL, 0, len(then), call_number), *then])

    def match_values(name: str, index: int, values: Sequence[int], found: Instruction, other: Instruction) -> None:
        # Return `found` if argument `index` is one of the values, `other` if not. Each test jumps to the last
        # instruction if it is true: over the tests after it and `other`.
        tests = [(_EQUAL, jump, 0, value) for jump, value in zip(range(len(values), 0, -1), values, strict=True)]
        add_rule(name, _load_argument(index), *tests, other, found)

    denied = (*_KERNEL, *_UNOWNED_MEMORY)
    for name in denied if network else (*denied, *_DENIED, *(() if forks else _PROCESS_CALLS)):
        add_rule(name, _DENY)
    for name in _UNIMPLEMENTED:
        add_rule(name, (_RETURN, 0, 0, _ERRNO | errno.ENOSYS))
    # With `forks` clone is denied with any flag of new namespaces, otherwise without the flag of threads.
    flags = (_ANY_BIT, 0, 1, _NEW_NAMESPACES) if forks else (_ANY_BIT, 1, 0, _THREAD)
    add_rule("clone", _load_argument(0), flags, _DENY, _PERMIT)

    if network:
        # Other families are denied since namespaces do not isolate all of them, such as a virtual machine's sockets.
        match_values("socket", 0, _FAMILIES, _PERMIT, _DENY)
    else:
        match_values("prlimit64", 0, [0], _PERMIT, _DENY)  # limits of this process (0), not of others
        # Stream pairs only: a datagram socket could send to any address.
        kind = [_load_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, _STREAM), _DENY, _PERMIT]
        add_rule("socketpair", _load_argument(0), (_EQUAL, 1, 0, _UNIX), _DENY, *kind)
        match_values("prctl", 0, [_PARENT_DEATH], _DENY, _PERMIT)
        # If SIGCHLD is ignored, the CPU time of ended children is counted nowhere.
        match_values("rt_sigaction", 0, [_CHILD_ENDED], _DENY, _PERMIT)
        match_values("fcntl", 1, [_SET_OWN, _SET_SIGNAL, _SET_OWN_EX, _NOTIFY], _DENY, _PERMIT)
        match_values("ioctl", 1, _IOCTLS, _DENY, _PERMIT)

    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*code, _PERMIT])


def install_filter(code: bytes) -> None:
    """Apply a filter to this process and its future children, irreversibly; OSError if the kernel rejects it."""
    buffer = ctypes.create_string_buffer(code, len(code))
    # PR_SET_SECCOMP, SECCOMP_MODE_FILTER, and the number of instructions with their address.
    make_call("prctl", 22, 2, struct.pack("HP", len(code) // 8, ctypes.addressof(buffer)), 0, 0)

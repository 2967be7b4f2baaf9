"""System calls that Python has no function for, called by their numbers."""

import ctypes
import os
import platform

libc = ctypes.CDLL(None, use_errno=True)
MACHINE = platform.machine()
if MACHINE not in ("x86_64", "aarch64"):
    raise OSError(f"unsupported machine {MACHINE}: the sandbox supports x86_64 and aarch64; use level none")

# Each entry: a name, its number on x86_64, its number on aarch64; "-": that architecture does not have the call.
_TABLE = """
accept 43 202 | accept4 288 242 | acct 163 89 | add_key 248 217 | adjtimex 159 171 | bind 49 200 | bpf 321 280
capset 126 91 | chmod 90 - | chown 92 - | chroot 161 51 | clock_adjtime 305 266 | clock_settime 227 112
clone 56 220 | clone3 435 435 | close_range 436 436 | connect 42 203 | delete_module 176 106 | execve 59 221
execveat 322 281 | fanotify_init 300 262 | fchmod 91 52 | fchmodat 268 53 | fchown 93 55 | fchownat 260 54
fcntl 72 25 | finit_module 313 273 | fork 57 - | fremovexattr 199 16 | fsconfig 431 431 | fsetxattr 190 7
fsmount 432 432 | fsopen 430 430 | fspick 433 433 | futimesat 261 - | init_module 175 105
inotify_add_watch 254 27 | inotify_init 253 - | inotify_init1 294 26 | io_uring_enter 426 426
io_uring_register 427 427 | io_uring_setup 425 425 | ioctl 16 29 | ioperm 173 - | iopl 172 - | ioprio_set 251 30
kcmp 312 272 | kexec_file_load 320 294 | kexec_load 246 104 | keyctl 250 219 | kill 62 129
lchown 94 -
listen 50 201 | lookup_dcookie 212 18 | lremovexattr 198 15 | lsetxattr 189 6 | memfd_create 319 279
memfd_secret 447 447 | migrate_pages 256 238 | modify_ldt 154 - | mount 165 40 | mount_setattr 442 442
move_mount 429 429 | move_pages 279 239 | mq_getsetattr 245 185 | mq_notify 244 184 | mq_open 240 180
mq_timedreceive 243 183 | mq_timedsend 242 182 | mq_unlink 241 181 | msgctl 71 187 | msgget 68 186
msgrcv 70 188 | msgsnd 69 189 | name_to_handle_at 303 264 | nfsservctl 180 42 | open_by_handle_at 304 265
open_tree 428 428 | perf_event_open 298 241 | personality 135 92 | pidfd_getfd 438 438 | pidfd_open 434 434
pidfd_send_signal 424 424 | pivot_root 155 41 | prctl 157 167 | prlimit64 302 261 | process_madvise 440 440
process_mrelease 448 448 | process_vm_readv 310 270 | process_vm_writev 311 271 | ptrace 101 117
quotactl 179 60 | quotactl_fd 443 443 | reboot 169 142 | removexattr 197 14 | request_key 249 218
rt_sigaction 13 134 | rt_sigqueueinfo 129 138 | rt_tgsigqueueinfo 297 240 | sched_setaffinity 203 122
sched_setattr 314 274
sched_setparam 142 118 | sched_setscheduler 144 119 | semctl 66 191 | semget 64 190 | semop 65 193
semtimedop 220 192 | sendmmsg 307 269 | setdomainname 171 162 | sethostname 170 161 | setns 308 268
setpriority 141 140 | settimeofday 164 170 | setxattr 188 5 | shmat 30 196 | shmctl 31 195 | shmdt 67 197
shmget 29 194 | socket 41 198 | socketpair 53 199 | swapoff 168 225 | swapon 167 224 | sysfs 139 -
syslog 103 116 | tgkill 234 131 | tkill 200 130 | truncate 76 45 | umount2 166 39 | unshare 272 97
uselib 134 - | userfaultfd 323 282 | ustat 136 - | utime 132 - | utimensat 280 88 | utimes 235 - | vfork 58 -
vhangup 153 58 | vmsplice 278 75
"""
# The same as pairs of numbers; None: the architecture does not have the call.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    name: (None if x86 == "-" else int(x86), None if arm == "-" else int(arm))
    for name, x86, arm in (row.split() for row in _TABLE.replace("\n", "|").split("|") if row)
}


def find_number(name: str) -> int | None:
    """Return the number of a system call on this machine; None if it does not have the call."""
    return _NUMBERS[name][1 if MACHINE == "aarch64" else 0]


def make_call(name: str, *arguments: int | bytes | None) -> int:
    """Make a system call, and return its result; OSError, with its name, if it fails."""
    # ctypes would pass Python's integers as 32 bits.
    converted = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in arguments]
    return check_result(libc.syscall(ctypes.c_long(find_number(name) or -1), *converted), name)


def check_result(result: int, name: str) -> int:
    """Return the result of a call of the C library; OSError, with its name, if the result is negative."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def prctl(option: int, value: int = 0) -> int:
    """Call prctl(2), and return its result; OSError if it fails."""
    return make_call("prctl", option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent exits.

    A change of the user, or the execution of a privileged file, cancels this.
    """
    prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL

"""The system calls that a confined process may use, with their numbers on each machine.

Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of the Linux kernel. Calls that are
left out on one machine do not exist there.
"""

from __future__ import annotations

#: These have the same number on all architectures, as every call since Linux 5.1.
COMMON: dict[str, int] = {
    "pidfd_open": 434, "close_range": 436, "openat2": 437, "faccessat2": 439, "epoll_pwait2": 441, "futex_waitv": 449,
    "map_shadow_stack": 453, "futex_wake": 454, "futex_wait": 455, "futex_requeue": 456, "mseal": 462,
}  # fmt: skip
X86_64: dict[str, int] = {
    # files
    "read": 0, "write": 1, "open": 2, "openat": 257, "creat": 85, "close": 3, "stat": 4, "fstat": 5, "lstat": 6,
    "newfstatat": 262, "statx": 332, "lseek": 8, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20,
    "preadv": 295, "pwritev": 296, "preadv2": 327, "pwritev2": 328, "access": 21, "faccessat": 269, "dup": 32,
    "dup2": 33, "dup3": 292, "flock": 73, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "fallocate": 285,
    "getdents": 78, "getdents64": 217, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "renameat": 264,
    "renameat2": 316, "mkdir": 83, "mkdirat": 258, "rmdir": 84, "link": 86, "linkat": 265, "unlink": 87,
    "unlinkat": 263, "readlink": 89, "readlinkat": 267, "umask": 95, "statfs": 137, "fstatfs": 138, "sendfile": 40,
    "copy_file_range": 326, "fadvise64": 221, "readahead": 187, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193,
    "listxattr": 194, "llistxattr": 195, "flistxattr": 196,
    # waiting
    "pipe": 22, "pipe2": 293, "poll": 7, "ppoll": 271, "select": 23, "pselect6": 270, "epoll_create": 213,
    "epoll_create1": 291, "epoll_ctl": 233, "epoll_wait": 232, "epoll_pwait": 281, "eventfd": 284, "eventfd2": 290,
    "timerfd_create": 283, "timerfd_settime": 286, "timerfd_gettime": 287, "signalfd": 282, "signalfd4": 289,
    # memory
    "mmap": 9, "munmap": 11, "mprotect": 10, "mremap": 25, "brk": 12, "madvise": 28, "mincore": 27, "msync": 26,
    "mlock": 149, "mlock2": 325, "munlock": 150, "membarrier": 324, "get_mempolicy": 239, "set_mempolicy": 238,
    "mbind": 237,
    # threads
    "futex": 202, "set_robust_list": 273, "set_tid_address": 218, "rseq": 334, "gettid": 186, "getpid": 39,
    "getppid": 110, "getpgid": 121, "getpgrp": 111, "getsid": 124, "getcpu": 309, "sched_yield": 24,
    "sched_getaffinity": 204, "sched_getattr": 315, "sched_getparam": 143, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147, "sched_rr_get_interval": 148, "getpriority": 140,
    "exit": 60, "exit_group": 231, "restart_syscall": 219, "arch_prctl": 158, "wait4": 61, "waitid": 247,
    # signals, time
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigpending": 127, "rt_sigreturn": 15, "rt_sigsuspend": 130,
    "rt_sigtimedwait": 128, "sigaltstack": 131, "pause": 34, "alarm": 37, "getitimer": 36, "setitimer": 38,
    "timer_create": 222, "timer_settime": 223, "timer_gettime": 224, "timer_getoverrun": 225, "timer_delete": 226,
    "nanosleep": 35, "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229, "gettimeofday": 96,
    "time": 201, "times": 100,
    # system
    "uname": 63, "sysinfo": 99, "getrusage": 98, "getrlimit": 97, "setrlimit": 160, "getrandom": 318, "getuid": 102,
    "geteuid": 107, "getgid": 104, "getegid": 108, "getresuid": 118, "getresgid": 120, "getgroups": 115,
    "capget": 125,
    # judged by their arguments, or for programs alone
    "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "tkill": 200, "tgkill": 234, "prlimit64": 302,
    "sched_setaffinity": 203, "prctl": 157, "ioctl": 16, "fcntl": 72,
}  # fmt: skip

AARCH64: dict[str, int] = {
    # files
    "read": 63, "write": 64, "openat": 56, "close": 57, "fstat": 80, "newfstatat": 79, "statx": 291, "lseek": 62,
    "pread64": 67, "pwrite64": 68, "readv": 65, "writev": 66, "preadv": 69, "pwritev": 70, "preadv2": 286,
    "pwritev2": 287, "faccessat": 48, "dup": 23, "dup3": 24, "flock": 32, "fsync": 82, "fdatasync": 83,
    "ftruncate": 46, "fallocate": 47, "getdents64": 61, "getcwd": 17, "chdir": 49, "fchdir": 50, "renameat": 38,
    "renameat2": 276, "mkdirat": 34, "linkat": 37, "unlinkat": 35, "readlinkat": 78, "umask": 166, "statfs": 43,
    "fstatfs": 44, "sendfile": 71, "copy_file_range": 285, "fadvise64": 223, "readahead": 213, "getxattr": 8,
    "lgetxattr": 9, "fgetxattr": 10, "listxattr": 11, "llistxattr": 12, "flistxattr": 13,
    # waiting
    "pipe2": 59, "ppoll": 73, "pselect6": 72, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22,
    "eventfd2": 19, "timerfd_create": 85, "timerfd_settime": 86, "timerfd_gettime": 87, "signalfd4": 74,
    # memory
    "mmap": 222, "munmap": 215, "mprotect": 226, "mremap": 216, "brk": 214, "madvise": 233, "mincore": 232,
    "msync": 227, "mlock": 228, "mlock2": 284, "munlock": 229, "membarrier": 283, "get_mempolicy": 236,
    "set_mempolicy": 237, "mbind": 235,
    # threads
    "futex": 98, "set_robust_list": 99, "set_tid_address": 96, "rseq": 293, "gettid": 178, "getpid": 172,
    "getppid": 173, "getpgid": 155, "getsid": 156, "getcpu": 168, "sched_yield": 124, "sched_getaffinity": 123,
    "sched_getattr": 275, "sched_getparam": 121, "sched_getscheduler": 120, "sched_get_priority_max": 125,
    "sched_get_priority_min": 126, "sched_rr_get_interval": 127, "getpriority": 141, "exit": 93, "exit_group": 94,
    "restart_syscall": 128, "wait4": 260, "waitid": 95,
    # signals, time
    "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigpending": 136, "rt_sigreturn": 139, "rt_sigsuspend": 133,
    "rt_sigtimedwait": 137, "sigaltstack": 132, "getitimer": 102, "setitimer": 103, "timer_create": 107,
    "timer_settime": 110, "timer_gettime": 108, "timer_getoverrun": 109, "timer_delete": 111, "nanosleep": 101,
    "clock_nanosleep": 115, "clock_gettime": 113, "clock_getres": 114, "gettimeofday": 169, "times": 153,
    # system
    "uname": 160, "sysinfo": 179, "getrusage": 165, "getrlimit": 163, "setrlimit": 164, "getrandom": 278,
    "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "getresuid": 148, "getresgid": 150,
    "getgroups": 158, "capget": 90,
    # judged by their arguments, or for programs alone
    "clone": 220, "execve": 221, "kill": 129, "tkill": 130, "tgkill": 131, "prlimit64": 261,
    "sched_setaffinity": 122, "prctl": 167, "ioctl": 29, "fcntl": 25,
}  # fmt: skip

"""Runs one command with a folder mounted at a fixed path. Standard library only.

Started as `python -I -S fixed_path.py FOLDER PLACE -- ARGV…`. Some compilers write the absolute
path of a source into what they make, and no flag maps it (nvcc hashes it into the names of symbols
with internal linkage). So the work folder is mounted at PLACE, in a mount namespace that only the
command and its children are in: every build sees the same path, two at once included, and other
processes see nothing of it. Without root, a user namespace with the same user is added.

Exits with 125 and the reason in one line if the kernel does not allow it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
REFUSED = 125
"""The exit code if the folder cannot be mounted."""


def main() -> None:
    """Mount, go there, become the command."""
    folder, place, argv = sys.argv[1], sys.argv[2], sys.argv[4:]
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    try:
        os.makedirs(place, mode=0o755, exist_ok=True)
        if not stat.S_ISDIR(os.lstat(place).st_mode):
            raise NotADirectoryError(0, "not a folder", place)
        separate(libc)
        mount(libc, "none", "/", MS_REC | MS_PRIVATE)
        mount(libc, folder, place, MS_BIND | MS_REC)
        os.chdir(place)
    except OSError as error:
        os.write(2, f"no folder can be mounted at {place}: {error.strerror}\n".encode())
        sys.exit(REFUSED)
    # A change of namespaces may clear what ties us to the guard above us.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(137)
    try:
        os.execvpe(argv[0], argv, os.environ)  # noqa: S606 - this is where the argv becomes a process
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
        sys.exit(126 if isinstance(error, PermissionError) else 127)


def separate(libc: ctypes.CDLL) -> None:
    """Enter a mount namespace of our own. Raises OSError if that is not allowed."""
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS if user == 0 else CLONE_NEWNS | CLONE_NEWUSER
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, f"no mount namespace: {os.strerror(number).lower()}")
    if flags & CLONE_NEWUSER:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def mount(libc: ctypes.CDLL, source: str, target: str, flags: int) -> None:
    """Call mount(2); raises OSError."""
    if libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None):
        number = ctypes.get_errno()
        raise OSError(number, f"no mount: {os.strerror(number).lower()}")


if __name__ == "__main__":
    main()

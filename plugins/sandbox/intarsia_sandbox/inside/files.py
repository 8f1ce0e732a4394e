"""The file system that a command sees: a root of its own, on which what it may read is mounted, and one folder that it may write."""

from __future__ import annotations

import os

from intarsia_sandbox.inside import kernel

HOME, TEMPORARY = "/sandbox/work", "/sandbox/tmp"
USER = 1000
DEVICES = ("null", "full", "random", "urandom")
"""Not zero: mapped, it is memory that no process's size shows."""
PLACES = ("/sys", "/mnt", "/media", "/srv", "/opt", "/run")
"""Folders over one of which the new root is built: in a mount namespace of its own, nobody else sees it."""
MOST_FILES = 16_384
KEPT = {  # What a mount forbids stays forbidden on top of it: as the kernel's flag for each of statvfs's.
    os.ST_RDONLY: kernel.MS_RDONLY,
    os.ST_NOSUID: kernel.MS_NOSUID,
    os.ST_NODEV: kernel.MS_NODEV,
    os.ST_NOEXEC: kernel.MS_NOEXEC,
    os.ST_NOATIME: kernel.MS_NOATIME,
    os.ST_NODIRATIME: kernel.MS_NODIRATIME,
    os.ST_RELATIME: kernel.MS_RELATIME,
}


def build(paths: list[str], links: dict[str, str], file_bytes: int) -> bool:
    """Make the new root the root. `paths` are mounted for reading at their own places, `links` (path to target) are made; what is written into the work folder takes at most
    `file_bytes`. Whether there is a /proc, which shows the command's own processes alone: a kernel whose /proc is partly covered gives none."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = next(
        place for place in PLACES if os.path.isdir(place) and not any(path == place or path.startswith(place + "/") for path in paths)
    )
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    for path in paths:
        _show(path, root)
    os.makedirs(f"{root}/dev", exist_ok=True)
    for device in DEVICES:
        target = f"{root}/dev/{device}"
        _touch(target)
        kernel.mount(f"/dev/{device}", target, None, kernel.MS_BIND)
        _forbid(target, kernel.MS_NOSUID | kernel.MS_NOEXEC)
    for path, target in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        if not os.path.lexists(root + path):
            os.symlink(target, root + path)
    os.makedirs(f"{root}/sandbox")
    options = f"size={max(file_bytes, 4096)},nr_inodes={MOST_FILES},mode=755"
    kernel.mount("tmpfs", f"{root}/sandbox", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for folder in (HOME, TEMPORARY):
        os.mkdir(root + folder, 0o700)
        os.chown(root + folder, USER, USER)
    if not os.path.lexists(f"{root}/tmp"):
        os.symlink(TEMPORARY, f"{root}/tmp")
    os.makedirs(f"{root}/etc", exist_ok=True)
    _write(f"{root}/etc/passwd", f"sandbox:x:{USER}:{USER}::{HOME}:/bin/sh\n".encode())
    _write(f"{root}/etc/group", f"sandbox:x:{USER}:\n".encode())
    has_proc = _mount_proc(root)
    kernel.enter_root(root)
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    return has_proc


def _show(path: str, root: str) -> None:
    """Mount a file or folder, with all that is mounted below it, for reading."""
    target = root + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _touch(target)
    kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
    for mounted in _mounts(target):
        _forbid(mounted, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)


def _forbid(target: str, flags: int) -> None:
    """Forbid something on a mount, and keep what it forbids already: a user namespace may not take that away."""
    there = os.statvfs(target).f_flag
    for given, flag in KEPT.items():
        flags |= flag if there & given else 0
    kernel.mount("none", target, None, kernel.MS_REMOUNT | kernel.MS_BIND | flags)


def _mounts(folder: str) -> list[str]:
    """The mount points at and below a folder."""
    with open("/proc/self/mountinfo", "rb") as file:
        points = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file]
    return list(dict.fromkeys(point for point in points if point == folder or point.startswith(folder + "/")))


def _mount_proc(root: str) -> bool:
    os.makedirs(f"{root}/proc", exist_ok=True)
    try:
        # For reading: where there is one user, what lies there of the first process is the command's to write.
        flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("proc", f"{root}/proc", "proc", flags, "subset=pid")
    except kernel.KernelError:
        return False
    return True


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def write_files(folder: str, files: dict[str, bytes], owner: int | None) -> None:
    """Put the command's files into its folder. Names are relative and were checked by the parent; no link is there yet that could lead elsewhere."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        made = folder
        for part in name.split("/")[:-1]:
            made = os.path.join(made, part)
            if not os.path.isdir(made):
                os.mkdir(made, 0o700)
                if owner is not None:
                    os.chown(made, owner, owner)
        _write(path, content)
        if owner is not None:
            os.chown(path, owner, owner)


def open_input(folder: str, content: bytes) -> int:
    """A file with the command's standard input, open for reading, that has no name any more."""
    path = os.path.join(folder, ".input")
    _write(path, content)
    reading = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return reading

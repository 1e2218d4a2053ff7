"""Compile the device code and the host code of one CUDA source side by side, and link them.

nvcc compiles them one after the other.  Here, two of them run at the same time.  One compiles the device code to a
fatbin.  The other one compiles the host code and checks only the syntax of the device code, so the fatbin in its object
has no kernels.  That fatbin is then replaced, which gives the object that a single nvcc would have made.  If the parts
do not fit together, the ordinary command compiles the source.

    python side_by_side.py STEM OBJCOPY -- DEVICE... -- HOST... -- LINK... -- ORDINARY...

runs in the staging folder.  It imports only what Python has loaded anyway, because it is started for each build.
"""

import os
import sys

DEVICE = "device"  # the folder of the device code and of nvcc's intermediate files for it
FATBIN = f"{DEVICE}/device.fatbin"
SECTION = ".nv_fatbin"  # of the host object: its only content is the fatbin
SEPARATOR = "--"
_DEVICE_LOG, _HOST_LOG, _LINK_LOG = f"{DEVICE}/log.txt", "host.log", "link.log"
_SIGTERM = 15
_PTXAS = b"ptxas "


def main(arguments: list[str]) -> int:
    """Compile both parts and link them, or print why one of them failed and return 1."""
    (stem, objcopy), device, host, link, ordinary = _split(arguments)
    device_part, host_part = _start(device, _DEVICE_LOG), _start(host, _HOST_LOG)
    host_failed = _failed(host_part)
    if host_failed and _at_ptxas(_lines(_HOST_LOG)) is None:
        _end(device_part)  # the ordinary command would not have begun with it
    device_failed = _failed(device_part)
    failed = device_failed or host_failed
    if not failed and not (_are_of_one_source(stem) and _put_fatbin(objcopy, stem)):
        os.execvp(ordinary[0], ordinary)  # noqa: S606  # it writes the log, too
    log = joined_log(_lines(_HOST_LOG), _own_lines(_DEVICE_LOG), device_failed=device_failed, host_failed=host_failed)
    if not failed:
        failed = _failed(_start(link, _LINK_LOG))
        log += _own_lines(_LINK_LOG)
    sys.stdout.buffer.writelines(log)
    return int(failed)


def joined_log(host: list[bytes], device: list[bytes], *, device_failed: bool, host_failed: bool) -> list[bytes]:
    """Return the lines that the ordinary command would have printed.

    Both parts print the messages of the compiler's front end for device code.  The host part then prints ptxas's line
    for device code without kernels, in whose place the ordinary command prints the messages of code generation.
    """
    at = _at_ptxas(host)
    if at is None and host_failed:
        return host  # the ordinary command stops at the same error
    before, rest = host[:at], [] if at is None else host[at:]
    after = rest[next((index for index, line in enumerate(rest) if not line.startswith(_PTXAS)), len(rest)) :]
    equal = [host_line == device_line for host_line, device_line in zip(before, device, strict=False)]
    first = next((index for index, is_equal in enumerate(equal) if not is_equal), len(equal))  # of the preprocessor
    own, device = before[first:], device[first:]
    most = min(len(own), len(device))
    shared = next(count for count in range(most, -1, -1) if own[len(own) - count :] == device[:count])
    return [*before, *device[shared:], *([] if device_failed else after)]


def _at_ptxas(host: list[bytes]) -> int | None:
    """Return the index of ptxas's line in the output of the host part; None if that part failed before it."""
    return next((index for index, line in enumerate(host) if line.startswith(_PTXAS)), None)


def _split(arguments: list[str]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument == SEPARATOR:
            groups.append([])
        else:
            groups[-1].append(argument)
    return groups


def _start(command: list[str], log: str) -> int:
    """Start a program that writes its output to a file, and return its process id."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [(os.POSIX_SPAWN_OPEN, 1, log, flags, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)]
    return os.posix_spawnp(command[0], command, os.environ, file_actions=actions)


def _failed(process: int) -> bool:
    return os.waitpid(process, 0)[1] != 0


def _end(process: int) -> None:
    """End a process and what it has started."""
    children = _content(f"/proc/{process}/task/{process}/children").split()
    try:
        os.kill(process, _SIGTERM)
    except ProcessLookupError:
        return
    for child in children:
        _end(int(child))


def _are_of_one_source(stem: str) -> bool:
    """Whether both parts have the same identity and kernels.

    nvcc takes the identity from the text of the source, and registers the kernels by their mangled names.
    """
    name, identity = f"{stem}.cudafe1.stub.c", _content(f"{stem}.module_id")
    device, host = (
        [line for line in _lines(path) if not line.startswith(b"# ")] for path in (f"{DEVICE}/{name}", name)
    )
    return bool(host) and device == host and identity == _content(f"{DEVICE}/{stem}.module_id") != b""


def _put_fatbin(objcopy: str, stem: str) -> bool:
    """Replace the fatbin of the host object by that of the device code; False if the object is not as expected."""
    target, placeholder = f"{stem}.o", f"{DEVICE}/placeholder.fatbin"
    if _failed(
        _start([objcopy, "--dump-section", f"{SECTION}={placeholder}", target, f"{DEVICE}/unchanged.o"], os.devnull)
    ):
        return False
    content = _content(placeholder)
    if not content or content != _content(f"{stem}.fatbin"):
        return False
    return not _failed(_start([objcopy, "--update-section", f"{SECTION}={FATBIN}", target], os.devnull))


def _own_lines(path: str) -> list[bytes]:
    """Return the lines of a part, without nvcc's own warnings, which every part prints."""
    return [line for line in _lines(path) if not line.startswith(b"nvcc warning")]


def _lines(path: str) -> list[bytes]:
    return _content(path).splitlines(keepends=True)


def _content(path: str) -> bytes:
    """Return the content of a file, or nothing if there is none: a compiler that is a wrapper may keep no files."""
    try:
        with open(path, "rb") as stream:  # noqa: PTH123  # pathlib takes longer to import than the rest
            return stream.read()
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tell machines and GPUs apart without naming them: salted hashes of the host's name and of the GPU's UUID."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
from pathlib import Path

from pytest_fa.records.environment import Gpu, find_gpu, read_gpu_settings
from pytest_fa.records.record import MachineIdentity

SALT_NAME = "identity-salt"  # in the cache folder; it never leaves this machine, so that no name can be guessed
SALT_BYTES = 16
SHOWN = 12  # hexadecimal digits of a hash


def read_machine(cache: Path) -> MachineIdentity | None:
    """Return this machine and its first visible GPU; None if no salt can be kept in the cache folder."""
    salt = _salt(cache)
    if salt is None:
        return None
    gpu = find_gpu()
    if gpu is None:
        return MachineIdentity(_hash(salt, platform.node()))
    return MachineIdentity(_hash(salt, platform.node()), _hash(salt, gpu.uuid), *read_gpu_settings(gpu.uuid))


def hash_of_gpu(cache: Path, gpu: Gpu) -> str | None:
    """Return the salted hash of a GPU's UUID; None if no salt can be kept in the cache folder."""
    salt = _salt(cache)
    return _hash(salt, gpu.uuid) if salt else None


def _hash(salt: str, name: str) -> str:
    return hashlib.sha256(f"{salt} {name}".encode()).hexdigest()[:SHOWN]


def _salt(cache: Path) -> str | None:
    """Return the salt of this user's cache, which the first process writes; later ones read the same."""
    path = cache / SALT_NAME
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            scratch.write_text(secrets.token_hex(SALT_BYTES), encoding="ascii")
            scratch.chmod(0o600)
            with contextlib.suppress(FileExistsError):
                os.link(scratch, path)  # fails if another process was faster
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)

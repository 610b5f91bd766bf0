"""One entry of the compile cache as bytes: packed, and unpacked only where its digest is right.

Magic, digest, length of the description, description as JSON, code. The digest covers the key and
everything after itself, so that an entry under another's name is no entry.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

MAGIC = b"NXRTCUB3"
"""Changes with the layout: an older one is never read."""

MAX_ENTRY_NBYTES = 64 * 1024**2
"""Far above any cubin; what is larger is no entry."""

_DIGEST_NBYTES = 32
_LENGTH_NBYTES = 4
_DESCRIPTION = len(MAGIC) + _DIGEST_NBYTES + _LENGTH_NBYTES


@dataclass(frozen=True)
class EntryInfo:
    """Describe an entry for a person.

    Args:
        source: the source's name.
        arch: the target.
        artefact: "cubin" or "ptx".
        defines: as "NAME=VALUE", separated by blanks.
        compiler: NVRTC's version.
        created: seconds since 1970.
    """

    source: str = ""
    arch: str = ""
    artefact: str = ""
    defines: str = ""
    compiler: str = ""
    created: float = 0.0


@dataclass(frozen=True)
class Entry:
    """Hold checked code and its description."""

    info: EntryInfo
    code: bytes


@dataclass(frozen=True)
class Refusal:
    """Say why something is not an entry."""

    reason: str


def pack(key: str, info: EntryInfo, code: bytes) -> bytes:
    """Return an entry's bytes."""
    description = json.dumps(asdict(info), sort_keys=True).encode()
    content = len(description).to_bytes(_LENGTH_NBYTES, "little") + description + code
    return MAGIC + _digest(key, content) + content


def unpack(key: str, data: bytes) -> Entry | Refusal:
    """Return the entry that was packed under this key, or why there is none."""
    if not data:
        return Refusal("it is empty")
    if not data.startswith(MAGIC):
        return Refusal("it is not an entry of this layout")
    content = data[len(MAGIC) + _DIGEST_NBYTES :]
    if data[len(MAGIC) : len(MAGIC) + _DIGEST_NBYTES] != _digest(key, content):
        return Refusal("its digest does not match its content")
    begin = _DESCRIPTION + int.from_bytes(content[:_LENGTH_NBYTES], "little")
    if begin >= len(data):
        return Refusal("it holds no code")
    try:
        info = EntryInfo(**json.loads(data[_DESCRIPTION:begin]))
    except (TypeError, ValueError):
        return Refusal("its description cannot be read")
    return Entry(info, data[begin:])


def _digest(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return digest.digest()

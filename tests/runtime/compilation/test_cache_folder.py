"""What lies in the cache's folder is not trusted, and the folder stays small and tidy."""

import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nxrt.runtime.compilation import cache_entry, cache_folder
from nxrt.runtime.compilation.cache_entry import EntryInfo, pack
from nxrt.runtime.compilation.cache_folder import QUARANTINE, CacheFolder
from nxrt.runtime.compilation.cache_upkeep import check_entries, clear, prune, tidy
from nxrt.runtime.compilation.compile_cache import CacheStats, CompileCache
from tests.helpers.cache_processes import OPTIONS, StubCompiler, code_of, source_of

NBYTES = 8_000


def cache_at(tmp_path: Path, **settings: int) -> CompileCache:
    compiler = StubCompiler(tmp_path / "journal", 0, NBYTES)
    return CompileCache(compiler, tmp_path / "cache", **settings)


def filled(tmp_path: Path) -> Path:
    """Return the one entry of a fresh cache."""
    cache_at(tmp_path).get(source_of("text"), OPTIONS)
    (entry,) = (tmp_path / "cache").glob("*.cubin")
    return entry


def quarantined(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / QUARANTINE).glob("*"))


def ask_again(tmp_path: Path) -> CacheStats:
    """Let a new cache, as of a new process, answer; return what it did."""
    cache = cache_at(tmp_path)
    assert cache.get(source_of("text"), OPTIONS) == code_of("text", NBYTES)
    return cache.stats


def test_a_bit_flipped_anywhere_is_found(tmp_path: Path) -> None:
    entry = filled(tmp_path)
    whole = entry.read_bytes()
    for place in range(0, len(whole), 64):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place // 64 % 8
        entry.write_bytes(damaged)
        stats = ask_again(tmp_path)
        assert (stats.compilations, stats.rejected_entries, stats.quarantined_entries) == (1, 1, 1)
    assert 0 < len(quarantined(tmp_path)) <= 16
    assert ask_again(tmp_path).disk_hits == 1


def test_an_entry_cut_off_anywhere_is_found(tmp_path: Path) -> None:
    entry = filled(tmp_path)
    whole = entry.read_bytes()
    for percent in range(100):
        entry.write_bytes(whole[: len(whole) * percent // 100])
        assert ask_again(tmp_path).rejected_entries == 1
    entry.write_bytes(whole + b"\0")
    assert ask_again(tmp_path).rejected_entries == 1


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "somebody's file").write_text("kept")


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is limited in length
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
        Path("socket").rename(path.name)
    finally:
        os.chdir(here)


def make_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "whole entry")


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(cache_entry.MAX_ENTRY_NBYTES + 1)


def make_writable(path: Path) -> None:
    path.write_bytes((path.parent.parent / "whole entry").read_bytes())
    path.chmod(0o666)


def make_foreign(path: Path) -> None:
    path.write_bytes((path.parent.parent / "whole entry").read_bytes())
    os.chown(path, os.geteuid() + 1, -1)


MAKERS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "folder": lambda path: path.mkdir(),
    "filled folder": make_folder,
    "symbolic link": make_link,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "socket": make_socket,
    "too large": make_large,
    "writable by others": make_writable,
    "of another user": make_foreign,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_entry_of_ours_is_refused_replaced_and_reported_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    entry = filled(tmp_path)
    entry.rename(tmp_path / "whole entry")
    MAKERS[kind](entry)
    with caplog.at_level(logging.WARNING):
        stats = ask_again(tmp_path)
    assert (stats.compilations, stats.disk_hits, stats.rejected_entries) == (1, 0, 1)
    assert stats.quarantined_entries == 1
    assert len(caplog.records) == 1
    assert entry.is_file()
    assert not entry.is_symlink()
    assert ask_again(tmp_path).disk_hits == 1


def test_an_owner_other_than_this_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root can test by giving the file away; here for everybody else."""
    entry = filled(tmp_path)
    real = os.fstat

    def disowned(file: int) -> os.stat_result:
        status = real(file)
        if not stat.S_ISREG(status.st_mode):
            return status
        fields = list(status)
        fields[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", disowned)
    refusal = CacheFolder(tmp_path / "cache").read(entry.name)
    assert isinstance(refusal, cache_entry.Refusal)
    assert "owned by user" in refusal.reason


def test_what_cannot_be_moved_aside_is_left_and_memory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = filled(tmp_path)
    entry.unlink()
    make_folder(entry)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "not here")

    monkeypatch.setattr(os, "rename", refuse)
    stats = ask_again(tmp_path)
    assert (stats.quarantined_entries, stats.unwritten_entries) == (0, 1)
    assert (entry / "somebody's file").read_text() == "kept"
    assert sum("going on in memory" in record.message for record in caplog.records) == 1


def test_quarantine_is_bounded_and_lets_the_oldest_go(tmp_path: Path) -> None:
    entry = filled(tmp_path)
    for number in range(40):
        entry.write_bytes(f"damage {number}".encode())
        os.utime(entry, (number, number))
        ask_again(tmp_path)
    kept = {path.read_text() for path in quarantined(tmp_path)}
    assert kept == {f"damage {number}" for number in range(24, 40)}


def test_a_new_folder_is_this_users_alone(tmp_path: Path) -> None:
    entry = filled(tmp_path)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = filled(tmp_path)
    (tmp_path / "cache").chmod(0o770)
    cache = cache_at(tmp_path)
    with caplog.at_level(logging.WARNING):
        for text in ("text", "other", "text"):
            cache.get(source_of(text), OPTIONS)
    assert (cache.stats.compilations, cache.stats.memory_hits, cache.stats.disk_hits) == (2, 1, 0)
    assert len(caplog.records) == 1
    assert "others can write to it; chmod go-w" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == [entry]


def test_a_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with caplog.at_level(logging.WARNING):
        stats = ask_again(tmp_path)
    assert (stats.compilations, stats.disk_hits) == (1, 0)
    assert len(caplog.records) == 1
    assert f"owned by user {user}" in caplog.text


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "fsync", "replace", "mkdir"])
def test_a_disk_that_takes_nothing_costs_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
) -> None:
    """Full, read-only, over quota, not permitted; and a rename that a network disk refuses."""
    real = getattr(os, call)

    def failing(*args: object, **kwargs: object) -> object:
        is_write = call != "open" or (isinstance(args[1], int) and args[1] & os.O_CREAT)
        if is_write:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    cache = cache_at(tmp_path)
    with caplog.at_level(logging.WARNING):
        for text in ("text", "other", "text", "other"):
            assert cache.get(source_of(text), OPTIONS) == code_of(text, NBYTES)
    assert (cache.stats.compilations, cache.stats.memory_hits) == (2, 2)
    assert len(caplog.records) == 1
    assert "going on in memory" in caplog.text
    monkeypatch.undo()
    assert not list((tmp_path).glob("cache/*"))


def test_a_folder_that_is_deleted_meanwhile_is_made_again(tmp_path: Path) -> None:
    cache = cache_at(tmp_path)
    cache.get(source_of("text"), OPTIONS)
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    (tmp_path / "cache").rmdir()
    cache.get(source_of("other"), OPTIONS)
    assert len(check_entries(CacheFolder(tmp_path / "cache"))) == 1


def add(tmp_path: Path, name: str, used: float, nbytes: int = 1000) -> Path:
    """Put a file into the folder that was used that many seconds after 1970."""
    path = tmp_path / "cache" / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(bytes(nbytes))
    os.utime(path, (used, used))
    return path


def name_of(number: int, version: str = "3-") -> str:
    return f"{version}{number:064x}.cubin"


def test_pruning_takes_what_was_used_longest_ago(tmp_path: Path) -> None:
    paths = [add(tmp_path, name_of(number), used=1000 + number) for number in range(10)]
    assert prune(CacheFolder(tmp_path / "cache"), 5000) == 6
    assert [path.exists() for path in paths] == [False] * 6 + [True] * 4


def test_pruning_takes_other_versions_first_and_leaves_strangers(tmp_path: Path) -> None:
    current = add(tmp_path, name_of(1), used=1)
    older = [
        add(tmp_path, name_of(n, version), used=100 + n) for n, version in ((2, ""), (3, "2-"))
    ]
    stranger = add(tmp_path, "notes.txt", used=0, nbytes=100_000)
    assert prune(CacheFolder(tmp_path / "cache"), 1500) == 2
    assert [path.exists() for path in (current, stranger, *older)] == [True, True, False, False]


def test_what_was_just_written_is_never_pruned(tmp_path: Path) -> None:
    kept = add(tmp_path, name_of(1), used=1)
    add(tmp_path, name_of(2), used=2)
    assert prune(CacheFolder(tmp_path / "cache"), 100, keep=kept.name) == 1
    assert kept.exists()


def test_within_the_limit_nothing_is_pruned(tmp_path: Path) -> None:
    add(tmp_path, name_of(1), used=1)
    assert prune(CacheFolder(tmp_path / "cache"), 1000) == 0


def test_a_hit_makes_an_entry_young_again(tmp_path: Path) -> None:
    entry = filled(tmp_path)
    os.utime(entry, (1, 1))
    ask_again(tmp_path)
    assert time.time() - entry.stat().st_mtime < 60
    before = time.time() - 600
    os.utime(entry, (before, before))
    ask_again(tmp_path)
    assert entry.stat().st_mtime == pytest.approx(before, abs=1)


def test_the_cache_keeps_its_limit_and_counts_what_went(tmp_path: Path) -> None:
    cache = cache_at(tmp_path, max_nbytes=5 * NBYTES)
    for number in range(20):
        cache.get(source_of(f"text {number}"), OPTIONS)
    files = CacheFolder(tmp_path / "cache").files()
    assert sum(file.nbytes for file in files) <= 5 * NBYTES
    assert cache.stats.evicted_entries == 20 - len(files)


def test_an_entry_larger_than_the_limit_is_not_written(tmp_path: Path) -> None:
    cache = cache_at(tmp_path, max_nbytes=NBYTES)
    cache.get(source_of("text"), OPTIONS)
    assert cache.stats.unwritten_entries == 1
    assert not list((tmp_path / "cache").iterdir())


def test_a_reader_keeps_an_entry_that_is_pruned_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = filled(tmp_path)
    real = cache_folder._foreign

    def prune_now(status: os.stat_result) -> str:
        if stat.S_ISREG(status.st_mode):
            entry.unlink(missing_ok=True)
        return real(status)

    monkeypatch.setattr(cache_folder, "_foreign", prune_now)
    assert ask_again(tmp_path).disk_hits == 1


def test_what_dead_writers_left_is_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    old = time.time() - 60
    dead = [add(tmp_path, "tmp-0123456789abcdef", old), add(tmp_path, f"3-{1:064x}.lock", old)]
    young = add(tmp_path, "tmp-0123456789abcde0", time.time())
    of_old_layout = add(tmp_path, "tmpabcd1234.tmp", old)
    held = [add(tmp_path, "tmp-0123456789abcde1", old), add(tmp_path, f"3-{2:064x}.lock", old)]
    with held[0].open("rb") as first, held[1].open("rb") as second:
        for file in (first, second):
            fcntl.flock(file, fcntl.LOCK_EX)
        assert tidy(CacheFolder(tmp_path / "cache")) == 2
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in (young, of_old_layout, *held))


def test_writing_tidies_up(tmp_path: Path) -> None:
    dead = add(tmp_path, "tmp-0123456789abcdef", time.time() - 60)
    cache_at(tmp_path).get(source_of("text"), OPTIONS)
    assert not dead.exists()


def test_clearing_removes_what_is_the_caches_own(tmp_path: Path) -> None:
    entry = filled(tmp_path)
    entry.write_bytes(b"damaged")
    ask_again(tmp_path)
    add(tmp_path, name_of(7, ""), used=1)
    stranger = add(tmp_path, "notes.txt", used=1)
    held = add(tmp_path, f"3-{2:064x}.lock", used=1)
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        num_removed, nbytes = clear(CacheFolder(tmp_path / "cache"))
    assert num_removed == 3
    assert nbytes > NBYTES
    assert {path for path in (tmp_path / "cache").iterdir() if path.is_file()} == {stranger, held}


def test_a_description_that_makes_no_sense_is_no_entry() -> None:
    good = pack("key", EntryInfo("k.cu"), b"code")
    assert isinstance(cache_entry.unpack("key", good), cache_entry.Entry)
    for data in (pack("key", EntryInfo("k.cu"), b""), good[:44]):
        assert isinstance(cache_entry.unpack("key", data), cache_entry.Refusal)
    assert isinstance(cache_entry.unpack("other", good), cache_entry.Refusal)

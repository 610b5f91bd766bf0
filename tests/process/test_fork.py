"""A child that is forked before CUDA is used may use it; one that is forked after is refused."""

from pathlib import Path

import pytest

from tests.process.launching import run_child

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

WAYS = ("return", "sys.exit", "os._exit")


@pytest.mark.parametrize("way", WAYS)
def test_asking_for_a_device_leaves_it_to_forked_children(child_cache_dir: Path, way: str) -> None:
    ended = run_child("fork_before_use", child_cache_dir, way)
    assert (ended.err, ended.code, ended.out) == ("", 0, "child 0\n")


@pytest.mark.parametrize("way", WAYS)
def test_forked_children_are_refused_cuda_and_release_nothing(
    child_cache_dir: Path, way: str
) -> None:
    ended = run_child("fork_after_use", child_cache_dir, way)
    assert (ended.err, ended.code, ended.out) == ("", 0, "child 0\n")


def test_forked_children_do_not_wait_for_a_run_of_another_thread(child_cache_dir: Path) -> None:
    ended = run_child("fork_after_use", child_cache_dir, "beside run")
    assert (ended.err, ended.code, ended.out) == ("", 0, "child 0\n")


def test_forked_children_wait_for_no_lock_of_another_thread(child_cache_dir: Path) -> None:
    ended = run_child("fork_after_use", child_cache_dir, "beside each lock")
    assert (ended.err, ended.code, ended.out) == ("", 0, "")


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_workers_use_cuda_unless_they_are_forked(child_cache_dir: Path, method: str) -> None:
    ended = run_child("multiprocess", child_cache_dir, method)
    assert (ended.err, ended.code, ended.out) == ("", 0, "0\n0\n")

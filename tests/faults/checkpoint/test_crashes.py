"""Killed and failing saves by the hundred: what was reported as saved is there, whole, afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
TRIALS = int(os.environ.get("HPCTRAIN_TRIALS", "12"))

pytestmark = pytest.mark.timeout(1000)

# Stands between the process and libc. Only operations on checkpoint files count; the kernel does the rest.
FAULTY_FILES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int count;

/* Counted from the moment that a fault is asked for. */
static int next_place(void) {
  const char *fault = getenv("CHECKPOINT_FAULT");
  return fault && *fault ? __sync_add_and_fetch(&count, 1) : 0;
}

int checkpoint_operations(void) { return count; }

static int is_ours(const char *path) {
  return strstr(path, ".partial-") || strstr(path, "/step-");
}

static int fd_is_ours(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return is_ours(path) || strstr(path, "checkpoint-faults");
}

/* 1: the fault named `name` is due at this operation. */
static int due(const char *name, int place) {
  const char *fault = getenv("CHECKPOINT_FAULT");
  size_t length = strlen(name);
  if (!fault || strncmp(fault, name, length) || fault[length] != ':') return 0;
  int wanted = atoi(fault + length + 1);  /* 0: at every operation */
  return wanted == 0 || wanted == place;
}

static int failing(int place) {
  if (due("kill-before", place)) raise(SIGKILL);
  if (due("eio", place)) { errno = EIO; return 1; }
  if (due("enospc", place)) { errno = ENOSPC; return 1; }
  return 0;
}

#define WRITE(name) \
  ssize_t name(int fd, const void *data, size_t bytes, off_t offset) { \
    static ssize_t (*real)(int, const void *, size_t, off_t); \
    static int interrupted; \
    if (!real) real = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, #name); \
    if (!fd_is_ours(fd)) return real(fd, data, bytes, offset); \
    int place = next_place(); \
    if (failing(place)) return -1; \
    if (due("eintr", place) && (interrupted ^= 1)) { errno = EINTR; return -1; } \
    if (due("short", place) && bytes > 3) bytes = bytes > 70000 ? 65537 : bytes / 2 + 1; \
    ssize_t done = real(fd, data, bytes, offset); \
    if (due("kill-after", place)) raise(SIGKILL); \
    return done; \
  }
WRITE(pwrite)
WRITE(pwrite64)

/* A short one takes the first of the parts. */
#define WRITE_PARTS(name, more, given) \
  ssize_t name(int fd, const struct iovec *parts, int count, off_t offset more) { \
    static ssize_t (*real)(int, const struct iovec *, int, off_t more); \
    static int interrupted; \
    if (!real) real = (ssize_t (*)(int, const struct iovec *, int, off_t more))dlsym(RTLD_NEXT, #name); \
    if (!fd_is_ours(fd)) return real(fd, parts, count, offset given); \
    int place = next_place(); \
    if (failing(place)) return -1; \
    if (due("eintr", place) && (interrupted ^= 1)) { errno = EINTR; return -1; } \
    struct iovec first = parts[0]; \
    if (due("short", place)) { \
      if (first.iov_len > 3) first.iov_len = first.iov_len > 70000 ? 65537 : first.iov_len / 2 + 1; \
      parts = &first; \
      count = 1; \
    } \
    ssize_t done = real(fd, parts, count, offset given); \
    if (due("kill-after", place)) raise(SIGKILL); \
    return done; \
  }
#define NOTHING
#define FLAGS , int flags
#define GIVEN , flags
WRITE_PARTS(pwritev, NOTHING, NOTHING)
WRITE_PARTS(pwritev64, NOTHING, NOTHING)
WRITE_PARTS(pwritev2, FLAGS, GIVEN)
WRITE_PARTS(pwritev64v2, FLAGS, GIVEN)

#define TRUNCATE(name) \
  int name(int fd, off_t length) { \
    static int (*real)(int, off_t); \
    if (!real) real = (int (*)(int, off_t))dlsym(RTLD_NEXT, #name); \
    if (!fd_is_ours(fd)) return real(fd, length); \
    int place = next_place(); \
    if (failing(place)) return -1; \
    int done = real(fd, length); \
    if (due("kill-after", place)) raise(SIGKILL); \
    return done; \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ALLOCATE(name) \
  int name(int fd, int mode, off_t offset, off_t length) { \
    static int (*real)(int, int, off_t, off_t); \
    if (!real) real = (int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, #name); \
    if (!fd_is_ours(fd)) return real(fd, mode, offset, length); \
    int place = next_place(); \
    if (failing(place)) return -1; \
    int done = real(fd, mode, offset, length); \
    if (due("kill-after", place)) raise(SIGKILL); \
    return done; \
  }
ALLOCATE(fallocate)
ALLOCATE(fallocate64)

int fsync(int fd) {
  static int (*real)(int);
  if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
  if (!fd_is_ours(fd)) return real(fd);
  int place = next_place();
  if (failing(place)) return -1;
  int done = real(fd);
  if (due("kill-after", place)) raise(SIGKILL);
  return done;
}

int rename(const char *from, const char *to) {
  static int (*real)(const char *, const char *);
  if (!real) real = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
  if (!is_ours(from)) return real(from, to);
  int place = next_place();
  if (failing(place)) return -1;
  int done = real(from, to);
  if (due("kill-after", place)) raise(SIGKILL);
  return done;
}

int unlink(const char *path) {
  static int (*real)(const char *);
  if (!real) real = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
  if (!strstr(path, "/step-")) return real(path);  /* the clean-up after a failure is not made to fail */
  int place = next_place();
  if (failing(place)) return -1;
  int done = real(path);
  if (due("kill-after", place)) raise(SIGKILL);
  return done;
}
"""


@pytest.fixture(scope="module")
def faulty_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not there to build the library that makes file operations fail")
    directory = tmp_path_factory.mktemp("library")
    (directory / "faulty.c").write_text(FAULTY_FILES)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", "faulty.so", "faulty.c", "-ldl"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return directory / "faulty.so"


def run_trials(name: str, tmp_path: Path, *, preload: Path | None = None, trials: int = 0) -> dict[str, Any]:
    directory = tmp_path / "checkpoint-faults"
    directory.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.checkpoint.trials", str(directory), name, str(trials)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["left"] == []
    assert result["kept"] == 2
    return dict(result)


def test_a_save_killed_at_any_moment_leaves_the_newest_reported_checkpoint_whole(tmp_path: Path) -> None:
    result = run_trials("killed-at-random", tmp_path, trials=TRIALS)
    assert result["saves"] > 0
    assert result["partials"] > 0  # some kills did hit a save half-way


def test_a_save_killed_at_each_file_operation_is_there_whole_or_not_at_all(
    tmp_path: Path, faulty_files: Path
) -> None:
    result = run_trials("killed-at-each-operation", tmp_path, preload=faulty_files)
    assert len(result["operations"]) == 2
    assert min(result["operations"]) > 10
    assert result["outcomes"] == [0, 1]


def test_an_operation_that_fails_is_an_error_and_leaves_the_older_checkpoint(
    tmp_path: Path, faulty_files: Path
) -> None:
    result = run_trials("failing-operations", tmp_path, preload=faulty_files)
    assert result["failures"] > 40
    assert result["unharmed"] > 2  # of operations that a save can do without


def test_short_and_interrupted_writes_are_gone_on_with(tmp_path: Path, faulty_files: Path) -> None:
    assert run_trials("interrupted-and-short-writes", tmp_path, preload=faulty_files)["steps"] == [1, 2]

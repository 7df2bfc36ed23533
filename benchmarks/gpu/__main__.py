"""`python -m benchmarks.gpu`: checks hpctrain on a GPU by comparison with the CPU. Prints a line for each check.

Without a GPU only the parts that need none are run, and each line says what was skipped. Results are written if there
is a GPU, or if --output is given.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import page
from benchmarks.gpu.launch import REPOSITORY
from benchmarks.gpu.outcome import Outcome

RESULTS = REPOSITORY / "benchmarks" / "results" / "gpu.json"
NAMES = (
    "device", "streams", "pinned", "ahead", "fp16", "bf16", "memory", "checkpoints", "reductions", "updater", "profile",
    "digits", "gloo", "nccl", "sharded", "recomputed",
    "largest",
)  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    names = arguments.only.split(",") if arguments.only else list(NAMES)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"check-gpu: there is no check {unknown[0]!r}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    about: dict[str, Any] = {}
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-", dir=arguments.directory) as scratch:
        for found in run(
            names, device=arguments.device, scratch=Path(scratch), timeout_s=arguments.timeout_s
        ):
            if isinstance(found, Outcome):
                outcomes.append(found)
                print(found.line(), flush=True)
            elif not about:
                about = found
                print(headline(about), flush=True)
    failed = [outcome.name for outcome in outcomes if outcome.status == "failed"]
    counted = ", ".join(
        f"{sum(outcome.status == status for outcome in outcomes)} {status}"
        for status in ("passed", "failed", "skipped")
    )
    print(counted + (f": {', '.join(failed)} failed" if failed else ""))
    output = arguments.output
    if (
        output is None and about.get("device") == "cuda" and not arguments.only
    ):  # a selection of checks does not replace the recorded results
        output = RESULTS
    if output is not None:
        _write(about, outcomes, output=output)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--device", default="auto", help="auto: the first GPU, or the CPU if there is none")
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="time limit of one check; default: 300"
    )
    parser.add_argument(
        "--directory", type=Path, help="directory for at most 2 GB of files, which are removed at the end"
    )
    parser.add_argument(
        "--output", type=Path, metavar="PATH",
        help="JSON to write; by default, with a GPU and all checks, benchmarks/results/gpu.json, then docs/gpu.md",
    )  # fmt: skip
    return parser


def headline(about: dict[str, Any]) -> str:
    where = (
        f"{about['gpu']}, CUDA {about['cuda']}"
        if about["device"] == "cuda"
        else "no GPU: only what needs none"
    )
    return f"{where}; torch {about['torch']}, Python {about['python']}"


def run(
    names: Sequence[str], *, device: str, scratch: Path, timeout_s: float
) -> Iterator[Outcome | dict[str, Any]]:
    """Runs the checks in a child process. Yields the child's description of the machine, then the outcome of each
    check. If a child ends early, or exceeds `timeout_s` in a check, that check fails and a new child runs the remaining
    ones."""
    left = list(names)
    number = 0
    while left:
        number += 1
        command = [sys.executable, "-m", "benchmarks.gpu.child", device, str(scratch / str(number)), *left]
        child = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        late = threading.Event()
        said_s = [time.monotonic()]
        watch = threading.Thread(target=_watch, args=(child, said_s, timeout_s, late), daemon=True)
        watch.start()
        before = len(left)
        assert child.stdout is not None
        for line in child.stdout:
            said_s[0] = time.monotonic()
            try:
                document = json.loads(line)
            except ValueError:
                print(line, end="", file=sys.stderr)  # of a library
                continue
            if "about" in document:
                yield document["about"]
            else:
                outcome = Outcome.from_json(document["outcome"])
                left.remove(outcome.name)
                yield outcome
        code = child.wait()
        if left and (len(left) == before or code != 3):
            name = left.pop(0)
            text = (
                f"still running after {timeout_s:g} s"
                if late.is_set()
                else f"the process ended with code {code}"
            )
            yield Outcome(name=name, status="failed", text=text)


def _watch(
    child: subprocess.Popen[str], said_s: list[float], timeout_s: float, late: threading.Event
) -> None:
    while child.poll() is None:
        if time.monotonic() - said_s[0] > timeout_s:
            late.set()
            # The processes of its session. The launcher is one of them, and its ranks end with it.
            os.killpg(child.pid, signal.SIGKILL)
            return
        time.sleep(0.2)


def _write(about: dict[str, Any], outcomes: Sequence[Outcome], *, output: Path) -> None:
    content = {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": _commit(),
        "machine": about,
        "checks": [outcome.as_json() for outcome in outcomes],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {output}")
    if output.resolve() == RESULTS:
        page.refresh(REPOSITORY / "docs" / "gpu.md", content)


def _commit() -> str:
    """Returns the commit of the tree. An archive has it in a file, since it contains no git repository."""
    carried = REPOSITORY / "COMMIT"
    if carried.exists():
        return carried.read_text().strip()

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return git("rev-parse", "HEAD") + (
        "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    )


if __name__ == "__main__":
    sys.exit(main())

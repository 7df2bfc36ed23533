"""`python -m tests.gpu`: compares hpctrain on a GPU with the CPU. Prints a line for each check.

Without a GPU only the parts that need none are run, and each line says what was left out. Results are written if there
is a GPU, or if --output is given. The checks are the tests of this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import page

REPOSITORY = page.REPOSITORY
RESULTS = REPOSITORY / "benchmarks" / "results" / "gpu.json"
STATUSES = ("passed", "failed", "skipped")


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    about: dict[str, Any] = {}
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hpctrain-gpu-", dir=options.directory) as scratch:
        for found in run(options, scratch=Path(scratch)):
            if "about" in found:
                if not about:
                    about = found["about"]
                    print(headline(about), flush=True)
            else:
                outcomes.append(found)
                print(line_of(found), flush=True)
    failed = [outcome["name"] for outcome in outcomes if outcome["status"] == "failed"]
    counts = (f"{sum(one['status'] == status for one in outcomes)} {status}" for status in STATUSES)
    print(", ".join(counts) + (f": {', '.join(failed)} failed" if failed else ""))
    output = options.output
    if output is None and about.get("device") == "cuda" and not options.only:
        output = RESULTS  # which a selection of checks does not replace
    if output is not None:
        _write({"when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "commit": _commit(), "machine": about,
                "checks": outcomes}, output=output)  # fmt: skip
    return 1 if failed or not outcomes else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--only", metavar="NAME,NAME", help="names of checks; docs/gpu.md lists them")
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


def run(options: argparse.Namespace, *, scratch: Path) -> Iterator[dict[str, Any]]:
    """Runs the checks with pytest in a process of their own. Yields its description of the machine, `about`, and the
    outcome of each check.

    The process ends after a check that failed, since after an error of CUDA nothing can be checked in it; another one
    runs the remaining checks. If it ends by itself, or exceeds the time limit, the check that was running has failed.
    """
    left: list[str] | None = options.only.split(",") if options.only else None
    for number in range(1000):
        if left == []:
            return
        outcomes = scratch / f"{number}.jsonl"
        words = ["-m", "pytest", "tests/gpu", "--confcutdir=tests/gpu", "-p", "no:cacheprovider", "-q"]
        words += ["-W", "default"]  # of a torch that the tests have not seen
        words += [
            f"--basetemp={scratch / str(number)}",
            f"--timeout={options.timeout_s}",
            "--timeout-method=thread",
        ]
        words += [f"--device={options.device}", f"--outcomes={outcomes}"]
        words += [f"--checks={','.join(left)}"] if left is not None else []
        log = scratch / f"{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=REPOSITORY, stdout=output, stderr=output, start_new_session=True
            )
        names: list[str] = []
        ended = False
        for found in _lines(outcomes, process):
            if "names" in found:
                names = left = found["names"]
            else:
                ended = found["status"] == "failed"
                left = [name for name in left or () if name != found["name"]]
            yield found
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that a check has left
        if not names:
            tail = log.read_text(errors="replace")[-2000:]
            print(f"check-gpu: no check was run, exit code {process.returncode}:\n{tail}", file=sys.stderr)
            return
        if left and not ended:
            text = f"the process ended with code {process.returncode}: it failed, or took over {options.timeout_s:g} s"
            yield {
                "name": left.pop(0),
                "status": "failed",
                "text": text,
                "figures": {},
                "needs_gpu": [],
                "seconds": 0.0,
            }


def _lines(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yields the documents that the process appends to the file, until it has ended."""
    read = 0
    while True:
        is_last = process.poll() is not None
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines[read:]:
            yield json.loads(line)
        read = len(lines)
        if is_last:
            return
        time.sleep(0.2)


def headline(about: Mapping[str, Any]) -> str:
    on_gpu = about["device"] == "cuda"
    where = f"{about['gpu']}, CUDA {about['cuda']}" if on_gpu else "no GPU: only what needs none"
    return f"{where}; torch {about['torch']}, Python {about['python']}"


def line_of(outcome: Mapping[str, Any]) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in outcome["figures"].items())
    left_out = ", ".join(outcome["needs_gpu"])
    return f"{outcome['name']:<15} {outcome['status']:<7} {outcome['text']}" + (
        f"; skipped for want of a GPU: {left_out}" if left_out else ""
    ) + (f" [{figures}]" if figures else "")  # fmt: skip


def _write(content: Mapping[str, Any], *, output: Path) -> None:
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

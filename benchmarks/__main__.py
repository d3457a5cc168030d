"""Run every case without and with the patches, each run in its own process.

    python -m benchmarks [--out FOLDER] [--cache FOLDER] [--shape e2b|e4b|tiny] [--rounds N]

A finished case is a line of ``OUT/cases.jsonl``, and the next run skips it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .cases import CASES, ORDER
from .report import Results, write

ROOT = Path(__file__).resolve().parent.parent


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _child(module: str, *arguments: str, patched: bool, log: Path, timeout: float) -> Any:
    """The last JSON line of a process, and why the process failed (``None``: it did not)."""
    environment = {**os.environ, "GEMMA4_COMPAT": "1" if patched else "0"}
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    with log.open("a") as errors:
        errors.write(f"\n== {' '.join(command[2:])} patched={patched}\n")
        errors.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        ended = None
        try:
            output, _ = process.communicate(timeout=timeout)
            if process.returncode:
                ended = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ended = f"not finished after {timeout:.0f} s"
        except BaseException:
            process.kill()
            process.wait()
            raise
    lines = [line for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    return (json.loads(lines[-1]) if lines else {}), ended


def _append(file: Path, entry: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _prepare(args: argparse.Namespace, file: Path, log: Path) -> str:
    """Write the checkpoint unless it exists; return its shape."""
    known = Results(file).machine
    shape = known.get("shape", args.shape) if args.shape == "auto" else args.shape
    if known and known["shape"] != shape:
        sys.exit(f"{file} holds cases of {known['shape']}: choose another --out")
    _say("writing the checkpoint, unless it exists ...")
    start = time.monotonic()
    arguments = (str(args.cache), shape)
    machine, ended = _child("checkpoint", *arguments, patched=False, log=log, timeout=900)
    if ended or not machine:
        sys.exit(f"no checkpoint: {ended}; see {log}")
    if not known:
        _append(file, machine)
    _say(f"{machine['shape']} on {machine['device']}, {time.monotonic() - start:.0f} s")
    if not machine["device"]:
        _say("No GPU: the cases run on the CPU, and their figures mean nothing.")
    return str(machine["shape"])


def _run(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    file, log = args.out / "cases.jsonl", args.out / "log.txt"
    shape = _prepare(args, file, log)
    done = {(e["case"], e["patched"], e["round"]): e["seconds"] for e in Results(file).cases}
    rounds = range(args.rounds)
    wanted = [(n, p, r) for r in rounds for n, p in ORDER if not args.only or n in args.only]
    failed = {(e["case"], e["patched"]) for e in Results(file).cases if e["error"]}
    for number, (name, patched, round_) in enumerate(wanted, 1):
        if (name, patched, round_) in done or (name, patched) in failed:
            continue
        if time.monotonic() - begun > args.budget:
            _say(f"the budget of {args.budget:.0f} s is used up; run the same command to go on")
            break
        title = f"[{number}/{len(wanted)}] {CASES[name].title}, "
        title += "patched" if patched else "unpatched"
        left = len([key for key in wanted[number - 1 :] if key not in done])
        if done:
            title += f"; about {left * statistics.median(done.values()) / 60:.1f} min left"
        _say(title)
        start = time.monotonic()
        arguments = (name, shape, str(args.cache))
        options = {"patched": patched, "log": log, "timeout": args.timeout}
        try:
            result, ended = _child("cases", *arguments, **options)
        finally:
            for scratch in (args.cache / shape).glob("offload-*"):
                shutil.rmtree(scratch, ignore_errors=True)
        seconds = round(time.monotonic() - start, 1)
        if not result or (result["error"] or "").startswith("import:"):
            sys.exit(f"the libraries cannot be imported: {result.get('error', ended)}; see {log}")
        entry = {"case": name, "patched": patched, "round": round_, "seconds": seconds}
        entry |= {"figures": {}, "error": None, "notes": {}, **result}
        entry["error"] = entry["error"] or ended
        _append(file, entry)
        done[name, patched, round_] = seconds
        if entry["error"]:
            failed.add((name, patched))
        _say(f"    {seconds:.0f} s {entry['error'] or ''}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="results")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/gemma4-benchmarks"))
    parser.add_argument("--shape", choices=["auto", "e2b", "e4b", "tiny"], default="auto")
    parser.add_argument("--rounds", type=int, default=1, help="runs of every case")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one case")
    parser.add_argument("--report", type=Path, metavar="OUT", help="only write the tables")
    args = parser.parse_args()
    args.out, args.cache = args.out.resolve(), args.cache.resolve()
    if not args.report:
        try:
            _run(args)
        except KeyboardInterrupt:
            _say("interrupted; run the same command to go on")
            sys.exit(130)
    print(write(args.report or args.out))


if __name__ == "__main__":
    main()

"""Mutation testing of the rules, the decoding loop and the KV cache: `make mutants`.

A place of the source is changed, and the tests that run its line must fail. Places are drawn at random (seeded), and of
the ways to change one, one. pytest collects once; each mutant is a fork of that process in which the changed function's
code is exchanged, so that it costs the time of its tests alone. A run that was stopped continues where it was. The
tests of a line are found by one run of all under coverage.

`python -m tests.mutation.run --sample 100` draws 100 places a room; 0 takes all.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import random
import resource
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import FunctionType
from typing import Any

import coverage
import pytest

from tests.mutation.places import Place, Source

ROOT = Path(__file__).resolve().parents[2]
_LOOP = (
    "decode", "batching", "draft", "tree", "step_recorder", "late_guess", "validation", "rng", "distribution",
)  # fmt: skip
ROOMS = {
    "rules": ("core/rules/*.py",),
    "loop": tuple(f"core/{name}.py" for name in _LOOP),
    "cache": ("core/engine/kv_cache/*.py",),
}
TESTS = (
    "tests/core/rules",
    "tests/core/constraints",
    "tests/core/engine/kv_cache",
    *(f"tests/core/test_{name}.py" for name in ("batching", "decode", "distribution", "draft")),
    *(f"tests/core/test_{name}.py" for name in ("frames", "same_tokens", "trace", "tree", "validation")),
)
LONGEST = 4.0  # seconds of a test that is asked: longer ones are left out
BUDGET = 60.0  # seconds of tests a mutant, the shortest first


class Results:
    """What has been found, one line of JSON a mutant; a later run continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self.known = {row["mutant"]: row for row in map(json.loads, lines)}

    def add(self, row: dict[str, Any]) -> None:
        self.known[row["mutant"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class Mutants:
    """The pytest plugin that runs mutants instead of tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.failed = ""
        self.folder = ROOT / options.folder
        self.results = Results(self.folder / "results.jsonl")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        assert not session.testsfailed, "tests can't be collected"
        self.items = {item.nodeid: item for item in session.items}
        self.sources = {
            path: (room, Source(ROOT, path))
            for room, patterns in ROOMS.items()
            for pattern in patterns
            for path in sorted(str(one.relative_to(ROOT)) for one in ROOT.glob(pattern))
        }
        self.map = self._mapped()
        drawn = self._drawn()
        print(f"{len(drawn)} mutants, {sum(len(s.places) for _, s in self.sources.values())} places", file=sys.stderr)
        late = time.monotonic() + self.options.seconds
        for room, place, way in drawn:
            if time.monotonic() < late:
                self._mutant(room, place, way)
        names = [self._name(place, way) for _, place, way in drawn]
        report([self.results.known[name] for name in names if name in self.results.known])
        return True

    # ---- which tests run which line

    def _mapped(self) -> dict[str, Any]:
        """{"lines": file -> line -> tests, "seconds": test -> seconds}, from a run in a fork under coverage. Tests that
        an earlier run has mapped, or --map-seconds of the processor don't reach, are left as they are."""
        path = self.folder / "map.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"lines": {}, "seconds": {}}
        missing = [item for node, item in self.items.items() if node not in known["seconds"]]
        random.Random(self.options.seed).shuffle(missing)
        if missing and self.options.map_seconds:
            pid = os.fork()
            if not pid:
                os._exit(self._map(path, known, missing))
            assert os.waitpid(pid, 0)[1] == 0, "the tests can't be mapped"
            known = json.loads(path.read_text(encoding="utf-8"))
        return dict(known)

    def _map(self, path: Path, known: dict[str, Any], items: list[pytest.Item]) -> int:
        files = [source.file for _, source in self.sources.values()]
        data = coverage.Coverage(data_file=None, include=files, config_file=False)
        signal.signal(signal.SIGPROF, _too_long)
        data.start()
        began = time.process_time()
        for index, item in enumerate(items):
            data.switch_context(item.nodeid)
            begun, self.failed = time.process_time(), ""
            signal.setitimer(signal.ITIMER_PROF, 5 * LONGEST)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=(items[index + 1 :] or [None])[0])
            signal.setitimer(signal.ITIMER_PROF, 0)
            # the seconds of a test that fails as it is are too many to ask it
            known["seconds"][item.nodeid] = 1e9 if self.failed else time.process_time() - begun
            if index % 100 == 99:
                print(f"{index + 1} of {len(items)} tests are mapped", file=sys.stderr, flush=True)
            if time.process_time() - began > self.options.map_seconds:
                break
        data.stop()
        found = data.get_data()
        for file in files:
            lines = known["lines"].setdefault(str(Path(file).relative_to(ROOT)), {})
            for line, tests in found.contexts_by_lineno(file).items():
                lines[str(line)] = [*lines.get(str(line), []), *(one for one in tests if one)]
        path.write_text(json.dumps(known), encoding="utf-8")
        return 0

    def _tests(self, place: Place) -> list[str]:
        """Those that run the place's line, the shortest first, within the budget."""
        seconds, result, spent = self.map["seconds"], [], 0.0
        nodes = self.map["lines"].get(place.path, {}).get(str(place.line), [])
        for node in sorted(nodes, key=lambda node: seconds.get(node, math.inf)):
            if node in self.items and seconds.get(node, math.inf) <= LONGEST and spent < BUDGET:
                result.append(node)
                spent += seconds[node]
        return result

    # ---- mutants

    def _drawn(self) -> list[tuple[str, Place, int]]:
        rooms: dict[str, list[Place]] = defaultdict(list)
        for room, source in self.sources.values():
            rooms[room] += source.places
        result = []
        for room, places in rooms.items():
            rng = random.Random(f"{self.options.seed} {room}")
            rng.shuffle(places)
            drawn = places[: self.options.sample or None]
            result += [(room, place, random.Random(place.name).randrange(len(place.changes))) for place in drawn]
        random.Random(self.options.seed).shuffle(result)
        return [one for one in result if self.options.only in one[1].path]

    def _name(self, place: Place, way: int) -> str:
        text = self.sources[place.path][1].text
        return f"{place.name}:{way}:{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def _mutant(self, room: str, place: Place, way: int) -> None:
        name = self._name(place, way)
        known = self.results.known.get(name)
        if known is not None and not (self.options.again and known["outcome"] in ("survived", "not run")):
            return
        tests = self._tests(place)
        outcome, by = self._forked(place, way, tests) if tests else ("not run", "")
        row = {
            "mutant": name, "room": room, "function": place.function, "outcome": outcome, "by": by, "tests": len(tests),
            "change": place.difference(way),
        }  # fmt: skip
        self.results.add(row)
        mark = "" if outcome in ("killed", "timed out", "crashed") else "  <--"
        print(f"{name} {place.function}: {outcome} {by} | {row['change'][:160]}{mark}", file=sys.stderr, flush=True)

    def _forked(self, place: Place, way: int, tests: list[str]) -> tuple[str, str]:
        expected = sum(self.map["seconds"][one] for one in tests)
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            code = 70
            try:
                limit = int(10 + 3 * expected)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
                resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                code = self._child(place, way, tests)
                os.write(writing, self.failed.encode())
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(code)
        os.close(writing)
        late = time.monotonic() + 120 + 20 * expected
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > late:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        with os.fdopen(reading) as said:
            by = said.read()
        if os.WIFSIGNALED(status):
            which = os.WTERMSIG(status)
            return ("timed out" if which in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM) else "crashed"), ""
        code = os.WEXITSTATUS(status)
        if code == 70:
            raise SystemExit(f"{place.name}: {by}")
        return {0: "survived", 1: "killed", 2: "no function"}[code], by

    def _child(self, place: Place, way: int, tests: list[str]) -> int:
        source = self.sources[place.path][1]
        pairs = source.replaced(source.changed(place, way))
        if not pairs:
            return 0  # compiles to the same code
        gc.unfreeze()  # get_objects does not list what is frozen
        live: dict[Any, list[FunctionType]] = defaultdict(list)
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename == source.file:
                live[one.__code__].append(one)
        found = 0
        for before, after in pairs:
            for function in live.get(before, []):
                function.__code__ = after
                found += 1
        if not found:
            return 2
        for index, test in enumerate(tests):
            after_it = self.items[tests[index + 1]] if index + 1 < len(tests) else None
            item = self.items[test]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after_it)
            if self.failed:
                return 1
        return 0


def _too_long(_: int, __: object) -> None:
    raise AssertionError("the test takes too long to be asked")


def interval(killed: int, of: int) -> tuple[float, float]:
    """Wilson's, 95 %."""
    z, share = 1.96, killed / of
    centre = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return centre - half, centre + half


def report(rows: list[dict[str, Any]]) -> None:
    rooms = {room: [row for row in rows if row["room"] == room] for room in ROOMS}
    for room, some in {**rooms, "all": rows}.items():
        if not some:
            continue
        dead = sum(row["outcome"] in ("killed", "timed out", "crashed") for row in some)
        low, high = interval(dead, len(some))
        print(
            f"{room}: {dead} of {len(some)} killed, {100 * dead / len(some):.1f} % ({100 * low:.1f}-{100 * high:.1f})",
            file=sys.stderr,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100, help="places a room; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a path: mutants of these files alone")
    parser.add_argument("--again", action="store_true", help="survivors of an earlier run once more")
    parser.add_argument("--map-seconds", type=float, default=1e6, help="for finding the tests of each line")
    parser.add_argument("--slow", action="store_true", help="tests marked slow, too")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files or folders")
    parser.add_argument("--seconds", type=float, default=1e6, help="by the clock, after which no mutant is begun")
    parser.add_argument("--folder", default="build/mutants", help="of results.jsonl and map.json")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a process with threads can't be forked safely
    flags = ["-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no", "-p", "no:terminal", "--timeout=0"]
    chosen = [] if options.slow else ["-m", "not slow"]
    return int(pytest.main([*flags, *chosen, *(str(ROOT / one) for one in options.tests)], plugins=[Mutants(options)]))


if __name__ == "__main__":
    sys.exit(main())

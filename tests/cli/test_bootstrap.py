"""`python3 -m app` on a small clone with one made-up dependency: what is made, when, and what passes through.

Must not reach any package registry: the dependency's wheel is built here and found in a folder.
"""

import ast
import base64
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import pytest

from app import __main__ as bootstrap

CLONE = Path(bootstrap.__file__).resolve().parent.parent
WAIT_SECONDS = 100
EXIT_CODE = 7

COMMAND_LINE = f"""
import json, os, signal, sys
import countermand_leaf

def main():
    print(json.dumps({{"leaf": countermand_leaf.VERSION, "prefix": sys.prefix, "pid": os.getpid(), "words": sys.argv[1:]}}), flush=True)
    if sys.argv[1] == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        print("ready", flush=True)
        signal.pause()
    sys.exit({EXIT_CODE})
"""

PROJECT = """
[project]
name = "countermand"
dependencies = ["countermand-leaf[extra]>=1,<2"]
optional-dependencies.dev = ["countermand[embedded]", "pytest>=1"]
"""


class Bench:
    """A clone to run in, the folder of wheels it may install from, and the variables it sees."""

    def __init__(self, clone: Path, wheels: Path) -> None:
        self.clone = clone
        self.environment = clone / ".venv"
        self.stamp = self.environment / "countermand.stamp"
        self.lock = clone / "requirements.lock"
        self.variables = {
            "PATH": str(wheels),  # no uv there, and nothing else either
            "HOME": str(wheels),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
        }

    def start(self, *words: str, before: str = "", **variables: str) -> "subprocess.Popen[str]":
        """Start a verb, in an interpreter that first runs the statements `before`."""
        how = (
            ["-c", f"import runpy, sys; {before}; sys.argv[0] = 'app'; runpy.run_module('app', run_name='__main__')"]
            if before
            else ["-m", "app"]
        )
        return subprocess.Popen(
            [sys.executable, *how, *words],
            cwd=self.clone,
            env=self.variables | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, before: str = "", **variables: str) -> tuple[int, str, str]:
        """Run a verb to its end; returns the exit code, stdout and stderr."""
        with self.start(*words, before=before, **variables) as process:
            out, err = process.communicate(timeout=WAIT_SECONDS)
        return process.returncode, out, err


def build_wheel(folder: Path, version: str) -> str:
    """Write the smallest wheel that pip takes and return its hash."""
    info = f"countermand_leaf-{version}.dist-info"
    files = {
        "countermand_leaf.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: countermand-leaf\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={digest(text)},{len(text)}\n" for name, text in files.items()) + f"{info}/RECORD,,\n"
    wheel = folder / f"countermand_leaf-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(name, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def digest(text: str) -> str:
    """Return a hash as wheels' RECORD files write it."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def said(out: str) -> dict[str, Any]:
    """Read what the command line printed."""
    words: dict[str, Any] = json.loads(out.splitlines()[0])
    return words


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with two versions of the dependency."""
    folder = tmp_path_factory.mktemp("wheels")
    hashes = {version: build_wheel(folder, version) for version in ("1.0", "1.1")}
    (folder / "hashes.json").write_text(json.dumps(hashes))
    return folder


def pin(lock: Path, wheels: Path, version: str) -> None:
    """Write a lock of the one dependency."""
    known = json.loads((wheels / "hashes.json").read_text())[version]
    lock.write_text(f"countermand-leaf=={version} \\\n    --hash=sha256:{known}\n")


@pytest.fixture(scope="module")
def bare(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a clone without an environment."""
    clone = tmp_path_factory.mktemp("bare") / "clone"
    (clone / "app" / "cli").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(CLONE / "app" / name, clone / "app" / name)
    (clone / "app" / "cli" / "__init__.py").write_text(COMMAND_LINE)
    (clone / "pyproject.toml").write_text(PROJECT)
    pin(clone / "requirements.lock", wheels, "1.0")
    pin(clone / "requirements-dev.lock", wheels, "1.0")
    return clone


@pytest.fixture(scope="module")
def twins(bare: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str, str]]]:
    """Start two at once on a bare clone; returns the clone with its environment and how both ended."""
    clone = shutil.copytree(bare, tmp_path_factory.mktemp("twins") / "clone")
    bench = Bench(clone, wheels)
    first, second = bench.start("demo", "--option"), bench.start("test")
    ends = []
    for process in (first, second):
        with process:
            out, err = process.communicate(timeout=WAIT_SECONDS)
            ends.append((process.returncode, out, err))
    return clone, ends


@pytest.fixture
def bench(bare: Path, wheels: Path, tmp_path: Path) -> Bench:
    """Make a bare clone of the test's own."""
    return Bench(shutil.copytree(bare, tmp_path / "clone"), wheels)


@pytest.fixture
def made(twins: tuple[Path, object], wheels: Path, tmp_path: Path) -> Bench:
    """Make a clone with its environment of the test's own."""
    return Bench(shutil.copytree(twins[0], tmp_path / "clone", symlinks=True), wheels)


def test_environment_is_made_for_both_when_two_start_at_once(twins: tuple[Path, list[tuple[int, str, str]]]) -> None:
    """Neither breaks the other, words and exit codes pass through, and messages stay off stdout."""
    clone, ends = twins
    assert [code for code, _, _ in ends] == [EXIT_CODE, EXIT_CODE], ends
    assert [said(out)["words"] for _, out, _ in ends] == [["demo", "--option"], ["test"]]
    assert {said(out)["prefix"] for _, out, _ in ends} == {str(clone / ".venv")}
    assert all(len(out.splitlines()) == 1 for _, out, _ in ends)
    assert any("waiting for another process" in err for _, _, err in ends)


def test_nothing_is_installed_when_the_stamp_holds(made: Bench) -> None:
    """The second start asks nobody and says nothing."""
    code, out, err = made.run("demo", PIP_FIND_LINKS="/nowhere")
    assert (code, err) == (EXIT_CODE, "")
    assert said(out)["leaf"] == "1.0"


def test_lock_is_installed_again_when_it_changed(made: Bench, wheels: Path) -> None:
    """Pulling a new lock is all that it takes."""
    pin(made.lock, wheels, "1.1")
    code, out, _ = made.run("demo")
    assert code == EXIT_CODE
    assert said(out)["leaf"] == "1.1"
    assert made.stamp.read_text().split() == [hashlib.sha256(made.lock.read_bytes()).hexdigest(), "requirements.lock"]


def test_environment_is_made_anew_when_a_package_has_gone(made: Bench) -> None:
    """One line tells of it; the next start clears what is left, as it does after an installer that was killed."""
    next(made.environment.rglob("countermand_leaf.py")).unlink()
    code, _, err = made.run("demo")
    assert (code, err.count("\n")) == (2, 1)
    assert "countermand_leaf has gone" in err
    left_over = made.environment / "left-over"
    left_over.touch()
    code, out, _ = made.run("demo")
    assert code == EXIT_CODE
    assert said(out)["leaf"] == "1.0"
    assert not left_over.exists()


def test_start_is_refused_when_a_file_is_not_the_one_locked(made: Bench) -> None:
    """Whoever serves other bytes under the same version gets nothing run."""
    made.lock.write_text(f"countermand-leaf==1.1 --hash=sha256:{'0' * 64}\n")
    code, out, err = made.run("demo")
    assert (code, out) == (2, "")
    assert "could not install requirements.lock" in err.splitlines()[-1]
    assert made.stamp.read_text() == "unfinished\n"


def test_interpreter_is_used_as_it_is_when_it_has_everything(bench: Bench, wheels: Path, tmp_path: Path) -> None:
    """An activated environment, or a container, needs no second one; a version out of range does."""
    with zipfile.ZipFile(wheels / "countermand_leaf-1.1-py3-none-any.whl") as archive:
        archive.extractall(tmp_path / "site")
    code, out, err = bench.run("demo", PYTHONPATH=str(tmp_path / "site"))
    assert (code, err) == (EXIT_CODE, "")
    assert said(out)["leaf"] == "1.1"
    assert not bench.environment.exists()


def test_command_is_handed_over_when_this_is_no_clone(bench: Bench, tmp_path: Path) -> None:
    """An installed package has no pyproject.toml beside it, and nothing is made beside an installed package."""
    (bench.clone / "pyproject.toml").unlink()
    code, _, err = bench.run("demo")
    assert code == 1
    assert "No module named 'countermand_leaf'" in err
    assert not bench.environment.exists()


def test_signal_reaches_the_command_when_the_environment_was_entered(made: Bench) -> None:
    """The process that was started is the process that serves: a container's SIGTERM needs no forwarding."""
    with made.start("wait") as process:
        lines = cast("IO[str]", process.stdout)
        assert json.loads(lines.readline())["pid"] == process.pid
        assert lines.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 9


def test_environments_python_is_run_when_asked_for(made: Bench) -> None:
    """The workshop's verbs find their tools wherever they were installed."""
    code, out, _ = made.run("python", "-c", "import sys; print(sys.prefix); sys.exit(3)")
    assert (code, out) == (3, f"{made.environment}\n")


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("sys.version_info = (3, 9, 2)", "Python 3.11 or newer is needed, this is 3.9"),
        ("sys.modules['venv'] = None", f"apt-get install python3.{sys.version_info[1]}-venv"),
    ],
)
def test_start_is_refused_in_one_line_when_python_will_not_do(bench: Bench, before: str, line: str) -> None:
    """An old Python, or Debian's without venv, is the person's to change: say what is missing."""
    code, out, err = bench.run("demo", before=before)
    assert (code, out) == (2, "")
    assert line in err.splitlines()[-1]
    assert not bench.environment.exists()


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py"])
def test_older_python_can_read_the_file_when_it_must_be_refused(name: str) -> None:
    """Debian 11 has 3.9: it has to parse these two files before it can say that it is too old."""
    ast.parse((CLONE / "app" / name).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_only_the_standard_library_is_imported_when_nothing_is_installed() -> None:
    """Nothing else is there on a bare clone."""
    tree = ast.parse(Path(bootstrap.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names} == {"app.cli"}


@pytest.mark.parametrize(
    ("requirement", "is_met"),
    [
        ("pytest>=1", True),
        ("pytest[dev] >=1,<99 ; python_version >= '3.11'", True),
        ("pytest>=99", False),
        ("pytest<1", False),
        ("pytest==0.0.0", False),
        ("pytest!=0.0", True),
        ("pytest", True),
        ("PyTest_Asyncio>=0.1", True),
        ("countermand-nowhere>=1", False),
        ("pytest~=9.0", False),
        ("pytest @ file:///pytest.whl", False),
    ],
)
def test_requirement_is_judged_when_an_environment_is_looked_at(requirement: str, *, is_met: bool) -> None:
    """What cannot be read counts as missing: an environment too many does no harm."""
    assert bootstrap._is_installed(requirement) is is_met  # noqa: SLF001 (a rule of its own, and no other door to it)

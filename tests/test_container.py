"""What the container's files promise: who runs, what they may do, where secrets come from. Must not build or run a container.

`make container-proof` does that; hadolint and Compose itself judge the files in `check`.
"""

import json
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.main import VERSION
from app.settings import Settings
from deploy.container_proof import NOT_SHOWN, TRANSLATED, NotShown, Workshop, said_by_compose
from tests.golden import REPOSITORY

DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE_TEXT = (REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {"migrate", "countermand", "toy"}
MAKE_SECRETS = REPOSITORY / "deploy/make-secrets"
SECRETS = {"postgres_password", "owner_database_url", "service_database_url"}
# What names a credential; a build keeps every variable that it was given.
SECRET_NAME = re.compile(r"PASS|SECRET|TOKEN|_KEY|CREDENTIAL|DATABASE_URL")


def instructions(text: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions as word and rest, continued lines joined."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


BUILD = instructions(DOCKERFILE)
FINAL = BUILD[max(place for place, (word, _) in enumerate(BUILD) if word == "FROM") + 1 :]


def rests(word: str, among: list[tuple[str, str]] = BUILD) -> list[str]:
    """Return what follows a word, wherever it stands."""
    return [rest for found, rest in among if found == word]


def image_name(text: str) -> bool:
    """Tell whether this is `name:tag` with a version for a tag, and names no registry's host."""
    return re.fullmatch(r"[a-z0-9]+:[0-9]+(\.[0-9]+)*(-[a-z0-9]+)*", text) is not None


def test_stages_stand_on_one_base_when_it_is_given() -> None:
    """`--build-arg BASE` changes both stages; its default names a version and no host."""
    word, default = BUILD[0]
    assert word == "ARG"
    assert image_name(default.removeprefix("BASE="))
    assert [re.sub(r" AS \w+$", "", stage) for stage in rests("FROM")] == ["${BASE}"] * 2
    assert rests("ARG") == [default], "nothing else can be given, and nothing that is given is kept"


def test_nothing_is_run_in_the_final_stage_when_the_image_is_made() -> None:
    """It takes over the finished environment and no more: no cache, compiler or installer can be left behind."""
    assert [word for word, _ in FINAL if word in {"RUN", "ADD", "ARG", "VOLUME", "SHELL"}] == []
    assert rests("COPY", FINAL) == ["--from=build /opt/countermand /opt/countermand"]


def test_process_is_ours_and_nobody_when_the_image_starts() -> None:
    """A user by number, so that an orchestrator can see that it is not root; no shell between a signal and process 1."""
    assert all(re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", user) for user in rests("USER"))
    assert len(rests("USER")) == 1
    starts = [json.loads(rest) for word in ("ENTRYPOINT", "CMD") for rest in rests(word, FINAL)]
    assert starts == [["countermand"], ["serve"]]
    (health,) = rests("HEALTHCHECK", FINAL)
    assert json.loads(health.partition(" CMD ")[2]) == ["countermand", "health"]


def test_only_named_files_are_copied_when_it_is_built() -> None:
    """A secret or a database that lies in the folder stays out, by what is copied and by what is sent to the builder at all."""
    assert rests("ADD") == []
    sources = {source for rest in rests("COPY") if not rest.startswith("--from=") for source in rest.split()[:-1]}
    ignored = [line for line in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == sources
    assert all((REPOSITORY / source).exists() for source in sources)


def test_every_installed_file_is_checked_when_it_comes_from_outside() -> None:
    """Each install from an index takes hashes from a lock; what was built here needs no index."""
    installs = [command for rest in rests("RUN") for command in rest.split("&&") if " install " in command]
    assert len(installs) == 3
    assert [command for command in installs if "--require-hashes" not in command and "--no-index" not in command] == []
    assert "embedded" not in " ".join(installs)
    for lock in ("requirements.lock", "requirements-build.lock", "requirements-uv.lock"):
        assert any(lock in command for command in installs)


def test_image_holds_no_secret_and_opens_no_door_when_nothing_is_said() -> None:
    """The image sets one setting of the service, and no allow-list: those are the deployment's."""
    variables = re.findall(r"([A-Z_]+)=", " ".join(rests("ENV") + rests("ARG") + rests("LABEL")))
    assert [name for name in variables if SECRET_NAME.search(name)] == []
    assert set(re.findall(r"COUNTERMAND_[A-Z_]+", DOCKERFILE)) == {"COUNTERMAND_HOST"}


def test_version_is_the_same_when_the_image_says_it() -> None:
    """The label, the package and the API's own word."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f'org.opencontainers.image.version="{VERSION}"' in DOCKERFILE
    assert project["version"] == VERSION


def environment(service: dict[str, Any]) -> dict[str, str]:
    """Return a service's variables."""
    found: dict[str, str] = service.get("environment", {})
    return found


@pytest.mark.parametrize("name", sorted(OURS))
def test_service_is_confined_when_it_runs_our_image(name: str) -> None:
    """A read-only root, no capability, nothing gained by a set-uid program, one small place to write, and the image's own user."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    assert service.keys() <= TRANSLATED | NOT_SHOWN, "the proof runs the service as it stands here"
    assert all(volume.endswith(":ro") for volume in service.get("volumes", []))


def test_every_service_is_looked_at_when_one_is_added() -> None:
    """The test above knows all that run our image; the one other is Postgres, by version."""
    assert OURS == {name for name, service in SERVICES.items() if service["image"] == "countermand"} == SERVICES.keys() - {"postgres"}
    assert image_name(SERVICES["postgres"]["image"])
    assert SERVICES["postgres"]["cap_drop"] == ["ALL"]
    assert [name for name, service in SERVICES.items() if {"privileged", "user", "network_mode", "pid"} & service.keys()] == []


def test_secrets_come_from_files_when_a_service_needs_one() -> None:
    """No password stands in the file or in an environment; each service has the one it needs and no other."""
    assert COMPOSE["secrets"] == {name: {"file": f"./secrets/{name}"} for name in SECRETS}
    assert {name: set(service.get("secrets", [])) for name, service in SERVICES.items()} == {
        "postgres": SECRETS,
        "migrate": {"owner_database_url"},
        "countermand": {"service_database_url"},
        "toy": set(),
    }
    for service in SERVICES.values():
        for name, value in environment(service).items():
            if SECRET_NAME.search(name):
                assert name.endswith("_FILE")
                assert value.removeprefix("/run/secrets/") in service["secrets"]
    assert "://" not in re.sub(r"http://127\.0\.0\.1:\d+", "", COMPOSE_TEXT)
    assert "/secrets/" in (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_settings_are_real_when_compose_gives_them() -> None:
    """A misspelt variable would be ignored without a word."""
    given = {name for service in SERVICES.values() for name in environment(service) if name.startswith("COUNTERMAND_")}
    assert given <= {f"COUNTERMAND_{name.upper()}" for name in Settings.model_fields}


def test_egress_is_allowed_to_the_toy_alone_when_the_service_sends() -> None:
    """The allow-list is set in one place, and names one host of this file."""
    lists = {name: environment(service).get("COUNTERMAND_EGRESS_ALLOW") for name, service in SERVICES.items()}
    assert lists == dict.fromkeys(SERVICES) | {"countermand": "toy"}
    assert COMPOSE_TEXT.count("EGRESS_ALLOW") == 1
    assert "toy" in SERVICES


def test_only_this_machine_is_let_in_when_ports_are_published() -> None:
    """Keys travel in clear without a proxy; the database is on a network of its own that leads nowhere."""
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"countermand": ["127.0.0.1:8420:8420"], "toy": ["127.0.0.1:9009:9009"]}
    assert COMPOSE["networks"]["database"] == {"internal": True}
    assert SERVICES["postgres"]["networks"] == SERVICES["migrate"]["networks"] == ["database"]


def test_service_starts_after_the_migration_when_it_has_ended_well() -> None:
    """Nobody serves on a schema that is half made, and the one-shot is not started again."""
    assert SERVICES["countermand"]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}
    assert SERVICES["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert SERVICES["migrate"]["restart"] == "no"


def test_service_has_time_to_end_when_it_is_stopped() -> None:
    """The engine's patience outlasts the service's own, else calls in flight would be killed after all."""
    patience_seconds = int(SERVICES["countermand"]["stop_grace_period"].removesuffix("s"))
    assert patience_seconds > Settings(_env_file=None).grace_seconds


def test_proof_refuses_when_compose_says_what_it_cannot_translate(tmp_path: Path) -> None:
    """What would be passed over in silence would be claimed without having been seen."""
    shop = Workshop(folder=tmp_path, driver="vfs")
    words = said_by_compose(shop, SERVICES["countermand"])
    assert {"--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"} <= set(words)
    with pytest.raises(NotShown, match="cgroup_parent"):
        said_by_compose(shop, {**SERVICES["countermand"], "cgroup_parent": "/"})


def make_secrets(folder: Path) -> dict[str, str]:
    """Run the script and return what it made."""
    subprocess.run([MAKE_SECRETS, folder], check=True, capture_output=True)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_secrets_are_made_once_when_asked_for_again(tmp_path: Path) -> None:
    """A second run keeps the passwords that the database was made with; a lost file is made anew."""
    folder = tmp_path / "kept"
    made = make_secrets(folder)
    assert made.keys() == SECRETS
    assert make_secrets(folder) == made
    (folder / "postgres_password").unlink()
    again = make_secrets(folder)
    assert again.keys() == SECRETS
    assert [name for name in SECRETS if again[name] != made[name]] == ["postgres_password"]


def test_secrets_are_for_their_folders_owner_when_they_are_made(tmp_path: Path) -> None:
    """The container's user has to be able to read the file, nobody else may come as far; no two passwords are alike."""
    folder = tmp_path / "made"
    made = make_secrets(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in made} == {0o444}
    passwords = re.findall(r"[0-9a-f]{48}", " ".join(made.values()))
    assert len(set(passwords)) == len(SECRETS)
    for role in ("owner", "service"):
        form = rf"postgresql://countermand_{role}:[0-9a-f]{{48}}@postgres:5432/countermand\n"
        assert re.fullmatch(form, made[f"{role}_database_url"])

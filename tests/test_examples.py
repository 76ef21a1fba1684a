"""The examples run as their READMEs say, pasted against `dev`; what one copies from them holds. Must not test the service itself."""

import asyncio
import json
import re
import shutil
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from examples.http_tool import HttpTool, NotApplied, http_tool
from examples.onboarding_agent import systems
from examples.saga import Refused, Saga
from tests.conftest import execute, with_database
from tests.docs.playing import PATIENCE_SECONDS, developing, put_interpreter, put_stand_ins, variables_of
from tests.golden import REPOSITORY

SCREEN_LINES = 70
# Agents, systems and commands are processes of their own, a dozen of them one after the other, on a machine that may be busy.
MANY_PROCESSES_SECONDS = 300
WRITTEN_ADDRESS = re.compile(r"http://127\.0\.0\.1:910\d")
EXAMPLES = ("refund_agent", "onboarding_agent")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def variables(cluster_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, str]]:
    """Run `dev` on a database of this file's own and return what it wants exported; each test has sessions of its own."""
    name = f"test_{uuid4().hex}"
    await execute(cluster_url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    async with developing(with_database(cluster_url, name), tmp_path_factory.mktemp("dev")) as told:
        yield variables_of(told)
    await execute(cluster_url, f'DROP DATABASE "{name}" WITH (FORCE)')


def readme_of(example: str) -> str:
    """Return an example's README."""
    return (REPOSITORY / "examples" / example / "README.md").read_text(encoding="utf-8")


@dataclass(slots=True, kw_only=True)
class Desk:
    """Shells in a copy of the examples, their systems running on a port of their own; `lines` is what the systems printed."""

    directory: Path
    environment: dict[str, str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    systems: Process | None = None

    async def start(self, command: str) -> Process:
        """Start pasted lines; what they print is read by whoever started them."""
        moved = WRITTEN_ADDRESS.sub(self.url, command)
        return await asyncio.create_subprocess_exec("sh", "-euc", moved, cwd=self.directory, env=self.environment, stdout=PIPE)

    async def paste(self, *commands: str) -> list[str]:
        """Run pasted lines to their end and return what they printed."""
        return await ended(await self.start("\n".join(commands)))

    async def hear(self, pattern: str) -> None:
        """Wait until the systems print a line like this."""
        assert self.systems is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(re.search(pattern, line) for line in self.lines):
                self.lines.append(await next_line(self.systems))


async def next_line(process: Process) -> str:
    """Return the next line that a process prints; it must not have ended."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line, "it ended"
    return line.rstrip("\n")


async def ended(process: Process) -> list[str]:
    """Return all lines that are still to come from a process, which has to end well."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode().splitlines()


@asynccontextmanager
async def desk_of(example: str, variables: dict[str, str], directory: Path) -> AsyncIterator[tuple[Desk, list[str]]]:
    """Run an example's systems by its README's command; yields the desk and the README's blocks after that one."""
    shutil.copytree(REPOSITORY / "examples", directory / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    log = put_stand_ins(directory)
    put_interpreter(directory)
    kept = {"PATH": f"{directory}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "CURL_LOG": str(log), "PORT": "0"}
    desk = Desk(directory=directory, environment={**kept, **variables})
    first, second, *blocks = re.findall(r"^```sh\n(.*?)^```$", readme_of(example), re.MULTILINE | re.DOTALL)
    assert first == "python3 -m app dev\n"
    desk.systems = await desk.start(f"exec {second}")
    try:
        await desk.hear("^listening on ")
        desk.url = desk.environment["SYSTEMS_URL"] = desk.lines[0].removeprefix("listening on ")
        for file in (directory / "examples" / example).glob("*.yaml"):
            file.write_text(WRITTEN_ADDRESS.sub(desk.url, file.read_text(encoding="utf-8")), encoding="utf-8")
        yield desk, blocks
    finally:
        desk.systems.terminate()
        await desk.systems.wait()


async def until_asked(process: Process, variables: dict[str, str], session_id: str) -> None:
    """Wait until an agent has asked a person: it says so before it does."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await next_line(process) != "the reply waits for a person":
            pass
    headers = {"Authorization": f"Bearer {variables['COUNTERMAND_OPERATOR_KEY']}"}
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        httpx.AsyncClient(base_url=variables["COUNTERMAND_URL"], headers=headers, trust_env=False) as http,
    ):
        while all(item["session_id"] != session_id for item in (await http.get("/v1/approvals?state=pending")).json()["items"]):
            pass  # the next answer tells: the question is on its way


@pytest.mark.timeout(MANY_PROCESSES_SECONDS)
async def test_refund_ends_as_its_readme_says_when_it_is_pasted(variables: dict[str, str], tmp_path: Path) -> None:
    """Approved and sent, though the agent was killed while it waited; undone when the mail is down; undone when a person says no."""
    async with desk_of("refund_agent", variables, tmp_path) as (desk, blocks):
        run, approve, run_down, approve_down, run_refused, refuse, look = blocks
        operator = next(line for line in approve.splitlines() if "() {" in line)

        killed = await desk.start(run.replace("\n.venv", "\nexec .venv"))  # the last command is the process that is killed
        await until_asked(killed, variables, "refund-1")
        killed.kill()
        await killed.communicate()
        again = await desk.start(run.splitlines()[-1])
        await desk.paste(approve)
        completed = await ended(again)
        down = await desk.start(run_down)
        await until_asked(down, variables, "refund-2")
        await desk.paste(operator, approve_down)
        undone = await ended(down)
        refused = await desk.start(run_refused)
        await until_asked(refused, variables, "refund-3")
        await desk.paste(operator, refuse)
        rejected = await ended(refused)
        (left,) = await desk.paste(look)
        await desk.hear("GET /")

    assert completed[-2:] == ["mail_1 sent to customer@example.com", "refund-1 is completed"]
    assert undone[-2].startswith("failed: ")
    assert "the mail service is down" in undone[-2]
    assert undone[-1] == "refund-2 is compensated"
    assert rejected[-2:] == ["failed: send_reply is rejected: wrong customer", "refund-3 is compensated"]
    assert json.loads(left) == {
        "ledger": {"cr_9104_1": 2500, "cr_9104_2": 2500, "rv_9104_3": -2500, "cr_9104_4": 2500, "rv_9104_5": -2500},
        "tickets": {"9104": "refunded"},
        "mails": ["customer@example.com"],
    }
    calls = [line.split() for line in desk.lines[1:]]
    keys = Counter(call[3] for call in calls if len(call) > 3)
    assert set(keys.values()) == {1}, "the agent that was started again did something twice"
    undos = [call[2] for call in calls if len(call) > 3 and call[3].startswith("undo-")]
    assert undos == ["/tickets/status/restore", "/credits/reverse"] * 2


@pytest.mark.timeout(MANY_PROCESSES_SECONDS)
async def test_onboarding_ends_as_its_readme_says_when_it_is_pasted(variables: dict[str, str], tmp_path: Path) -> None:
    """What nobody knows the outcome of is undone as well, in the one order that works, and is refused should it come late."""
    async with desk_of("onboarding_agent", variables, tmp_path) as (desk, (run, look)):
        runs = await desk.paste(run)
        after = await desk.paste(look)
        await desk.hear("^409 POST /mails effect-")
        (left,) = await desk.paste(look.splitlines()[-1])
        await desk.hear("GET / *$")

    assert [line for line in runs if " is " in line] == ["onboarding-1 is completed", "onboarding-2 is compensated"]
    assert any(line.startswith("failed: ReadTimeout") for line in runs)
    assert len(after) == 2
    assert json.loads(left) == {"users": ["alice"], "permissions": ["alice: customer"], "mails": ["alice"]}
    undos = [line.split()[2] for line in desk.lines if " undo-" in line]
    assert undos == ["/mails/cancel", "/permissions/revoke", "/users/delete"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_readme_fits_a_screen_when_it_is_opened(example: str) -> None:
    """Ten minutes are all that there is; what it links to is there."""
    readme = readme_of(example)
    assert len(readme.splitlines()) <= SCREEN_LINES
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (REPOSITORY / "examples" / example / target).exists(), target


class LosesFirstAnswers(httpx.HTTPTransport):
    """A network that carries every request, and loses the answer of the first one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Let the service do what is asked, and tell of it the second time only."""
        answer = super().handle_request(request)
        kind = request.url.path.rpartition("/")[2]
        if kind in self.lost:
            return answer
        answer.read()
        self.lost.append(kind)
        raise httpx.ReadError("the answer was lost", request=request)


class CountedTool:
    """A tool that counts how often it ran, and under which keys."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.keys: list[str] = []
        self._error = error

    def __call__(self, _payload: str, forward_key: str, /) -> dict[str, Any]:
        """Run."""
        self.keys.append(forward_key)
        if self._error is not None:
            raise self._error
        return {"id": len(self.keys)}


@pytest.fixture
def agent(variables: dict[str, str]) -> Iterator[httpx.Client]:
    """Return an agent's client that loses first answers."""
    headers = {"Authorization": f"Bearer {variables['COUNTERMAND_AGENT_KEY']}"}
    with httpx.Client(base_url=variables["COUNTERMAND_URL"], headers=headers, transport=LosesFirstAnswers(), timeout=60) as http:
        yield http


@pytest.fixture
def operator(variables: dict[str, str]) -> Iterator[httpx.Client]:
    """Return an operator's client."""
    headers = {"Authorization": f"Bearer {variables['COUNTERMAND_OPERATOR_KEY']}"}
    with httpx.Client(base_url=variables["COUNTERMAND_URL"], headers=headers, trust_env=False, timeout=60) as http:
        yield http


def kinds(operator: httpx.Client, session_id: str) -> list[str]:
    """Return the kinds of a session's journal entries."""
    return [entry["kind"] for entry in operator.get(f"/v1/sessions/{session_id}/journal").raise_for_status().json()["items"]]


def test_tool_runs_once_when_every_first_answer_is_lost(agent: httpx.Client, operator: httpx.Client) -> None:
    """The same key makes it the same request: one effect, one run, one release, one end."""
    read, wired = CountedTool(), CountedTool()
    step = {"tool": "send_wire_transfer", "payload": '{"amount": "100"}', "step_index": 2}
    with Saga(agent, "lost-1") as saga:
        saga.call("get_balance", {}, read, reversibility="read_only")
        # An earlier process of this run has asked already, and a person has said yes.
        earlier = {"Idempotency-Key": "lost-1-2", "Authorization": agent.headers["Authorization"]}
        httpx.post(f"{agent.base_url}/v1/sessions/lost-1/intercept", json=step, headers=earlier).raise_for_status()
        operator.post("/v1/sessions/lost-1/effects/2/approve", json={}).raise_for_status()
        saga.call("send_wire_transfer", {"amount": "100"}, wired)

    assert (len(read.keys), len(wired.keys)) == (1, 1)
    assert {"intercept", "commit", "2", "resume", "complete"} <= set(lost_by(agent))
    assert kinds(operator, "lost-1").count("INTENT") == 2
    assert saga.state() == "completed"


def lost_by(agent: httpx.Client) -> list[str]:
    """Return the last parts of the paths whose first answer was lost."""
    transport = agent._transport  # noqa: SLF001 (httpx has no public door to what it was made with)
    assert isinstance(transport, LosesFirstAnswers)
    return transport.lost


@pytest.mark.parametrize(
    ("error", "undo"), [(NotApplied("refused"), "skipped"), (httpx.ReadTimeout("no answer"), "compensated")], ids=["refused", "timeout"]
)
def test_call_is_undone_when_it_may_have_happened(agent: httpx.Client, operator: httpx.Client, error: Exception, undo: str) -> None:
    """In doubt the helper says unknown; the exception that ended the run reaches the caller, once everything is undone."""
    # An undo that always succeeds: nothing takes a POST there, and the 405 counts as done.
    compensation = {"url": f"{agent.base_url}/livez", "args": {}, "compensated_on": [405]}
    session_id = f"failed-{undo}"
    saga = Saga(agent, session_id)
    with pytest.raises(type(error)), saga:
        saga.call("charge_card", {}, CountedTool(error), reversibility="compensatable", compensation=compensation)

    assert "FAILED" in kinds(operator, session_id)
    assert [entry["state"] for entry in operator.get(f"/v1/sessions/{session_id}").json()["undo_stack"]] == [undo]
    assert saga.state() == "compensated"


def test_run_goes_on_when_it_is_interrupted(agent: httpx.Client) -> None:
    """Ctrl-C fails nothing, and the next process under the same session repeats nothing that was done, and goes on with the rest."""
    read, interrupted, finished = CountedTool(), CountedTool(KeyboardInterrupt()), CountedTool()

    def run(limit: CountedTool) -> Saga:
        with Saga(agent, "again-1") as saga:
            assert saga.call("get_balance", {}, read, reversibility="read_only") == {"id": 1}
            saga.call("get_limit", {}, limit, reversibility="read_only")
        return saga

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    assert run(finished).state() == "completed"

    assert len(read.keys) == 1
    assert finished.keys == interrupted.keys


def test_call_is_refused_when_the_service_says_no(agent: httpx.Client) -> None:
    """The tool does not run, and the reason can be shown to the model."""
    tool, saga = CountedTool(), Saga(agent, "refused-1")
    with pytest.raises(Refused, match="tool_needs_compensation"), saga:
        saga.call("charge_card", {}, tool, reversibility="compensatable")
    assert tool.keys == []
    assert saga.state() == "compensated"


@pytest.fixture
async def queue() -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of the onboarding's systems."""
    transport = httpx.ASGITransport(app=systems.create_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://systems.test") as http:
        yield http


async def posted(http: httpx.AsyncClient, path: str, key: str, **body: str) -> int:
    """POST under a key and return the status."""
    return (await http.post(path, json=body, headers={"Idempotency-Key": key})).status_code


async def test_endpoints_do_each_key_once_when_it_is_repeated(queue: httpx.AsyncClient) -> None:
    """A repeat is answered as before and does nothing; another body under a known key is refused; an undo counts as a call."""
    assert [await posted(queue, "/mails", "effect-1", user="alice") for _ in range(2)] == [200, 200]
    assert (await queue.get("/")).json()["mails"] == ["alice"]
    assert await posted(queue, "/mails", "effect-1", user="mallory") == 422
    assert [await posted(queue, "/mails/cancel", "undo-1", forward_key="effect-1") for _ in range(2)] == [200, 200]
    assert (await queue.get("/")).json()["mails"] == []


async def test_call_is_refused_when_it_comes_after_its_undo(queue: httpx.AsyncClient) -> None:
    """Undoing what never came is a success, and bars it; so it does at every endpoint of the example."""
    for path, undo in (("/users", "/users/delete"), ("/permissions", "/permissions/revoke"), ("/mails", "/mails/cancel")):
        assert await posted(queue, undo, f"undo{path}", forward_key=f"effect{path}") == 200
        assert await posted(queue, path, f"effect{path}", user="bob", role="customer") == 409
    assert (await queue.get("/")).json() == {"users": [], "permissions": [], "mails": []}


async def test_user_is_not_deleted_when_permissions_are_left(queue: httpx.AsyncClient) -> None:
    """The order of undoing matters: the wrong one would meet this refusal. It is not remembered, so that a retry may succeed."""
    await posted(queue, "/users", "effect-1", user="alice")
    await posted(queue, "/permissions", "effect-2", user="alice", role="customer")
    assert await posted(queue, "/users/delete", "undo-1", forward_key="effect-1") == 409
    await posted(queue, "/permissions/revoke", "undo-2", forward_key="effect-2")
    assert await posted(queue, "/users/delete", "undo-1", forward_key="effect-1") == 200


def test_tool_did_nothing_when_nobody_listens() -> None:
    """A connection that was never made leaves no doubt."""
    tool: HttpTool = http_tool("http://127.0.0.1:1/")
    with pytest.raises(NotApplied):
        tool("{}", "effect-1")

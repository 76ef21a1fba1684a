"""Every code that the service refuses with is in the table, under its class, and the document shows the table. Must not refuse anything."""

import ast
import inspect
import re
from collections.abc import Iterator

from app.api.problems import ANY_OTHER, PROBLEMS, declared_codes
from app.domain import errors
from app.domain.errors import SagaError
from tests.described import document
from tests.golden import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/reference/problems.md").read_text(encoding="utf-8")

CLASSES = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SagaError)}
# What constructs a refusal under another name: a derived class, or a helper that is handed the code.
OTHER_NAMES = {"StorageUnavailable": "Unavailable", "SchemaMissing": "Unavailable", "_invalid": "Invalid"}
EDGE = "_Refusal"  # what `errors` answers with where nothing was raised that has a class


def refusals() -> Iterator[tuple[str, ast.expr, dict[str, str]]]:
    """Yield every construction of a refusal in the code: what constructs it, its code as written, and the module's constants."""
    for path in sorted((REPOSITORY / "app").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[code, *_]) if name in CLASSES | OTHER_NAMES.keys():
                    yield OTHER_NAMES.get(name, name), code, constants
                case ast.Call(func=ast.Name(id=name), keywords=[_, ast.keyword(arg="code", value=code), *_]) if name == EDGE:
                    yield name, code, constants
                case _:
                    pass


def test_every_code_of_the_code_is_in_the_table_and_no_other() -> None:
    """A refusal that nobody described, one that is described and gone, and one whose status changed are each seen here."""
    found: set[tuple[str, str]] = set()
    passed_on = 0
    for name, code, constants in refusals():
        match code:
            case ast.Constant(value=str(text)):
                found.add((text, name))
            case ast.Name(id=constant) if constant in constants:
                found.add((constants[constant], name))
            case ast.JoinedStr():
                found.add((ANY_OTHER, name))
            case _:
                passed_on += 1
    tabled = {(code, kind.refusal.__name__ if isinstance(kind.refusal, type) else EDGE) for code, kind in PROBLEMS.items()}
    # Parameters that the framework judges are refused at the edge, under the code that bodies have.
    assert found == tabled | {("invalid_request", EDGE)}
    assert passed_on == 3, "`_invalid` in two modules, and the rendering of any SagaError, are handed their code"


def test_document_shows_the_table_when_compared_line_by_line() -> None:
    """Status, when, whether to repeat and what to do are written once, in app/api/problems.py, and shown here by status."""
    shown = [line for line in DOCUMENT.splitlines() if re.match(r"\| `[a-z_<>]+` \|", line)]
    by_status = sorted(PROBLEMS.items(), key=lambda found: (found[0] == ANY_OTHER, found[1].status, found[0]))
    assert shown == [
        f"| `{code}` | {'any' if code == ANY_OTHER else int(kind.status)} | {kind.when} | {kind.repeat} | {kind.advice} |"
        for code, kind in by_status
    ]


def test_every_code_is_declared_by_an_operation_when_one_can_answer_it() -> None:
    """What no operation declares is what belongs to no operation: an unknown path, another method, the framework's own."""
    declared = {
        code
        for methods in document()["paths"].values()
        for operation in methods.values()
        for code in declared_codes(operation["responses"])
    }
    assert PROBLEMS.keys() - declared == {"unknown_path", "method_not_allowed", ANY_OTHER}

"""The house rules that no linter knows: names, lengths and what a module says of itself. Must not import the code: it reads it."""

import ast
import re
from pathlib import Path

CLONE = Path(__file__).resolve().parent.parent
FOLDERS = ("app", "migrations", "tests", "bench", "deploy", "examples")
SOURCES = {
    str(path.relative_to(CLONE)): ast.parse(path.read_text(encoding="utf-8"))
    for folder in FOLDERS
    for path in sorted((CLONE / folder).rglob("*.py"))
}
APP = {path: tree for path, tree in SOURCES.items() if path.startswith("app/")}
BANNED = {"util", "utils", "helper", "helpers", "common", "core", "base", "manager", "handler", "processor", "service", "misc"}
MAX_LINES = 50  # of one function, its docstring apart


def words(name: str) -> set[str]:
    """Split a file's or a class's name into its lower-case words."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function without its docstring."""
    documented = function.body[0] if ast.get_docstring(function) else None
    docstring = documented.end_lineno - documented.lineno + 1 if documented and documented.end_lineno else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def test_names_say_what_a_thing_is_when_read_alone() -> None:
    """A word that fits every file tells nothing: such a drawer fills up (architecture, banned names)."""
    named = {(path, Path(path).stem) for path in APP}
    named |= {(path, node.name) for path, tree in APP.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert [(path, name) for path, name in sorted(named) if words(name) & BANNED] == []


def test_functions_fit_a_screen_when_read() -> None:
    """One level of abstraction fits into 50 lines (style)."""
    functions = [
        (path, node)
        for path, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [(path, node.name, code_lines(node)) for path, node in functions if code_lines(node) > MAX_LINES] == []


def test_module_says_what_it_must_not_do_when_opened() -> None:
    """Every module is a promise to its neighbours: one sentence of purpose, one of what it leaves alone (style)."""
    modules = {path: ast.get_docstring(tree) or "" for path, tree in APP.items() if not path.endswith("__init__.py")}
    promise = re.compile(r"\bmust (not|never|be read only)\b|\bmay not\b|\bholds no\b|\bnever\b", re.IGNORECASE)
    assert [path for path, docstring in modules.items() if not promise.search(docstring)] == []

"""Send what `curl` would, and keep what was answered in the file that CURL_LOG names. Must not know more of curl than documents use.

It runs on machines without curl, and a document that uses another option learns of it at once. Standard library only: it is started
for every request, by an interpreter without site packages.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

EXIT_UNREACHABLE, EXIT_REFUSED = 7, 22  # curl's own
LONG = {"--fail": "f", "--silent": "s", "--show-error": "S", "--include": "i", "--request": "X", "--header": "H", "--data": "d"}
SWITCHES, WITH_VALUE = "sSfiN", "XHdow"


@dataclass(slots=True)
class Asked:
    """What the command line says."""

    switches: set[str] = field(default_factory=set)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    method: str | None = None
    url: str | None = None
    out: str | None = None
    after: str = ""

    def take(self, option: str, value: str) -> None:
        """Take an option that has a value."""
        match option:
            case "X":
                self.method = value
            case "H":
                name, _, text = value.partition(":")
                self.headers[name] = text.strip()
            case "d":
                self.body = content(value)
            case "o":
                self.out = value
            case _:
                self.after = value


class NoRedirects(HTTPRedirectHandler):
    """Show a redirect instead of following it, as curl does."""

    def redirect_request(self, *_words: object) -> None:
        """Follow none."""


def content(value: str) -> bytes:
    """Return the bytes of `-d TEXT`, `-d @FILE` or `-d @-`."""
    if not value.startswith("@"):
        return value.encode()
    return sys.stdin.buffer.read() if value == "@-" else Path(value[1:]).read_bytes()


def read(words: list[str]) -> Asked:
    """Read the command line; exit where this stand-in does not know a word."""
    asked, rest = Asked(), iter(words)
    for word in rest:
        if not word.startswith("-"):
            if asked.url is not None:
                sys.exit(f"this curl does not know {word}")
            asked.url = word
            continue
        letters = LONG.get(word, word[1:])
        for place, letter in enumerate(letters):
            if letter in SWITCHES:
                asked.switches.add(letter)
                continue
            if letter not in WITH_VALUE:
                sys.exit(f"this curl does not know {word}")
            asked.take(letter, letters[place + 1 :] or next(rest))
            break
    return asked


def send(asked: Asked) -> int:
    """Send the request, write the answer, and return the exit code."""
    method = asked.method or ("GET" if asked.body is None else "POST")
    request = Request(asked.url or "", asked.body, asked.headers, method=method)  # noqa: S310 (the documents' own addresses)
    try:
        answer = build_opener(ProxyHandler({}), NoRedirects).open(request)
    except HTTPError as refused:
        answer = refused
    except URLError as error:
        sys.stderr.write(f"curl: (7) {asked.url}: {error.reason}\n")
        return EXIT_UNREACHABLE
    text = answer.read().decode()
    with Path(os.environ["CURL_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps({"method": method, "url": asked.url, "status": answer.status, "text": text}) + "\n")
    if "f" in asked.switches and answer.status >= 400:
        sys.stderr.write(f"curl: (22) The requested URL returned error: {answer.status}\n")
        return EXIT_REFUSED
    head = f"HTTP/1.1 {answer.status} {answer.reason}\n{answer.headers}" if "i" in asked.switches else ""
    after = asked.after.replace("\\n", "\n").replace("%{http_code}", str(answer.status))
    _write(head + text, asked.out, sys.stdout)
    sys.stdout.write(after)
    return 0


def _write(text: str, out: str | None, default: IO[str]) -> None:
    if out is None:
        default.write(text)
    else:
        Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(send(read(sys.argv[1:])))

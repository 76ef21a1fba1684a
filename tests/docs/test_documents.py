"""Every document does what it says when it is played from top to bottom. Must not know one by name: they are found.

The first test of each file is the whole of it; what a document shows is an `<!-- answer -->` in it, held by the player.
"""

from pathlib import Path

import pytest

from tests.docs.documents import Document, Kind, Wrong, played
from tests.docs.playing import VARIABLES, Desk, Development, play, variables_of

# Blocks that nothing plays, in all documents together: each one is a claim that nobody checks.
MAX_NOT_RUN = 16
WORDS_OF_A_REASON = 3
# Servers, agents and a dozen commands one after the other, on a machine that may be busy.
MANY_PROCESSES_SECONDS = 300

pytestmark = pytest.mark.timeout(MANY_PROCESSES_SECONDS)
every_document = pytest.mark.parametrize("document", played(), ids=lambda document: document.name)


@every_document
async def test_document_does_what_it_says_when_it_is_pasted(document: Document, variables: dict[str, str], tmp_path: Path) -> None:
    """Every block ends well, every refusal is the one announced, every answer is the one shown."""
    await play(document, variables, tmp_path)


@every_document
def test_marks_belong_to_a_block_when_a_document_has_some(document: Document) -> None:
    """A mark that is misspelt, or a line away from its block, would be passed over in silence."""
    assert document.loose_marks == []
    for block in document.blocks:
        if block.kind is Kind.UNKNOWN:
            raise Wrong(document.name, block, f"nothing is known to be done with it, marked {dict(block.marks)}")


def test_few_blocks_are_not_run_when_all_documents_are_counted() -> None:
    """Each has a reason that says something."""
    reasons = [(document.name, block.marks["not run"]) for document in played() for block in document.blocks if block.kind is Kind.NOT_RUN]
    assert [reason for reason in reasons if len(reason[1].split()) < WORDS_OF_A_REASON] == []
    assert len(reasons) <= MAX_NOT_RUN


async def test_dev_prints_lines_that_can_be_pasted(development: Development, tmp_path: Path) -> None:
    """Every line is a comment or an export; what they set is the address and one key per role, and it works at once."""
    exports = development.exports
    assert all(line.startswith(("# ", "export COUNTERMAND_")) for line in exports.splitlines())
    assert list(variables_of(exports)) == VARIABLES
    check = 'curl -s -H "Authorization: Bearer $COUNTERMAND_AUDITOR_KEY" "$COUNTERMAND_URL/v1/escalations"'
    async with Desk(tmp_path, {}) as desk:
        _, (request,) = await desk.paste(exports + check)
    assert request.status == 200

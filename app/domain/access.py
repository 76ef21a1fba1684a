"""Who may see which session. Must not know roles' verbs: those are checked where the verbs are."""

from app.domain.errors import NotFound
from app.domain.model import Principal, Role, Session, SessionId


def may_see(principal: Principal, session: Session) -> bool:
    """Tell whether a session is there for this caller: agents see what their subject owns, everybody else all of the org's."""
    return principal.role is not Role.AGENT or principal.subject == session.owner


def session_not_found(session_id: SessionId) -> NotFound:
    """Return the one answer for a session that is not there and for one that is not yours."""
    return NotFound("session_not_found", f"there is no session {session_id}", session_id=session_id)

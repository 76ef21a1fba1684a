"""What this process has seen of each org's destinations. Must not be taken for a circuit: that is a row, which every replica honours."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from app.domain import circuits
from app.domain.circuits import Place, Rules, Sight, Standing
from app.domain.model import CallId

MAX_PLACES: Final = 10_000  # tenants choose where their calls go; those that were seen longest ago are forgotten

_UNREMARKABLE = Standing()


@dataclass(slots=True, kw_only=True)
class Circuits:
    """Counts outages, and lets a destination that is back be tried with few calls at first."""

    rules: Rules
    _standings: OrderedDict[Place, Standing] = field(default_factory=OrderedDict)

    def see(self, place: Place, call_id: CallId, seen: Sight) -> Standing:
        """Take what a request told, and return what is known of the place now."""
        return self._keep(place, circuits.see(self.standing(place), call_id, seen, self.rules))

    def look(self, place: Place, *, is_open: bool) -> None:
        """Take what the database says of a place's circuit."""
        self._keep(place, circuits.look(self.standing(place), is_open=is_open))

    def standing(self, place: Place) -> Standing:
        """Return what is known of a place."""
        return self._standings.get(place, _UNREMARKABLE)

    def limits(self) -> Mapping[Place, int]:
        """Return how many calls may be in flight at the places that are still being tried."""
        return {place: standing.limit for place, standing in self._standings.items() if standing.limit is not None}

    def _keep(self, place: Place, standing: Standing) -> Standing:
        self._standings.pop(place, None)
        if standing != _UNREMARKABLE:
            self._standings[place] = standing
            if len(self._standings) > MAX_PLACES:
                self._standings.popitem(last=False)
        return standing

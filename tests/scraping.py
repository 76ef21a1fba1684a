"""Fetch /metrics and read it as Prometheus would. Must not assert anything about a value."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.factories import Service

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape has told: the text, and each sample by name and labels."""

    text: str
    samples: Mapping[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float | None:
        """Return one series' value, or None where it is absent."""
        return self.samples.get((name, frozenset(labels.items())))

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return every series of a name."""
        return [(dict(labels), value) for (found, labels), value in self.samples.items() if found == name]

    def by(self, label: str, name: str) -> dict[str, float]:
        """Return the values of a metric by its one label."""
        return {labels[label]: value for labels, value in self.series(name)}


def parsed(text: str) -> Scrape:
    """Read the text format."""
    families = text_string_to_metric_families(text)
    return Scrape(text, {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples})


async def scrape(service: Service) -> Scrape:
    """Fetch without a key."""
    response = await service.agent.http.get("/metrics")
    response.raise_for_status()
    return parsed(response.text)

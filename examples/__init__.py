"""Programs to copy from: two agents, the systems that they use, and what both need. Must not be imported by the service."""

"""How the service is spoken to: HTTP to commands, decisions to HTTP. Must not decide, and must not see SQL."""

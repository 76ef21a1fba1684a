"""An onboarding whose last step nobody knows the outcome of. Must not reach past the public API."""

"""What is kept: the only SQL of the service. Must not decide anything that `domain` decides."""

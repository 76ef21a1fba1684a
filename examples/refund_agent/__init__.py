"""A refund whose reply to the customer a person has to approve. Must not reach past the public API."""

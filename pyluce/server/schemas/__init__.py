"""What clients may send, one file an API; anything else is refused by name."""

"""The endpoints, one file an API."""

"""The native binding: declarations against the headers, owners, threads, callbacks, log."""

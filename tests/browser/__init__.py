"""The status page in a real browser: `make test-browser`, which needs Chromium."""

"""What every test relies on."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background of a shell: children inherit that, and the tests that press Ctrl-C would wait in vain
    signal.signal(signal.SIGINT, signal.default_int_handler)

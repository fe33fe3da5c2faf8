"""Entry point of the `luce` command: its group, and what every failure looks like from a shell.

Exit codes: 0 done, 1 a load or run failed, 2 the command line or its input cannot be used, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from cli.chat import chat
from cli.doctor import doctor
from cli.hash import hash_command
from cli.park import park, unpark
from cli.plan import plan
from cli.profile import profiles
from cli.props import props
from cli.routes import routes
from cli.rpc_server import rpc_server
from cli.run import run
from cli.top import top
from cli.tune import tune
from pyluce import __version__

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="luce")
def luce() -> None:
    """Run Qwen3.8-Flash-Next (qwen4exp) models on this machine."""


luce.add_command(run)
luce.add_command(chat)
luce.add_command(props)
luce.add_command(top)
luce.add_command(park)
luce.add_command(unpark)
luce.add_command(hash_command)
luce.add_command(doctor)
luce.add_command(plan)
luce.add_command(rpc_server)
luce.add_command(tune)
luce.add_command(profiles)
luce.add_command(routes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold characters that this terminal's encoding lacks
    try:
        result = luce.main(
            args=list(arguments) if arguments is not None else None, prog_name="luce", standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # whoever read our output has gone; keep the interpreter from flushing into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())

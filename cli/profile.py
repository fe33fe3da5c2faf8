"""`--profile NAME`: the flags of a profile, below those of the command line and the environment; `luce profiles` lists them."""

from __future__ import annotations

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from pyluce.profiles import Profile, ProfileError, load_profile, profile_paths, shipped_dir, user_dir


def _apply(context: click.Context, parameter: click.Parameter, name: str | None) -> Profile | None:
    """Read the profile, check the values that this command has flags for, and make them the flags' defaults."""
    if name is None:
        return None
    try:
        profile = load_profile(name)
    except ProfileError as error:
        text = str(error)
        raise click.UsageError(f"--{text}" if text.startswith("profile:") else text) from error
    mine = {p.name: p for p in context.command.params if p.name}
    for key, setting in profile.settings.items():
        if key not in mine:
            continue
        try:
            mine[key].type_cast_value(context, setting.value)
        except click.BadParameter as error:
            raise click.UsageError(f"{profile.where(key)}: {key}: {error.message}") from error
    context.default_map = {key: setting.value for key, setting in profile.settings.items()}
    return profile


PROFILE_FLAG = click.option(
    "--profile",
    metavar="NAME",
    is_eager=True,
    callback=_apply,
    envvar="LUCE_PROFILE",
    show_envvar=True,
    help="Flags that suit a machine, by name; `luce profiles` lists them. Flags and variables of the environment win over it.",
)


def from_profile(name: str) -> bool:
    """The parameter's value is the profile's."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.DEFAULT_MAP


@click.group(invoke_without_command=True)
@click.pass_context
def profiles(context: click.Context) -> None:
    """List the profiles: name, whose it is, for whom it is."""
    if context.invoked_subcommand is not None:
        return
    rows = []
    for name, path in profile_paths().items():
        try:
            summary = load_profile(name).summary.split(". ")[0].rstrip(".")
        except ProfileError as error:
            summary = f"cannot be used: {error}"
        rows.append((name, "luce" if path.parent == shipped_dir() else "yours", summary))
    console = Console()
    if console.is_terminal:
        table = Table("profile", "of", "for whom")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for row in rows:
            click.echo(f"{row[0]} ({row[1]}): {row[2]}")
    click.echo(f"your own: {user_dir()}/NAME.toml")


@profiles.command()
@click.argument("name")
def show(name: str) -> None:
    """Print a profile's file, and where it is."""
    try:
        profile = load_profile(name)
    except ProfileError as error:
        raise click.UsageError(str(error).removeprefix("profile: ")) from error
    click.echo(f"# {profile.path}")
    click.echo(profile.text, nl=not profile.text.endswith("\n"))

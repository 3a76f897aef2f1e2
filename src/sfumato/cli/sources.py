"""Values of options from environment variables and from a TOML file, checked as the table says.

The command line comes before the environment, that before the file, and the file before the
default. Every value keeps its origin, so that a message can name it. Knows no command's meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sfumato.options.table import OPTIONS, PREFIX, Option, options_of

LARGEST = 1 << 20  # bytes of a file
OTHER_VARIABLES = (
    f"{PREFIX}ISA",
    f"{PREFIX}DEBUG",
    f"{PREFIX}OFF",
)  # no options; the modules that need them read them
FILE, ENVIRONMENT, COMMAND_LINE = 1, 2, 3  # ranks of sources; a default has rank 0
_ALIKE = 0.85  # names that differ in a letter or two
_COMMANDS = sorted({name for option in OPTIONS for name in option.commands})


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: "--port", "SFUMATO_PORT", "port in sfumato.toml"."""

    rank: int  # COMMAND_LINE, ENVIRONMENT or FILE
    label: str


@dataclass(frozen=True)
class ConfigFile:
    """A file of options: keys for all commands, and a table of keys for each."""

    path: str
    common: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]

    def find(self, command: str, option: Option) -> tuple[Any, Origin] | None:
        """The value of a command's option and its origin; the command's table comes first.

        A common key whose value this command refuses belongs to a command that takes the value:
        `json` is a path for bench, and true or false elsewhere.
        """
        own = self.tables.get(command, {})
        if option.name in own:
            label = f"{option.name} in [{command}] of {self.path}"
            return own[option.name], Origin(FILE, label)
        if option.name in self.common and _takes(option, self.common[option.name]):
            return self.common[option.name], Origin(FILE, f"{option.name} in {self.path}")
        return None


def resolve(
    command: str, given: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Every option of a command by key, and the origins of those that are not defaults.

    given: what the command line says, by key. Raises ValueError naming the origin of what is
    wrong, OSError for a file that cannot be read.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    file: ConfigFile | None = None
    for option in sorted(options_of(command), key=lambda option: option.name != "config"):
        key = option.key
        if key in given:
            values[key], origins[key] = given[key], Origin(COMMAND_LINE, option.flag)
        elif text := environment.get(option.variable):
            origins[key] = Origin(ENVIRONMENT, option.variable)
            values[key] = _read(option, origins[key], text, from_text=True)
        elif file is not None and (entry := file.find(command, option)):
            origins[key] = entry[1]
            values[key] = _read(option, origins[key], entry[0])
        elif option.required:
            raise ValueError(
                f"{option.flag} is required (or {option.variable}, or a --config file)"
            )
        else:
            default = option.default
            values[key] = list(default) if isinstance(default, tuple) else default
        if option.name == "config" and values[key] is not None:
            file = read_file(values[key])
    return values, origins


def _read(option: Option, origin: Origin, given: Any, from_text: bool = False) -> Any:
    try:
        return option.kind.parse(given) if from_text else option.kind.accept(given)
    except ValueError as error:
        why = f"is not {option.kind.describe()}" if option.secret else str(error)
        if from_text and given.startswith(("tcp://", "udp://")):
            why += (
                '; Kubernetes sets this variable in every pod beside a service named "sfumato": '
                "rename the service, or set enableServiceLinks: false"
            )
        raise ValueError(f"{origin.label}: {why}") from None


def read_file(path: str) -> ConfigFile:
    """A TOML file with every key and every value checked. Raises ValueError or OSError."""
    import tomllib  # here: `sfumato --help` needs none

    with open(path, "rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"{path}: has more than {LARGEST:,} bytes, which no file of options needs")
    try:
        raw = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    tables = {name: value for name, value in raw.items() if isinstance(value, dict)}
    for name in tables:
        if name not in _COMMANDS:
            raise ValueError(f"{path}: unknown table [{name}]; {_nearest(name, _COMMANDS)}")
    common = {name: value for name, value in raw.items() if name not in tables}
    return ConfigFile(
        path,
        _keys(path, None, common),
        {name: _keys(path, name, table) for name, table in tables.items()},
    )


def _keys(path: str, command: str | None, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a command's table, or the common ones, under the options' names."""
    keys: dict[str, Any] = {}
    where = f"[{command}] of {path}" if command else path
    known = [option for option in OPTIONS if command is None or command in option.commands]
    for written, value in raw.items():
        name = written.replace("_", "-")
        rows = [option for option in known if option.name == name]
        if name == "config":
            raise ValueError(f"config in {where}: a file cannot name another file")
        if not rows:
            raise ValueError(f"{where}: unknown key {written!r}; {_elsewhere(name, known)}")
        if name in keys:
            raise ValueError(f"{where}: {name!r} is given twice, with - and with _")
        if not any(_takes(option, value) for option in rows):
            _read(rows[0], Origin(FILE, f"{name} in {where}"), value)
        keys[name] = value
    return keys


def _takes(option: Option, value: Any) -> bool:
    try:
        option.kind.accept(value)
    except ValueError:
        return False
    return True


def _elsewhere(name: str, known: Iterable[Option]) -> str:
    """What to do about a key that is not known here."""
    owners = sorted({owner for o in OPTIONS if o.name == name for owner in o.commands})
    if owners:
        return f"it is an option of {', '.join(owners)}"
    return _nearest(name, [option.name for option in known if option.name != "config"])


def _nearest(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    (best,) = get_close_matches(name, names, 1, 0.0)
    return f"the nearest name is {best!r}"


def suspicious(environment: Mapping[str, str]) -> list[str]:
    """Warnings of variables that are almost the name of an option."""
    known = {option.variable for option in OPTIONS} | set(OTHER_VARIABLES)
    strange = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    if not strange:
        return []
    from difflib import get_close_matches

    nearest = ((name, get_close_matches(name, known, 1, _ALIKE)) for name in strange)
    return [f"{name} is not read; did you mean {near[0]}?" for name, near in nearest if near]

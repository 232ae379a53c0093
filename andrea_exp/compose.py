"""From words to a config: Hydra's composition, and its errors as one clear line."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError

from andrea_exp import ROOT
from andrea_exp.config import RunConfig, as_dict, plain
from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.rules import DERIVES_WIDTH, IDENTITY_SECTIONS, field_names, rules_of

CONF = ROOT / "conf"
ConfigStore.instance().store("schema", RunConfig)
ConfigStore.instance().store(
    "andrea", {"_target_": "hydra_plugins.andrea_exp_sweeper.AndreaSweeper"}, group="hydra/sweeper"
)


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config that overrides give, with Hydra's own node. Overrides that sweep a value are left out.

    Raises UserError for anything that cannot be composed.
    """
    GlobalHydra.instance().clear()
    try:
        check_overrides(overrides)
        single = [o.input_line or "" for o in parse(overrides) if not o.is_sweep_override()]
        with initialize_config_dir(str(CONF), version_base="1.3", job_name="andrea-exp"):
            return hydra_compose("config", single, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from error
    except MarkedYAMLError as error:
        place = error.problem_mark
        where = f"{place.name}, line {place.line + 1}: " if place else ""
        raise UserError(f"{where}{error.problem}") from error


def sweep_words(name: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of a sweep: `name` is a file in sweeps/, or itself an override where there is none ("seed=0,1")."""
    if isinstance(overrides, str):  # a text is a sequence of texts, too
        raise UserError(f"{overrides}: give overrides as a list, such as [{overrides!r}]")
    return [name if "=" in name else f"sweeps={name}", *overrides]


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises UserError for what Hydra lets pass or crashes on: a key given twice, a new one, half a sweep."""
    keys = [o.get_key_element() for o in parse(overrides)]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"{key}: given twice")
        if key.startswith(("+", "~")):
            name = key.lstrip("+~").split("@")[0]
            raise UserError(f"{key}: fields can be neither added nor removed; {did_you_mean(name, field_names())}")
        if key.startswith("sweep.") and "sweeps" not in keys:
            raise UserError(f"{key}: there is no sweep to change; add sweeps=NAME")


def parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's grammar for command-line overrides; raises Hydra's OverrideParseException."""
    return OverridesParser.create().parse_overrides(list(overrides))


def words_of(config: RunConfig) -> list[str]:
    """The inverse of composing: overrides that give a settled config's run again, with the same signature.

    They are the fields in which it is not the defaults', less those that follow from the others. A width that a depth
    mode derived is given as it was built.
    """
    implied = {f"{rule.field}={_word(plain(rule.default(config)))}" for rule in rules_of(config) if rule.live(config)}
    implied.add(f"model.d_head={config.model.d_model // config.model.n_heads}")
    given = [f"{key}={_word(value)}" for key, value in _fields(as_dict(config))]
    return [word for word in given if word not in _default_words() and word not in implied]


def _fields(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section in IDENTITY_SECTIONS:
        if not isinstance(values[section], dict):
            yield section, values[section]
            continue
        yield from ((f"{section}.{k}", v) for k, v in values[section].items() if f"{section}.{k}" not in DERIVES_WIDTH)


@cache
def _default_words() -> frozenset[str]:
    composed = compose([])
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    return frozenset(f"{key}={_word(value)}" for key, value in _fields(as_dict(OmegaConf.to_object(composed))))


# Text that Hydra reads as text without quotes, and as the same text.
PLAIN = re.compile(r"(?!(null|true|false|inf|nan)$)[A-Za-z_./][\w./-]*|[1-9]\d*(/\d+)?", re.ASCII | re.IGNORECASE)


def _word(value: Any) -> str:
    """A value in Hydra's grammar for overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_word(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) else QuotedString(value, Quote.single).with_quotes()
    return "null" if value is None else str(value).lower()


def set_field(config: DictConfig, key: str, value: Any) -> None:
    """Sets one dotted field of a composed config in place. Raises UserError for an unknown key or a bad value."""
    try:
        OmegaConf.update(config, key, value)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, key)) from error


def explain(error: BaseException, key: str | None = None) -> str:
    """One line for an error of Hydra or OmegaConf: what, where, the nearest valid value."""
    for link in _chain(error):
        if isinstance(link, OverrideParseException):
            key, _, value = str(link.override).partition("=")
            quoted = f"; quote a value with special characters: {key}=\"'{value}'\"" if value else ""
            return f"{link.override}: cannot be read as key=value{quoted}"
        if isinstance(link, MissingConfigException) and link.options:
            name = str(link.missing_cfg_file or "")
            return f"{name.replace('/', '=', 1)}: there is none; {did_you_mean(name.split('/')[-1], link.options)}"
        if isinstance(link, (ConfigAttributeError, ConfigKeyError)):
            wrong = str(key or link.full_key or link.key)
            if wrong == "sweeps":  # Hydra puts a file's fields below its folder's name, unless told otherwise
                return "the sweep's file: its first line has to be `# @package _global_`, and then comes `sweep:`"
            return f"{wrong}: no such field; {did_you_mean(wrong, field_names())}"
    # OmegaConf raises a template first, and from it the message with the value and the place.
    told = [e for e in _chain(error) if isinstance(e, OmegaConfBaseException) and "$VALUE" not in str(e)]
    if told:
        return _bad_value(next((e for e in told if e.full_key), told[0]), key or _overridden(error))
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _bad_value(error: OmegaConfBaseException, where: str) -> str:
    where = error.full_key or where
    enum = re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", str(error))
    if enum:
        wrong, valid = enum.groups()
        return f"{where}={wrong}: no such value; {did_you_mean(wrong, valid.split(', '))}"
    told = str(error).strip().splitlines()[0]
    if where == "sweep" or "is not a subclass of SweepConfig" in told:
        return f"{where}: no field of a command line; a sweep is a file, sweeps=NAME"
    return f"{where}: {next((text for sign, text in PLAINLY.items() if sign in told), told)}"


# What OmegaConf says of a wrong kind of value, for readers who never heard of its types.
PLAINLY = {
    "missing mandatory value": "missing; a sweep needs it",
    "incompatible with type hint 'typing.List": "wants a list of values, such as [1, 2]",
    "incompatible with type hint 'typing.Dict": "wants fields and their values, such as {model.norm_type: rmsnorm}",
    "not a subclass of Dict": "a list where names and their values belong, such as {rms: {model.norm_type: rmsnorm}}",
}


def _overridden(error: BaseException) -> str:
    """The field of the override that Hydra was merging when it failed."""
    found = re.search(r"Error merging override ([^=\s]+)", str(error))
    return found.group(1) if found else "config"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, the deepest first."""
    links = []
    while error is not None:
        links.append(error)
        error = error.__cause__ or error.__context__
    return reversed(links)

"""A sweep's cells: the roles of its fields expanded into runs, each with its config and its signature."""

import copy
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from andrea_exp import ROOT, data
from andrea_exp.compose import compose, explain, parse, set_field
from andrea_exp.config import RunConfig, SweepConfig, copy_config
from andrea_exp.errors import UserError, did_you_mean
from andrea_exp.rules import IDENTITY_SECTIONS, field_names, get, put, settle, signature

Values = dict[str, Any]
AD_HOC = "adhoc"  # the name of what no sweep file describes
LONGEST_ARM = 60
# Config groups that an arm or a column may choose: the config is composed anew for each choice.
GROUPS = frozenset({"recipe", "scale"})
# The tuning runs of one arm in one column -> the values that they choose, or None while those are not all there.
Chooser = Callable[[Sequence["Cell"]], Values | None]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep and its place in the table."""

    arm: str
    column: Values  # field -> value, of the role `across`
    tuned: Values
    repeat: Values
    purpose: str  # "report", or "tune" for a run that only helps to choose tuned values
    config: RunConfig
    fingerprint: str  # of the data
    signature: str

    @property
    def label(self) -> str:
        values = {**self.column, **self.tuned, **self.repeat}
        return ",".join([self.arm, *(f"{k.split('.')[-1]}={shown(v)}" for k, v in values.items())])

    @property
    def slug(self) -> str:
        """The label as a file name; where that needed a change, a hash of the label keeps names apart."""
        safe = re.sub(r"[^A-Za-z0-9._=,+-]", "_", self.label)[:120]
        return safe if safe == self.label else f"{safe}-{hashlib.sha256(self.label.encode()).hexdigest()[:6]}"


def shown(value: Any) -> str:
    """A config value as its YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def column_title(column: Values) -> str:
    """Fields by their last name: "n_layers=4, lr=0.001"."""
    return ", ".join(f"{k.split('.')[-1]}={shown(v)}" for k, v in column.items())


@dataclass(frozen=True)
class Plan:
    """A sweep with all its cells, and those to be reported whose tuned values are not known yet, with a first guess."""

    name: str
    spec: SweepConfig
    cells: list[Cell]
    guesses: list[Cell]

    @property
    def arms(self) -> list[str]:
        return list(self.spec.compare)

    @property
    def waiting(self) -> int:
        return len(self.guesses)

    @property
    def columns(self) -> list[Values]:
        return list(_product(self.spec.across))


def questions() -> dict[str, str]:
    """The sweep files of this folder and the project, and what each asks; of two with one name this folder's counts."""
    files = {path.stem: path for folder in (ROOT, Path.cwd()) for path in (folder / "sweeps").glob("*.yaml")}
    return {name: _question(files[name]) for name in sorted(files)}


def _question(path: Path) -> str:
    try:
        return OmegaConf.select(OmegaConf.load(path), "sweep.question") or ""
    except (OmegaConfBaseException, YAMLError, TypeError, OSError):
        return f"(not a sweep: {path})"


def plan_sweep(overrides: Sequence[str], choose: Chooser | None = None) -> Plan:
    """The plan of a command line such as ["sweeps=demo", "seed=0,1"]: the same words give the same cells."""
    return plan_composed(compose(overrides), parse(overrides), choose)


def plan_composed(
    composed: DictConfig,
    overrides: Sequence[Override],
    choose: Chooser | None = None,
    fingerprints: dict[str, str] | None = None,
) -> Plan:
    """The plan of a composed config and the overrides that it was composed with. Raises UserError.

    `fingerprints` keeps the data's between the plans of one command, whatever happens to the text meanwhile.
    """
    fingerprints = {} if fingerprints is None else fingerprints
    name = OmegaConf.select(composed, "hydra.runtime.choices.sweeps") or AD_HOC
    base, spec = _bare(composed)
    words = [o.input_line or "" for o in overrides if not o.is_sweep_override()]
    swept = {o.get_key_element(): _sweep_values(o) for o in overrides if o.is_sweep_override()}
    fixed = {o.get_key_element(): [o.value()] for o in overrides if not o.is_sweep_override()}
    if spec is None and name != AD_HOC:
        raise UserError(f"sweeps={name}: the file has no `sweep:` with question, baseline, compare and repeat")
    if spec is None:
        return _expand(AD_HOC, words, base, _ad_hoc(swept, fixed), choose, fingerprints)
    return _expand(name, words, base, _narrow(spec, name, swept, fixed), choose, fingerprints)


def _bare(composed: DictConfig) -> tuple[DictConfig, SweepConfig | None]:
    """A composed config as one run's, without Hydra's node, and the sweep that it carried."""
    base = copy.deepcopy(composed)
    OmegaConf.set_struct(base, False)
    try:
        spec: SweepConfig | None = None if base.sweep is None else OmegaConf.to_object(base.sweep)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(explain(error, "sweep")) from error
    base.sweep = None
    base.pop("hydra", None)
    OmegaConf.set_struct(base, True)
    return base, spec


def _sweep_values(override: Override) -> list[Any]:
    if isinstance(override.value(), Glob):
        group = override.key_or_group
        choices = sorted(p.stem for p in (ROOT / group).glob("*.yaml")) or sorted(
            p.stem for p in (ROOT / "conf" / group).glob("*.yaml")
        )
        why = "a command runs one sweep" if group == "sweeps" else "a pattern would change with the folder"
        raise UserError(f"{override.input_line}: {why}; name what to run: {', '.join(choices)}")
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: an interval has no values to run; list them")
    return [_unquoted(value) for value in override.sweep_iterator()]


def _unquoted(value: Any) -> Any:
    """Hydra's parse of one swept value as plain containers."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_unquoted(v) for v in value]
    if isinstance(value, dict):
        return {_unquoted(k): _unquoted(v) for k, v in value.items()}
    return value


def _ad_hoc(swept: Mapping[str, list[Any]], fixed: Mapping[str, list[Any]]) -> SweepConfig:
    """Roles of a plain `-m a=1,2 b=3,4 seed=0,1`: the first field is compared, others go across, seeds repeat."""
    axes = {k: v for k, v in swept.items() if k != "seed"}
    compared = next(iter(axes), None)
    computed = {k: v[0] for k, v in fixed.items() if k in GROUPS or k.split(".")[0] in IDENTITY_SECTIONS}
    alone = ",".join(f"{k.split('.')[-1]}={v}" for k, v in computed.items()) or "defaults"
    if len(alone) > LONGEST_ARM:
        alone = f"{len(computed)} overrides"
    arms = {_arm(compared, v): {compared: v} for v in axes.pop(compared)} if compared else {alone: {}}
    if compared and len(arms) < len(swept[compared]):
        raise UserError(f"{compared}: the same value twice")
    repeat = {"seed": swept["seed"]} if "seed" in swept else {}
    return SweepConfig("", next(iter(arms)), arms, axes, {}, repeat)


def _arm(key: str, value: Any) -> str:
    """What a swept value is called: a word says enough, a number needs its field."""
    return value if isinstance(value, str) else f"{key.split('.')[-1]}={value}"


def _narrow(
    spec: SweepConfig, name: str, swept: Mapping[str, list[Any]], fixed: Mapping[str, list[Any]]
) -> SweepConfig:
    """A sweep file's spec with the command line's values in place of a role's own."""
    compared = {key for arm in spec.compare.values() for key in arm}
    roles = {"across": dict(spec.across), "repeat": dict(spec.repeat)}
    for key, values in {**fixed, **swept}.items():
        role = next((r for r, fields in roles.items() if key in fields), None)
        if role:
            roles[role][key] = values
        elif key in compared:
            raise UserError(f"{key}: sweep {name} varies it from arm to arm; change sweep.compare instead")
        elif key in spec.tune:
            raise UserError(f"{key}: sweep {name} tunes it; change sweep.tune instead")
        elif key in swept:
            raise UserError(
                f"{key}: swept, but it has no role in sweep {name} (its roles cover "
                f"{', '.join(sorted(compared | set(spec.across) | set(spec.tune) | set(spec.repeat)))})"
            )
    return SweepConfig(spec.question, spec.baseline, spec.compare, roles["across"], spec.tune, roles["repeat"])


class _Base:
    """A composed config from which cells are made: each value's type is checked once, however many cells have it."""

    def __init__(self, composed: DictConfig) -> None:
        self._composed = copy.deepcopy(composed)
        self.built: RunConfig = OmegaConf.to_object(composed)  # type: ignore[assignment]
        self._typed: dict[tuple[str, str], Any] = {}

    def with_values(self, values: Values) -> RunConfig:
        """A copy with some fields set. Raises UserError for an unknown field or a bad value."""
        config = copy_config(self.built)
        for key, value in values.items():
            put(config, key, self.typed(key, value))
        return config

    def typed(self, key: str, value: Any) -> Any:
        """A value as its field's type has it, so that 1 and 1.0 are one."""
        place = key, repr(value)
        if place not in self._typed:
            # A dict would be merged into one that was set before it.
            changed = copy.deepcopy(self._composed) if isinstance(value, dict) else self._composed
            set_field(changed, key, value)
            found = OmegaConf.select(changed, key)
            self._typed[place] = get(OmegaConf.to_object(changed), key) if OmegaConf.is_config(found) else found  # type: ignore[arg-type]
        return self._typed[place]


def _check_roles(spec: SweepConfig, name: str, base: _Base) -> None:
    def canonical(key: str, value: Any) -> str:
        return repr(value if key in GROUPS else base.typed(key, value))

    compared = {key for arm in spec.compare.values() for key in arm}
    if not spec.compare:
        raise UserError(f"sweep {name}: compares no arms")
    if spec.baseline not in spec.compare:
        raise UserError(
            f"sweep {name}: baseline={spec.baseline} is no arm; {did_you_mean(spec.baseline, spec.compare)}"
        )
    roles = {
        "compare": compared,
        "across": set(spec.across),
        "tune": set(spec.tune),
        "repeat": set(spec.repeat),
    }
    for (one, first), (other, second) in itertools.combinations(roles.items(), 2):
        shared = first & second - ({"seed"} if (one, other) == ("tune", "repeat") else set())
        if shared:
            raise UserError(f"sweep {name}: {', '.join(sorted(shared))} has two roles, {one} and {other}")
    for key in set.union(*roles.values()):
        if key not in GROUPS and key not in field_names():
            raise UserError(f"sweep {name}: {key}: no such field; {did_you_mean(key, field_names())}")
        if key not in GROUPS and key.split(".")[0] not in IDENTITY_SECTIONS:
            raise UserError(f"sweep {name}: {key} says how a run happens, not what it computes: it has no role")
    for role in (spec.across, spec.tune, spec.repeat):
        for key, values in role.items():
            if not values or len({canonical(key, v) for v in values}) < len(values):
                raise UserError(f"sweep {name}: {key} has {'a value twice' if values else 'no values'}")
    reported = {canonical("seed", seed) for seed in spec.repeat.get("seed", [base.built.seed])}
    if any(canonical("seed", seed) in reported for seed in spec.tune.get("seed", [])):
        raise UserError(f"sweep {name}: a seed that tunes must not be reported; give tune.seed other seeds")
    if spec.tune and "seed" not in spec.tune:
        raise UserError(f"sweep {name}: tunes without seeds of its own; add tune.seed")


def _expand(
    name: str,
    words: Sequence[str],
    base: DictConfig,
    spec: SweepConfig,
    choose: Chooser | None,
    fingerprints: dict[str, str],
) -> Plan:
    first = _Base(base)
    _check_roles(spec, name, first)
    swept = frozenset(
        {key for arm in spec.compare.values() for key in arm} | set(spec.across) | set(spec.tune) | set(spec.repeat)
    )
    if swept & GROUPS:  # whatever one group's file sets may mean nothing beside another's
        swept |= frozenset(field_names())
    bases = {"": first}

    def cell(arm: str, column: Values, tuned: Values, repeat: Values, purpose: str) -> Cell:
        values = {**spec.compare[arm], **column, **tuned, **repeat}
        groups = [f"{key}={values[key]}" for key in GROUPS if key in values]
        if " ".join(groups) not in bases:
            bases[" ".join(groups)] = _Base(_bare(compose([*words, *groups]))[0])
        run = bases[" ".join(groups)].with_values({k: v for k, v in values.items() if k not in GROUPS})
        settle(run, swept)
        known = repr(run.data)
        if known not in fingerprints:
            fingerprints[known] = data.fingerprint(run.data)
        shared = fingerprints[known]
        return Cell(arm, column, tuned, repeat, purpose, run, shared, signature(run, shared))

    cells: list[Cell] = []
    guesses: list[Cell] = []
    tuning: dict[tuple[str, str], list[Cell]] = {}
    grid = {k: v for k, v in spec.tune.items() if k != "seed"}
    for arm, column in itertools.product(spec.compare, _product(spec.across)):
        if grid:
            tuning[arm, repr(column)] = [
                cell(arm, column, tuned, {"seed": seed}, "tune")
                for tuned, seed in itertools.product(_product(grid), spec.tune["seed"])
            ]
            cells += tuning[arm, repr(column)]
    for arm, column in itertools.product(spec.compare, _product(spec.across)):
        best = choose(tuning[arm, repr(column)]) if grid and choose else {}
        for repeat in _product(spec.repeat):
            if best is None or (grid and not choose):
                guesses.append(cell(arm, column, next(_product(grid)), repeat, "report"))
            else:
                cells.append(cell(arm, column, best, repeat, "report"))
    return Plan(name, spec, cells, guesses)


def _product(values: Mapping[str, Sequence[Any]]) -> Iterator[Values]:
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))

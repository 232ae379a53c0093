"""Records small enough to publish: the ended runs of a sweep in two Parquet files, and back into a records folder.

    NAME.runs.parquet      one row a run: its signature, and config, summary, provenance, ... as JSON
    NAME.metrics.parquet   one row a logged value: metric, signature, step, value

Every logged step keeps the values of `PLAIN`; the first and the last one, and those with a diagnosis, keep all.
A value that was not finite is null, as in the records. Weights, logs and event files stay behind.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from andrea_exp.errors import UserError
from andrea_exp.record import Status, read_json, read_metrics, run_folder, status, write_json
from andrea_exp.rules import signature_of
from andrea_exp.sweep.plan import Plan

# The summary comes last, since it says that a run has ended.
DOCUMENTS = ("identity", "config", "provenance", "layers", "summary")
PLAIN = ("tokens", "train/loss", "lr", "grad_norm/total", "clip/coef")
DIAGNOSED = "stream/"  # rows with such metrics
Row = dict[str, float | None]
Value = tuple[str, str, int, float | None]
VALUE = ("metric", "signature", "step", "value")


def pack(plan: Plan, records: Path, folder: Path) -> tuple[list[Path], int]:
    """Writes a plan's ended runs into `folder`; returns the files, and how many planned runs have not ended.

    The same records give the same bytes. Raises UserError where nothing has ended, and where files that are there hold
    runs that would be lost.
    """
    signatures = sorted({cell.signature for cell in plan.cells})
    ended = [sig for sig in signatures if status(run_folder(records, sig)).finished]
    if not ended:
        raise UserError(f"{plan.name}: no finished runs in {records}/; run: andrea-exp sweep {plan.name}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{plan.name}.{part}.parquet" for part in ("runs", "metrics")]
    kept = _read(paths[0])["signature"].to_pylist() if paths[0].exists() else []
    if lost := len(set(kept) - set(ended)):
        raise UserError(
            f"{paths[0]} holds {lost} runs that would be lost, since they are not among the {len(ended)} to pack; "
            f"choose another folder, or first put them there: andrea-exp unpack {paths[0]} records={records}"
        )
    documents = [_documents(run_folder(records, sig)) for sig in ended]
    _write(paths[0], {name: [of[name] for of in documents] for name in ("signature", *DOCUMENTS)})
    # Sorted, so that like stands beside like.
    values = sorted((v for sig in ended for v in _values(run_folder(records, sig))), key=lambda value: value[:3])
    _write(paths[1], {name: [value[i] for value in values] for i, name in enumerate(VALUE)})
    return paths, len(signatures) - len(ended) + plan.waiting


def _documents(folder: Path) -> dict[str, str | None]:
    found = {name: read_json(folder / f"{name}.json") for name in DOCUMENTS}
    compact = {k: None if v is None else json.dumps(v, separators=(",", ":")) for k, v in found.items()}
    return {"signature": folder.name, **compact}


def _values(folder: Path) -> Iterator[Value]:
    rows = read_metrics(folder)
    for i, row in enumerate(rows):
        whole = i in (0, 1, len(rows) - 1) or any(name.startswith(DIAGNOSED) for name in row)
        kept = ((name, value) for name, value in row.items() if name != "step" and (whole or name in PLAIN))
        yield from ((name, folder.name, int(row["step"]), value) for name, value in kept)


def _write(path: Path, columns: dict[str, Sequence[Any]]) -> None:
    types = {"step": pa.int64(), "value": pa.float64()}
    table = pa.table({name: pa.array(values, types.get(name, pa.string())) for name, values in columns.items()})
    partial = path.with_name(f".{path.name}")
    pq.write_table(
        table,
        partial,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in columns if name != "value"],
        # Most values are float32 in a float64: with their bytes split by place, those that are always 0 cost nothing.
        use_byte_stream_split=["value"] if "value" in columns else False,
    )
    partial.rename(path)


def unpack(packed: Path, records: Path) -> tuple[int, int]:
    """Writes packed runs into a records folder; returns how many were new, and how many were there already.

    `packed` is a folder of packed sweeps or one `NAME.runs.parquet`. A run that has not ended is replaced by one that
    has, unless it is under way; one that has ended gains what it lacks. Raises UserError where `packed` is neither, and
    for a run that is not what its signature says.
    """
    new = there = 0
    for path in _packed(packed):
        metrics = _metrics(path.with_name(path.name.replace(".runs.", ".metrics.")))
        for run in _read(path).to_pylist():
            folder = run_folder(records, run["signature"])
            stands = status(folder)
            if stands not in (Status.running, Status.queued):
                _restore(folder, path, run, metrics.get(run["signature"], []), only_missing=stands.finished)
            there += (kept := stands.finished or stands in (Status.running, Status.queued))
            new += not kept
    return new, there


def _packed(path: Path) -> list[Path]:
    found = sorted(path.glob("*.runs.parquet")) if path.is_dir() else [path] if path.is_file() else []
    if not found or not all(p.name.endswith(".runs.parquet") for p in found):
        raise UserError(f"{path}: neither a folder with *.runs.parquet nor such a file")
    return found


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a file that pack wrote ({str(error).splitlines()[0]})") from error


def _metrics(path: Path) -> dict[str, list[Row]]:
    """Rows by signature, in the order of their steps."""
    by_run: dict[str, dict[int, Row]] = {}
    table = _read(path)
    columns = (table[name].to_pylist() for name in VALUE)
    for metric, sig, step, value in zip(*columns, strict=True):
        by_run.setdefault(sig, {}).setdefault(step, {"step": step})[metric] = value
    return {sig: [rows[step] for step in sorted(rows)] for sig, rows in by_run.items()}


def _restore(folder: Path, path: Path, run: dict[str, str], rows: Sequence[Row], only_missing: bool) -> None:
    documents = {name: json.loads(run[name]) for name in DOCUMENTS if run.get(name)}
    if signature_of(documents.get("identity", {})) != folder.name:
        raise UserError(f"{path}: {folder.name} is not the run that its signature says")
    folder.mkdir(parents=True, exist_ok=True)
    logged = folder / "metrics.jsonl"
    if not (only_missing and logged.exists()):
        logged.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    for name, document in documents.items():
        if not (only_missing and (folder / f"{name}.json").exists()):
            write_json(folder / f"{name}.json", document, durable=False)

"""Records small enough to publish: the ended runs of a sweep in two Parquet files, and back into a records folder.

    NAME.runs.parquet      one row a run: its signature, and config, summary, provenance, ... as JSON
    NAME.metrics.parquet   one row a logged step: signature, step, one column a metric

Every logged step keeps the values of `PLAIN`; the first and the last one, and those with a diagnosis, keep all.
Values are kept in full. Weights, logs and event files stay behind.
"""

import json
import math
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
PLAIN = ("step", "tokens", "train/loss", "lr", "grad_norm/total", "clip/coef")
DIAGNOSED = "stream/"  # rows with such metrics
Row = dict[str, float | None]


def pack(plan: Plan, records: Path, folder: Path) -> tuple[list[Path], int]:
    """Writes a plan's ended runs into `folder`; returns the files, and how many planned runs have not ended.

    The same records give the same bytes.
    """
    signatures = sorted({cell.signature for cell in plan.cells})
    ended = [sig for sig in signatures if status(run_folder(records, sig)).finished]
    if not ended:
        raise UserError(f"{plan.name}: no finished runs in {records}/; run: andrea-exp sweep {plan.name}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{plan.name}.{part}.parquet" for part in ("runs", "metrics")]
    _write(paths[0], [_documents(run_folder(records, sig)) for sig in ended])
    _write(paths[1], [row for sig in ended for row in _rows(run_folder(records, sig))])
    return paths, len(signatures) - len(ended) + plan.waiting


def _documents(folder: Path) -> dict[str, str | None]:
    found = {name: read_json(folder / f"{name}.json") for name in DOCUMENTS}
    compact = {k: None if v is None else json.dumps(v, separators=(",", ":")) for k, v in found.items()}
    return {"signature": folder.name, **compact}


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Thinned; a value that was not finite, null in JSON, is NaN, and one that was not logged is null."""
    rows = read_metrics(folder)
    for i, row in enumerate(rows):
        whole = i in (0, 1, len(rows) - 1) or any(name.startswith(DIAGNOSED) for name in row)
        kept = {k: math.nan if v is None else v for k, v in row.items() if whole or k in PLAIN}
        yield {"signature": folder.name, **kept}


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = [pa.array([row.get(name) for row in rows], from_pandas=False) for name in names]
    floats = [name for name, array in zip(names, arrays, strict=True) if pa.types.is_floating(array.type)]
    partial = path.with_name(f".{path.name}")
    # Most values are float32 in a float64: with their bytes split by place, what is always zero costs nothing.
    pq.write_table(
        pa.table(arrays, names=names),
        partial,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in names if name not in floats],
        use_byte_stream_split=floats,
    )
    partial.rename(path)


def unpack(packed: Path, records: Path) -> tuple[int, int]:
    """Writes packed runs into a records folder; returns how many were new, and how many were there already.

    `packed` is a folder of packed sweeps or one `NAME.runs.parquet`. Raises UserError where it is neither, and for a
    run that is not what its signature says.
    """
    new = there = 0
    for path in _packed(packed):
        metrics = _metrics(path.with_name(path.name.replace(".runs.", ".metrics.")))
        for run in _read(path).to_pylist():
            folder = run_folder(records, run["signature"])
            if status(folder) is not Status.missing:
                there += 1
                continue
            _restore(folder, path, run, metrics.get(run["signature"], []))
            new += 1
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
    """Rows by signature, as they were logged."""
    table = _read(path)
    names = table.column_names[1:]
    by_run: dict[str, list[Row]] = {}
    for sig, *values in zip(*(column.to_pylist() for column in table.columns), strict=True):
        logged = ((name, v) for name, v in zip(names, values, strict=True) if v is not None)
        by_run.setdefault(sig, []).append({name: v if math.isfinite(v) else None for name, v in logged})
    return by_run


def _restore(folder: Path, path: Path, run: dict[str, str], rows: Sequence[Row]) -> None:
    documents = {name: json.loads(run[name]) for name in DOCUMENTS if run.get(name)}
    if signature_of(documents.get("identity", {})) != folder.name:
        raise UserError(f"{path}: {folder.name} is not the run that its signature says")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    for name, document in documents.items():
        write_json(folder / f"{name}.json", document, durable=False)

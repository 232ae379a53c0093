"""Every op by every implementation: right first, then fast. `python -m andrea_exp.bench_ops --out FOLDER`.

It needs torch and Triton alone (rich draws its table and matplotlib its figure where they are installed), so that it
runs on any machine that has a GPU. `cases.py` says what is measured, `clock.py` how, `run.py` in what order,
`report.py` makes table, comparisons and figure from the JSON.
"""

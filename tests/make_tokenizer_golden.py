#!/usr/bin/env python3
"""Writes tests/data/tokenizer_golden.txt: texts, the pieces that four families of tokenizers cut them into, their ids.

The pieces come from the pre-tokenizers of the Hugging Face package `tokenizers`, set up as each family's tokenizer.json
does; the ids from the whole tokenizer, given the vocabulary and merges of a GGUF. Invalid UTF-8 is no text to that
package: there the rule of examples/llama/tokenizer.h is applied (valid stretches apart, other bytes one by one).

    pip install tokenizers gguf
    python3 tests/make_tokenizer_golden.py --model build/model/SmolLM2-135M-Instruct.Q4_1.gguf

The ids of another family's vocabulary are compared by giving the test both files:

    python3 tests/make_tokenizer_golden.py --model QWEN2.gguf -o /tmp/qwen2.txt
    MODEL=QWEN2.gguf GOLDEN=/tmp/qwen2.txt build/test_tokenizer
"""
import argparse
import random

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

FAMILIES = ["gpt2", "smollm", "llama3", "qwen2"]  # the file's columns
ALIASES = {"gpt-2": "gpt2", "llama-bpe": "llama3", "llama-v3": "llama3"}
CONTROL, USER_DEFINED = 3, 4
MAX_LISTED = 40  # a longer list is stored as its length and hash


def pre_tokenizer(family):
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family == "gpt2":
        return gpt2
    if family == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    number = {"llama3": r"\p{N}{1,3}", "qwen2": r"\p{N}"}[family]
    regex = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + number +
             r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def whole_tokenizer(family, vocab, merges):
    t = Tokenizer(models.BPE(vocab, merges, ignore_merges=family == "llama3"))
    t.pre_tokenizer = pre_tokenizer(family)
    return t


def byte_alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


SPELLED = byte_alphabet()


def fnv(values):
    h = 0xCBF29CE484222325
    for v in values:
        h = (h ^ v) * 0x100000001B3 & (1 << 64) - 1
    return h


class Oracle:
    """The whole tokenizer of a GGUF: ids with special tokens as text, and with special tokens parsed."""

    def __init__(self, path):
        fields = GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        types = fields["tokenizer.ggml.token_type"].contents()
        special = {i for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)}
        self.names = [tokens[i] for i in sorted(special)]
        self.vocab = {t: i for i, t in enumerate(tokens) if i not in special}
        merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
        pre = fields["tokenizer.ggml.pre"].contents()
        family = ALIASES.get(pre, pre)

        # Added tokens keep the ids that the vocabulary gives them, or else are numbered behind it.
        at_end = min(special) == len(self.vocab)
        self.plain = whole_tokenizer(family, self.vocab, merges)
        self.parsing = whole_tokenizer(family, self.vocab if at_end else {t: i for i, t in enumerate(tokens)}, merges)
        self.parsing.add_special_tokens([AddedToken(n, normalized=False) for n in self.names])
        assert all(self.parsing.token_to_id(n) == i for n, i in zip(self.names, sorted(special)))

        byte_of = {c: b for b, c in SPELLED.items()}
        self.fingerprint = len(tokens), fnv(
            b for i, t in enumerate(tokens) for b in (t.encode() if i in special else [byte_of[c] for c in t]))

    def ids(self, data):
        out = []
        for stretch in stretches(data):
            if isinstance(stretch, str):
                out += self.plain.encode(stretch, add_special_tokens=False).ids
            elif SPELLED[stretch] in self.vocab:
                out.append(self.vocab[SPELLED[stretch]])
        return out

    def parsed_ids(self, text):
        return self.parsing.encode(text, add_special_tokens=False).ids


def stretches(data):
    """Valid stretches as str, every other byte as int."""
    while data:
        try:
            yield data.decode()
            return
        except UnicodeDecodeError as e:
            if e.start:
                yield data[:e.start].decode()
            yield data[e.start]
            data = data[e.start + 1:]


def piece_lengths(pre, data):
    out = []
    for stretch in stretches(data):
        if isinstance(stretch, str):
            out += [len(stretch[a:b].encode()) for _, (a, b) in pre.pre_tokenize_str(stretch)]
        else:
            out.append(1)
    return out


# ---- texts. Blocks are given as ranges that were assigned long ago, so that no Unicode version changes the answers.

WORDS = """the of and to in is that for it as with was on be by at which from not this all have are but had they
you one we her his their can would will more when who so no out up into them time if some could its then two may
first any these Licence Software COPYRIGHT notice warranty condition permission liability distribute
modification recipient derivative Zürich naïve café façade coöperate Ångström jalapeño smörgåsbord
résumé don't it's we'll I'VE they're SHE'D ROCK'N'ROLL can’t l’été O'Neil 'tis rock'n'roll y'all'd've
internationalisation supercalifragilistic iPhone GitHub HTTPServer XMLHttp snake_case camelCase kebab-case
SCREAMING_SNAKE foo.bar e.g. i.e. U.S.A. C++ C# .NET F# node.js""".split()
SCRIPTS = {
    "Latin": [(0xC0, 0x17F), (0x1E00, 0x1EFF)], "Greek": [(0x3B1, 0x3C9), (0x391, 0x3A1)],
    "Cyrillic": [(0x400, 0x45F)], "Armenian": [(0x561, 0x586)], "Hebrew": [(0x5D0, 0x5EA), (0x5B0, 0x5BD)],
    "Arabic": [(0x620, 0x65F), (0x660, 0x669)], "Devanagari": [(0x904, 0x94D), (0x966, 0x96F)],
    "Bengali": [(0x995, 0x9A8), (0x9BE, 0x9C4)], "Tamil": [(0xB95, 0xB95), (0xBAE, 0xBB9), (0xBBE, 0xBC2)],
    "Thai": [(0xE01, 0xE3A), (0xE40, 0xE59)], "Georgian": [(0x10D0, 0x10F0)], "Ethiopic": [(0x1200, 0x1248)],
    "Khmer": [(0x1780, 0x17B3), (0x17B6, 0x17D3)], "Tibetan": [(0xF40, 0xF47), (0xF71, 0xF84)],
    "Mongolian": [(0x1820, 0x1842), (0x180E, 0x180E)], "Han": [(0x4E00, 0x9FA5)], "Hiragana": [(0x3041, 0x3096)],
    "Katakana": [(0x30A1, 0x30FA)], "Hangul": [(0xAC00, 0xD7A3)], "Jamo": [(0x1100, 0x1112), (0x1161, 0x1175)],
    "HanB": [(0x20000, 0x2A6D6)], "Gothic": [(0x10330, 0x1034A)], "Math": [(0x1D400, 0x1D454), (0x1D7CE, 0x1D7FF)],
}
ANY = [(0x20, 0x7E), (0xA0, 0x377), (0x2010, 0x28FF), (0x3400, 0x4DB5), (0xA000, 0xA48C), (0x1F300, 0x1F6D2)]
EMOJI = ["\U0001F600", "\U0001F680", "\u2764\uFE0F", "\U0001F44D\U0001F3FD", "\u263A", "\u2603\uFE0E", "\U0001F926",
         "\U0001F468\u200D\U0001F469\u200D\U0001F467", "\U0001F9D1\U0001F3FF\u200D\U0001F4BB", "1\uFE0F\u20E3",
         "\U0001F3F3\uFE0F\u200D\U0001F308", "\U0001F1E9\U0001F1EA",
         "\U0001F3F4\U000E0067\U000E0062\U000E0065\U000E006E\U000E0067\U000E007F"]
SPACES = [" ", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\r", "\v", "\f", "\x85", "\xA0", "\u1680", "\u2003",
          "\u2028", "\u2029", "\u202F", "\u3000", "\u180E", "\u200B", "\uFEFF", "\u2060"]
NUMBERS = ["0", "7", "42", "482 915", "7364", "1234567890", "3.14159", "-1e-9", "1,000,000", "0xDEADBEEF", "1_000",
           "12:34:56", "2026-11-29", "+49 30 123456", "v1.2.3-rc4", "99%", "$5.00", "№5", "½", "x²", "Ⅷ",
           "٣٤٥", "१२३", "①②", "〇", "１２３"]
PUNCTUATION = [*"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
               "...", "--", "->", "=>", "!=", "::", "//", "“", "”", "…", "—", "«", "。"]
CODE = ["for (int64_t {0} = 0; {0} < {1}; {0}++) {{\n    sum += {0} * {2};\n}}\n",
        "def {0}({1}, *{2}):\n\treturn {1}[{2}:-1]\n",
        "if {0} is None:\n        raise ValueError(f\"{1} = {{{2}!r}}\")\n",
        "<a href=\"/{0}?{1}={2}\">{0}&nbsp;</a>", "SELECT {0}, COUNT(*) FROM {1} WHERE {2} >= 10;",
        "{{\"{0}\": [1, 2.5e3, null], \"{1}\": \"\\u00e9{2}\"}}", "#define {0}({1}) (((({1}))) ^ 0x{2})\r\n",
        "$ {0} --{1}={2} | grep -v '^#' > /dev/null 2>&1", "const {0} = ({1}) => {{ /* {2} */ }};"]
NAMES = ["x", "i", "n_tok", "HeadDim", "ff00", "größe", "v2"]
CONTROLS = [chr(c) for c in [*range(32), 127, *range(0x80, 0xA0), 0xAD, 0x200E, 0x202E, 0xFFF9, 0xE000, 0xFFFF]]
RUNS = [*"a=-_ \n\t.0é中", "ab", "=-", "\r\n", " \n", "\U0001F600"]
ALMOST_SPECIAL = ["<|im_", "<|", "|>", "[INST]", "<s>", "<|endoftext", "im_end|>", " "]
EDGES = PUNCTUATION + ["a", " ", "1", "'S", "'ſ", "\n"]
BAD_BYTES = [b"\xff", b"\xfe\xff", b"\x80", b"\xbf\xbf", b"\xc0\x80", b"\xc1\xbf", b"\xc3", b"\xe2\x82", b"\xc3(",
             b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xe0\x80\x80", b"\xf0\x80\x80\x80",
             b"\xf4\x90\x80\x80", b"\xf5\x80"]
REPEATED = [(b"a", 300000), (b" ", 300000), (b"ab", 100000), (b"=", 100001), (b"\n \t", 50000), (b"7", 20000),
            ("é".encode(), 50000)]


class Texts:
    """Random texts of many kinds."""

    def __init__(self, seed, specials):
        self.r = random.Random(seed)
        self.specials = specials

    def times(self, low, high):
        return range(self.r.randint(low, high))

    def some(self, choices, low, high, glue=""):
        return glue.join(self.r.choice(choices) for _ in self.times(low, high))

    def char(self, blocks):
        return chr(self.r.randint(*self.r.choice(blocks)))

    def prose(self):
        marks = [" ", " ", " ", ", ", ". ", "; ", "\n", " (", ") ", "? "]
        cases = [str, str, str.upper, str.title]
        return "".join(self.r.choice(cases)(self.r.choice(WORDS)) + self.r.choice(marks) for _ in self.times(1, 12))

    def code(self):
        return self.r.choice(CODE).format(*(self.r.choice(NAMES) for _ in range(3)))

    def script(self):
        blocks = self.r.choice(list(SCRIPTS.values()))
        return "".join(self.char(blocks) + self.r.choice(["", "", "", "", " "]) for _ in self.times(1, 16))

    def combining(self):
        def one():
            return self.r.choice("aeiouAnsyZ क") + "".join(self.char([(0x300, 0x36F)]) for _ in self.times(0, 3))
        return "".join(one() for _ in self.times(1, 10))

    def run(self):
        return self.r.choice(RUNS) * self.r.randint(2, 120)

    def any_character(self):
        return "".join(self.char(ANY) for _ in self.times(1, 20))

    def special(self):
        def one():
            return self.r.choice([self.r.choice(self.specials), self.r.choice(self.specials),
                                  self.r.choice(ALMOST_SPECIAL), self.prose()[:12]])
        return "".join(one() for _ in self.times(1, 5))

    def numbers(self):
        return self.some(NUMBERS, 1, 5, self.r.choice(["", " ", "-"]))

    def emoji(self):
        return self.some(EMOJI, 1, 6, self.r.choice(["", " "]))

    def spaces(self):
        after = ["a", "Z9", "7", "٣", "½", "'s", "!", "中", ""]
        return "".join(self.some(SPACES, 1, 5) + self.r.choice(after) for _ in self.times(1, 5))

    def controls(self):
        return "".join(self.r.choice(CONTROLS) + self.r.choice(["", "a", " "]) for _ in self.times(1, 8))

    def edges(self):
        return self.some(EDGES, 1, 10)

    def mixed(self):
        makers = [self.prose, self.code, self.script, self.combining, self.any_character, self.numbers, self.emoji,
                  self.spaces, self.edges]
        return "".join(self.r.choice(makers)()[:24] for _ in self.times(2, 5))

    def invalid(self):
        parts = [self.r.choice(BAD_BYTES), bytes(self.r.randrange(256) for _ in self.times(1, 8))]
        parts += [self.mixed().encode()[:self.r.randint(0, 24)] for _ in self.times(0, 2)]
        self.r.shuffle(parts)
        return b"".join(parts)

    def collect(self, count):
        """Distinct texts as bytes: each kind in turn until there are count."""
        makers = [self.prose, self.code, self.script, self.script, self.combining, self.run, self.any_character,
                  self.special, self.numbers, self.emoji, self.spaces, self.controls, self.edges, self.mixed,
                  self.invalid]
        texts = {b"": None}
        while len(texts) < count:
            for make in makers:
                text = make()
                texts[text.encode() if isinstance(text, str) else text] = None
        return list(texts)[:count]


# ---- output

def listed(numbers):
    return ",".join(map(str, numbers)) if len(numbers) <= MAX_LISTED else f"#{len(numbers)}:{fnv(numbers):016x}"


def line(oracle, pres, unit, times):
    data = unit * times
    columns = [listed(piece_lengths(p, data)) for p in pres]
    columns = [columns[0]] + ["=" if b == a else b for a, b in zip(columns, columns[1:])]
    columns.append(listed(oracle.ids(data)))
    if any(n.encode() in data for n in oracle.names) and not any(isinstance(s, int) for s in stretches(data)):
        columns.append(listed(oracle.parsed_ids(data.decode())))
    return "|".join([unit.hex() + (f"*{times}" if times > 1 else "")] + columns)


def main():
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("--model", required=True, help="GGUF whose vocabulary and merges give the ids")
    arg.add_argument("--seed", type=int, default=1)
    arg.add_argument("--count", type=int, default=2000, help="texts, besides a few long runs")
    arg.add_argument("-o", "--output", default="tests/data/tokenizer_golden.txt")
    args = arg.parse_args()

    oracle = Oracle(args.model)
    pres = [pre_tokenizer(f) for f in FAMILIES]
    texts = [(t, 1) for t in Texts(args.seed, oracle.names[:8]).collect(args.count)] + REPEATED
    with open(args.output, "w", encoding="ascii") as out:
        out.write(f"# tests/make_tokenizer_golden.py --seed {args.seed} --count {args.count}\n"
                  "# text in hex, *times|bytes of each piece: gpt2|smollm|llama3|qwen2|ids|ids, special tokens parsed\n"
                  "# = as the column before; #count:hash of a long list (FNV-1a over the numbers)\n")
        out.write("vocabulary {} {:016x}\n".format(*oracle.fingerprint))
        for unit, times in texts:
            out.write(line(oracle, pres, unit, times) + "\n")


if __name__ == "__main__":
    main()

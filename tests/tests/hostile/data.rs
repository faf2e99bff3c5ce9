//! Broken data: files and folders that hold no text to learn from.

use zf_tests::golden;

use super::bench::{Row, TRAIN, check};

/// A run on the file `name` with these contents.
fn data(row: &str, name: &'static str, contents: &'static [u8], says: &[&str]) -> Row<'static> {
    with(row, name, contents, "", says)
}

/// A run on the file `name` with more settings of `[data]`, from line 4 on.
fn with(row: &str, name: &'static str, contents: &'static [u8], settings: &'static str, says: &[&str]) -> Row<'static> {
    Row::new(row, TRAIN, says, move |place| {
        place.write(name, contents);
        place.run(&format!("[data]\npath = \"{name}\"\n{settings}"));
    })
}

/// A line that is right, so that the next one is the second.
const GOOD: &str = "{\"text\": \"a line that can be read\"}\n";

/// A run on a good line and a bad one.
fn second(row: &str, line: &'static str, says: &[&str]) -> Row<'static> {
    Row::new(row, TRAIN, says, move |place| {
        place.write("a.jsonl", format!("{GOOD}{line}\n"));
        place.run("[data]\npath = \"a.jsonl\"");
    })
}

#[test]
fn files() {
    let text = "all work and no play\n".repeat(50);
    check(&[
        Row::works("as it is", TRAIN, &["run folder: new"], move |place| {
            place.write("a.txt", &text);
            place.run("[data]\npath = \"a.txt\"");
        }),
        Row::new("missing", TRAIN, &["run.toml:2", "data.path", "no.txt", "relative to the run file"], |place| {
            place.run("[data]\npath = \"no.txt\"");
        }),
        Row::new("empty folder", TRAIN, &["data.path", "texts", "no .txt, .jsonl or .bin file"], |place| {
            place.write("texts/readme.md", "x");
            place.run("[data]\npath = \"texts\"");
        }),
        data("empty text", "a.txt", b"", &["run.toml:2", "a.txt: the file is empty"]),
        data("only a mark", "a.txt", b"\xef\xbb\xbf", &["a.txt", "too short: 0 tokens"]),
        data(
            "broken UTF-8",
            "a.txt",
            b"good\nbad \xff\n",
            &["a.txt: line 2: broken UTF-8 at byte 9", "convert the file"],
        ),
        data("cut UTF-8", "a.txt", b"cut \xe2\x98", &["a.txt: line 1: broken UTF-8 at byte 4"]),
        data("UTF-16", "a.txt", b"\xff\xfea\0b\0", &["a.txt: line 1: broken UTF-8 at byte 0"]),
        data(
            "too short",
            "a.txt",
            b"only a few words",
            &["a.txt", "17 tokens, at least 33 are needed", "data.sequence_length"],
        ),
        data(
            "unknown extension",
            "a.csv",
            b"a,b\n",
            &["data.path", "a.csv: unknown extension; expected .txt, .jsonl, .bin"],
        ),
        data("no extension", "text", b"words", &["data.path", "text: unknown extension"]),
        data(
            "odd tokens",
            "a.bin",
            &[1; 101],
            &["a.bin: 101 bytes are no whole number of tokens of 2 bytes", "token_bytes"],
        ),
        with("odd wide tokens", "a.bin", &[1; 102], "token_bytes = 4", &["a.bin: 102 bytes", "tokens of 4 bytes"]),
        data("empty tokens", "a.bin", b"", &["a.bin: the file is empty"]),
        data("few tokens", "a.bin", &[0; 20], &["a.bin", "10 tokens, at least 33"]),
        data(
            "ids beyond the vocabulary",
            "a.bin",
            &[0, 1],
            &["a.bin: token 0 has id 256", "vocabulary of 256 (ids 0 to 255)"],
        ),
        with(
            "bare tokens as documents",
            "a.bin",
            &[1, 0],
            "pack = false",
            &["data.pack = false needs documents", "a.bin"],
        ),
        with(
            "too short to share",
            "a.txt",
            b"just enough for one sequence of 32",
            "validation = 0.5",
            &["a.txt", "too short"],
        ),
        Row::new("validation is missing", TRAIN, &["data.validation", "v.txt", "no such file"], |place| {
            place.run("[data]\nvalidation = \"v.txt\"");
        }),
        Row::new("validation of what is learnt", TRAIN, &["data.validation", "same contents"], |place| {
            place.copy(&golden(""), "golden");
            place.run("[data]\npath = \"golden/tokens.bin\"\nvalidation = \"golden/tokens.bin\"");
        }),
        Row::new("tokenizer that is none", TRAIN, &["data.tokenizer", "has no tokenizer.json"], |place| {
            place.write("t/x", "");
            place.run("[data]\ntokenizer = \"t\"");
        }),
        Row::new("cache that cannot be", TRAIN, &["token cache", "file/c", "set data.cache"], |place| {
            place.write("file", "");
            place.write("a.txt", "words ".repeat(50));
            place.run("[data]\npath = \"a.txt\"\ncache = \"file/c\"");
        }),
        Row::new("path is a pipe", TRAIN, &["data.path", "p.txt: neither a file nor a folder"], |place| {
            let made = std::process::Command::new("mkfifo").arg(place.path("p.txt")).status();
            assert!(made.is_ok_and(|status| status.success()), "mkfifo");
            place.run("[data]\npath = \"p.txt\"");
        }),
        Row::new("eval of nothing", "eval m --data no.txt", &["no.txt", "no such file"], |place| {
            place.copy(&golden("tiny-llama"), "m");
        }),
        Row::new("eval of an empty file", "eval m --data a.txt", &["a.txt: the file is empty"], |place| {
            place.copy(&golden("tiny-llama"), "m");
            place.write("a.txt", "");
        }),
        Row::new(
            "eval of no length",
            "eval m --data a.txt --sequence-length 0",
            &["sequence_length", "at least 1"],
            |place| {
                place.copy(&golden("tiny-llama"), "m");
                place.write("a.txt", "words");
            },
        ),
    ]);
}

#[test]
fn lines() {
    check(&[
        second("cut line", "{\"text\": \"a", &["run.toml:2", "a.jsonl:2: broken JSON: EOF while parsing"]),
        second("no JSON", "text: a", &["a.jsonl:2: broken JSON: expected"]),
        second("two values", "{\"text\": \"a\"} {}", &["a.jsonl:2: broken JSON: trailing characters at column 15"]),
        second("a list", "[1, 2]", &["a.jsonl:2: expected an object with `text`", "found a list"]),
        second("wrong fields", "{\"txt\": \"a\"}", &["a.jsonl:2: expected an object with `text`", "found `txt`"]),
        second("number for a text", "{\"text\": 3}", &["a.jsonl:2: `text` must be a string, found a number"]),
        second("prompt alone", "{\"prompt\": \"a\"}", &["a.jsonl:2:", "`prompt` and `completion`", "found `prompt`"]),
        second(
            "messages of nobody",
            "{\"messages\": [{\"content\": \"a\"}]}",
            &["a.jsonl:2: message 0: `role` is missing"],
        ),
        second("no messages", "{\"messages\": []}", &["a.jsonl:2: `messages` is empty"]),
        second(
            "chat without a template",
            "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
            &["a.jsonl:2:", "chat template"],
        ),
        second("far too deep", DEEP, &["a.jsonl:2: broken JSON: recursion limit exceeded"]),
        data(
            "broken UTF-8 in a line",
            "a.jsonl",
            b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}",
            &["a.jsonl:2: broken UTF-8 at byte 24"],
        ),
        data("only empty lines", "a.jsonl", b"\n\n\n", &["a.jsonl", "too short: 0 tokens"]),
        data("only empty documents", "a.jsonl", b"{\"text\": \"\"}\n", &["a.jsonl", "too short: 0 tokens"]),
    ]);
}

/// Lists in lists, far deeper than any recursion should follow.
const DEEP: &str = match std::str::from_utf8(&[b'['; 100_000]) {
    Ok(text) => text,
    Err(_) => "",
};

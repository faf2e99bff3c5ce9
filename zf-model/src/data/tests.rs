use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;
use zf_core::Error;
use zf_core::data::{Dataset, OrderKind, Split};
use zf_core::model::IGNORE;
use zf_core::registry::{BuildContext, Registry};

use super::{DataConfig, TextDataset, Validation};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::tests::chat_folder;

type Files<'a> = &'a [(&'a str, &'a [u8])];

struct Folder(TempDir);

impl Folder {
    fn new(files: Files<'_>) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for (name, contents) in files {
            folder.write(name, contents);
        }
        folder
    }

    fn write(&self, name: &str, contents: &[u8]) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }

    fn open(&self, config: &DataConfig) -> Result<TextDataset, Error> {
        self.open_with(config, &Tokenizer::open(None).unwrap())
    }

    fn open_with(&self, config: &DataConfig, tokenizer: &Tokenizer) -> Result<TextDataset, Error> {
        let mut config = config.clone();
        config.cache.get_or_insert_with(|| ".cache".into());
        config.open(self.0.path(), tokenizer, Some(256))
    }

    fn cached(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.path().join(".cache")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }
}

fn unpacked(path: &str, length: usize) -> DataConfig {
    DataConfig { pack: false, ..DataConfig::new(path, length) }
}

fn with_validation(config: DataConfig, fraction: f64) -> DataConfig {
    DataConfig { validation: Validation::Fraction(fraction), ..config }
}

fn read(data: &TextDataset, split: Split, index: u64) -> (Vec<i64>, Vec<i64>) {
    let length = data.sequence_length();
    let (mut inputs, mut targets) = (vec![-1; length], vec![-1; length]);
    data.read(split, index, &mut inputs, &mut targets).unwrap();
    (inputs, targets)
}

/// Inputs and targets as text; ends of text are `$`, targets that do not count `_`.
fn show(data: &TextDataset, split: Split, index: u64) -> (String, String) {
    let text = |ids: Vec<i64>| -> String {
        let letter = |id| match id {
            0 => '$',
            IGNORE => '_',
            id => char::from_u32(u32::try_from(id).unwrap()).unwrap(),
        };
        ids.into_iter().map(letter).collect()
    };
    let (inputs, targets) = read(data, split, index);
    (text(inputs), text(targets))
}

fn pairs<const N: usize>(pairs: [(&str, &str); N]) -> Vec<(String, String)> {
    pairs.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect()
}

fn all(data: &TextDataset, split: Split) -> Vec<(String, String)> {
    (0..data.len(split)).map(|index| show(data, split, index)).collect()
}

#[test]
fn token_files_are_read_as_the_interface_says() {
    let tokens: Vec<u16> = (0..200).map(|i| (i * 7 % 256) as u16).collect();
    let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    let wide: Vec<u8> = tokens.iter().flat_map(|t| u32::from(*t).to_le_bytes()).collect();
    let folder = Folder::new(&[("a.bin", &bytes), ("b.bin", &wide)]);
    let config = DataConfig { token_bytes: 4, ..DataConfig::new("b.bin", 64) };
    for data in [folder.open(&DataConfig::new("a.bin", 64)).unwrap(), folder.open(&config).unwrap()] {
        assert_eq!(data.len(Split::Train), 3);
        assert_eq!(data.len(Split::Validation), 0);
        for index in 0..3 {
            let (inputs, targets) = read(&data, Split::Train, index);
            let from = 64 * index as usize;
            let expected = |from: usize| -> Vec<i64> { tokens[from..from + 64].iter().map(|&t| t.into()).collect() };
            assert_eq!(inputs, expected(from));
            assert_eq!(targets, expected(from + 1));
        }
    }
    assert!(!folder.0.path().join(".cache").exists(), "tokens need no cache");
}

#[test]
fn documents_are_packed_with_an_end_between() {
    let lines = b"{\"text\": \"abc\"}\n{\"text\": \"\"}\n{\"prompt\": \"de\", \"completion\": \"fg\"}\n";
    let folder = Folder::new(&[("d/a.txt", b"12"), ("d/b/c.jsonl", lines), ("d/.hidden.txt", b"x"), ("d/x.md", b"no")]);
    let data = folder.open(&DataConfig::new("d", 4)).unwrap();
    // 12$ abc$ defg$: prompts are inputs but no targets.
    assert_eq!(all(&data, Split::Train), pairs([("12$a", "2$ab"), ("bc$d", "c$__")]));
    assert_eq!(data.tokens(), 12);
    let notes = data.notes().join("\n");
    assert!(notes.contains("1 files with other extensions"), "{notes}");
    assert!(notes.contains("1 empty documents"), "{notes}");
}

#[test]
fn a_document_is_a_row_without_packing() {
    let lines = br#"{"text": "abcdefg"}
{"text": "hi"}
{"prompt": "pp", "completion": "c"}
{"prompt": "too long", "completion": "c"}
{"prompt": "p", "completion": ""}
"#;
    let folder = Folder::new(&[("a.jsonl", lines)]);
    let data = folder.open(&unpacked("a.jsonl", 4)).unwrap();
    // An empty completion still teaches to end.
    let expected = pairs([("abcd", "bcde"), ("hi$$", "i$__"), ("ppc$", "_c$_"), ("p$$$", "$___")]);
    assert_eq!(all(&data, Split::Train), expected);
    let notes = data.notes().join("\n");
    assert!(notes.contains("1 documents are longer than data.sequence_length = 4"), "{notes}");
    assert!(notes.contains("1 documents have no token that counts"), "{notes}");
    let data = folder.open(&with_validation(unpacked("a.jsonl", 4), 0.3)).unwrap();
    assert_eq!(all(&data, Split::Train), expected[..3]);
    assert_eq!(all(&data, Split::Validation), expected[3..]);
}

#[test]
fn conversations_teach_the_assistant() {
    let model = chat_folder(
        "{% for m in messages %}{{ m.role[0] + m.content + '<|im_end|>' }}{% endfor %}\
         {% if add_generation_prompt %}a{% endif %}",
    );
    let tokenizer = Tokenizer::open(Some(model.path())).unwrap();
    let line = br#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "!"}]}"#;
    let folder = Folder::new(&[("a.jsonl", line)]);
    let data = folder.open_with(&unpacked("a.jsonl", 8), &tokenizer).unwrap();
    let id = |text: &str| i64::from(tokenizer.encode(text, false).unwrap()[0]);
    let end = i64::from(tokenizer.eos().unwrap());
    let (inputs, targets) = read(&data, Split::Train, 0);
    assert_eq!(inputs[..6], [id("u"), id("q"), end, id("a"), id("!"), end], "the turn's end is not doubled");
    assert_eq!(targets, [IGNORE, IGNORE, IGNORE, id("!"), end, IGNORE, IGNORE, IGNORE]);
}

#[test]
fn text_documents_open_as_the_tokenizer_wants() {
    let model = chat_folder("");
    let tokenizer = Tokenizer::open(Some(model.path())).unwrap();
    let folder = Folder::new(&[("a.txt", b"hello")]);
    let data = folder.open_with(&unpacked("a.txt", 3), &tokenizer).unwrap();
    let hello = tokenizer.encode("hello", false).unwrap();
    let expected = [tokenizer.start()[0], hello[0], hello[1], tokenizer.eos().unwrap()].map(i64::from);
    assert_eq!(read(&data, Split::Train, 0), (expected[..3].to_vec(), expected[1..].to_vec()));
}

#[test]
fn a_validation_file_stands_alone() {
    let folder = Folder::new(&[("a.txt", b"abcdefgh"), ("v.txt", b"123456789"), ("same.txt", b"abcdefgh")]);
    let config = |file: &str| DataConfig { validation: Validation::Path(file.into()), ..DataConfig::new("a.txt", 4) };
    let data = folder.open(&config("v.txt")).unwrap();
    assert_eq!(data.len(Split::Train), 2);
    assert_eq!(all(&data, Split::Validation), pairs([("1234", "2345"), ("5678", "6789")]));
    let error = folder.open(&config("same.txt")).unwrap_err();
    assert!(error.to_string().contains("same contents as the training file"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_token_is_in_both_parts(tokens in 2_usize..400, length in 1_usize..20, fraction in 0.001_f64..0.999) {
        // Token i has id i, so that what a sequence touches can be seen.
        let bytes: Vec<u8> = (0..tokens).flat_map(|i| (i as u16).to_le_bytes()).collect();
        let folder = Folder::new(&[("a.bin", &bytes)]);
        let config = with_validation(DataConfig::new("a.bin", length), fraction);
        match config.open(folder.0.path(), &Tokenizer::open(None).unwrap(), None) {
            Err(error) => {
                prop_assert!(error.to_string().contains("too short"), "{}", error);
                let wanted = (((tokens - 1) / length) as f64 * fraction).round().max(1.0) as usize;
                prop_assert!(tokens < (wanted + 1) * length + 2);
            }
            Ok(data) => {
                let touched = |split, index| {
                    let (inputs, targets) = read(&data, split, index);
                    (inputs[0], targets[length - 1])
                };
                let (train, validation) = (data.len(Split::Train), data.len(Split::Validation));
                prop_assert!(train >= 1 && validation >= 1);
                for index in 0..train {
                    let from = (index as usize * length) as i64;
                    prop_assert_eq!(touched(Split::Train, index), (from, from + length as i64));
                }
                let last = touched(Split::Train, train - 1).1;
                prop_assert_eq!(touched(Split::Validation, 0).0, last + 1);
                let end = touched(Split::Validation, validation - 1).1;
                prop_assert!(end < tokens as i64 && end + length as i64 >= tokens as i64);
                let all = ((tokens - 1) / length) as f64;
                prop_assert!((validation as f64 - (all * fraction).round().max(1.0)).abs() <= 1.0);
            }
        }
    }
}

#[test]
fn the_cache_is_used_and_mended() {
    let folder = Folder::new(&[("a.txt", &b"some text ".repeat(20))]);
    let config = DataConfig::new("a.txt", 16);
    let first = all(&folder.open(&config).unwrap(), Split::Train);
    let [path] = &folder.cached()[..] else { panic!("one file in the cache") };
    let whole = fs::read(path).unwrap();
    let made = fs::metadata(path).unwrap().modified().unwrap();
    let again = folder.open(&config).unwrap();
    assert_eq!(fs::metadata(path).unwrap().modified().unwrap(), made, "the second start reads the cache");
    assert!(again.notes().is_empty());
    for damaged in [&whole[..whole.len() - 3], &whole[..40], b"", &[&whole[..150], b"~", &whole[151..]].concat()] {
        fs::remove_file(path).unwrap();
        fs::write(path, damaged).unwrap();
        let data = folder.open(&config).unwrap();
        assert!(data.notes().join("").contains("damaged"), "{:?}", data.notes());
        assert_eq!(all(&data, Split::Train), first);
        assert_eq!(fs::read(path).unwrap(), whole);
    }
    folder.write("a.txt", &b"other text".repeat(20));
    assert_ne!(all(&folder.open(&config).unwrap(), Split::Train), first);
    assert_eq!(folder.cached().len(), 2, "other contents, another file");
}

#[test]
fn several_starts_at_once_are_safe() {
    let folder = Folder::new(&[("a.txt", &b"many at once ".repeat(5000))]);
    let config = DataConfig::new("a.txt", 64);
    let identities: Vec<String> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..4).map(|_| scope.spawn(|| folder.open(&config).unwrap().identity())).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    assert!(identities.iter().all(|identity| *identity == identities[0]));
    assert_eq!(folder.cached().len(), 1, "no temporary file is left");
}

#[test]
fn large_text_is_the_same_in_pieces() {
    let text = "hello hell, he\nll h\n\n".repeat(60_000);
    let model = chat_folder("");
    let tokenizer = Tokenizer::open(Some(model.path())).unwrap();
    let folder = Folder::new(&[("a.txt", text.as_bytes())]);
    let data = folder.open_with(&DataConfig::new("a.txt", 64), &tokenizer).unwrap();
    let period = tokenizer.encode(&text[..21], false).unwrap().len() as u64;
    assert_eq!(data.tokens(), period * 60_000 + 2);
}

#[test]
fn identity_follows_content_and_settings() {
    let folder = Folder::new(&[("a.txt", b"abcdefghijkl"), ("b.txt", b"abcdefghijkl"), ("c.txt", b"abcdefghijkm")]);
    let identity = |config: &DataConfig| folder.open(config).unwrap().identity();
    let base = DataConfig::new("a.txt", 4);
    let first = identity(&base);
    assert_eq!(first, identity(&DataConfig::new("b.txt", 4)), "names do not matter");
    for other in [
        DataConfig::new("c.txt", 4),
        DataConfig::new("a.txt", 3),
        DataConfig { order: OrderKind::Sequential, ..base.clone() },
        with_validation(base.clone(), 0.4),
        DataConfig { validation: Validation::Path("c.txt".into()), ..base.clone() },
        unpacked("a.txt", 4),
    ] {
        assert_ne!(first, identity(&other), "{other:?}");
    }
}

#[test]
fn a_file_that_shrinks_under_the_run_is_an_error() {
    let folder = Folder::new(&[("a.bin", &[1, 0].repeat(5000))]);
    let data = folder.open(&DataConfig::new("a.bin", 64)).unwrap();
    let file = fs::OpenOptions::new().write(true).open(folder.0.path().join("a.bin")).unwrap();
    file.set_len(100).unwrap();
    let error = data.read(Split::Train, 70, &mut [0; 64], &mut [0; 64]).unwrap_err();
    assert!(error.to_string().contains("the file changed during the run: 10000 bytes"), "{error}");
}

#[test]
fn wrong_reads_are_errors() {
    let folder = Folder::new(&[("a.txt", b"abcdefghi")]);
    let data = folder.open(&DataConfig::new("a.txt", 4)).unwrap();
    for (split, index, room) in [(Split::Train, 2, 4), (Split::Validation, 0, 4), (Split::Train, 0, 3)] {
        assert!(data.read(split, index, &mut vec![0; room], &mut [0; 4]).is_err());
    }
}

#[test]
fn hostile_files_get_clear_errors() {
    let good = DataConfig::new("a.txt", 4);
    let text: Files<'_> = &[("a.txt", b"abcdefghi")];
    let line = |contents: &'static [u8]| vec![("a.jsonl", contents)];
    let jsonl = DataConfig::new("a.jsonl", 4);
    let bin = DataConfig::new("a.bin", 2);
    let cases: Vec<(Vec<(&str, &[u8])>, DataConfig, &str)> = vec![
        (vec![], good.clone(), "data.path: "),
        (vec![], good.clone(), "a.txt: no such file or folder; paths are relative to the run file"),
        (vec![("a.txt", b"")], good.clone(), "a.txt: the file is empty"),
        (vec![("a.txt", b"ab\ncd\xff")], good.clone(), "a.txt: line 2: broken UTF-8 at byte 5"),
        (vec![("a.txt", b"abc")], good.clone(), "the text is too short: 4 tokens, at least 5 are needed"),
        (vec![("a.md", b"abc")], DataConfig::new("a.md", 4), "a.md: unknown extension; expected .txt, .jsonl, .bin"),
        (vec![("d/a.md", b"abc")], DataConfig::new("d", 4), "d: the folder has no .txt, .jsonl or .bin file"),
        (vec![("d/a.txt", b"abc"), ("d/b.txt", b"")], DataConfig::new("d", 4), "b.txt: the file is empty"),
        (line(b"{\"text\": \"abc\"}\n{oops}\n"), jsonl.clone(), "a.jsonl:2: broken JSON: key must be a string"),
        (line(b"{\"txt\": \"abc\"}"), jsonl.clone(), "a.jsonl:1: expected an object with `text`"),
        (line(b"{\"text\": \"ab\xc3\"}"), jsonl.clone(), "a.jsonl:1: broken UTF-8 at byte 12"),
        (line(b"\n\n"), jsonl.clone(), "too short: 0 tokens"),
        (line(b"\n\n"), unpacked("a.jsonl", 4), "a.jsonl: no document has a token that counts"),
        (
            line(b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}"),
            jsonl.clone(),
            "a.jsonl:1: chat messages need a chat template",
        ),
        (vec![("a.bin", b"abc")], bin.clone(), "a.bin: 3 bytes are no whole number of tokens of 2 bytes"),
        (vec![("a.bin", b"")], bin.clone(), "a.bin: the file is empty"),
        (
            vec![("a.bin", b"\x01\0\x00\x01\x01\0")],
            bin.clone(),
            "a.bin: token 1 has id 256, beyond the model's vocabulary of 256 (ids 0 to 255)",
        ),
        (
            vec![("a.bin", b"\x01\0\0\0\0\0\x01\0")],
            DataConfig { token_bytes: 4, ..bin.clone() },
            "a.bin: token 1 has id 65536",
        ),
        (vec![("a.bin", b"\x01\0\x01\0")], bin.clone(), "too short: 2 tokens, at least 3"),
        (vec![("a.bin", b"\x01\0\x01\0")], unpacked("a.bin", 2), "a.bin is bare tokens; use data.pack = true"),
        (text.to_vec(), DataConfig { token_bytes: 3, ..good.clone() }, "data.token_bytes = 3 must be 2 (u16) or 4"),
        (text.to_vec(), DataConfig::new("a.txt", 0), "data.sequence_length must be at least 1"),
        (text.to_vec(), DataConfig::new("a.txt", usize::MAX), "must be below 2^32"),
        (text.to_vec(), with_validation(good.clone(), 1.0), "data.validation = 1 must be at least 0 and below 1"),
        (text.to_vec(), with_validation(good.clone(), -0.1), "data.validation = -0.1 must be"),
        (text.to_vec(), with_validation(good.clone(), f64::NAN), "data.validation = NaN must be"),
        (
            vec![("a.txt", b"abcdefg")],
            with_validation(good.clone(), 0.1),
            "too short: 8 tokens, at least 10 are needed",
        ),
        (text.to_vec(), with_validation(unpacked("a.txt", 4), 0.5), "1 usable documents are too few to keep 1"),
        (
            text.to_vec(),
            DataConfig { validation: Validation::Path("v.txt".into()), ..good.clone() },
            "data.validation: ",
        ),
        (
            text.to_vec(),
            DataConfig { cache: Some("a.txt/x".into()), ..good.clone() },
            "cannot write the token cache in ",
        ),
    ];
    for (files, config, expected) in cases {
        let error = Folder::new(&files).open(&config).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        let message = error.to_string();
        assert!(message.contains(expected), "{message}\n{expected}");
        assert!(!message.contains('\n') && !message.ends_with('.'), "{message}");
    }
}

#[test]
fn is_built_from_a_run_file() {
    let folder = Folder::new(&[("text.txt", &b"to be or not to be ".repeat(30))]);
    let cx = BuildContext { base: folder.0.path().into(), vocabulary: Some(256), ..BuildContext::default() };
    let build = |more: serde_json::Value| {
        let mut settings = serde_json::json!({"path": "text.txt", "sequence_length": 8, "cache": "c"});
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let table = serde_json::from_value(settings).unwrap();
        Registry::global().unwrap().build::<zf_core::slots::Data>(&table, &cx)
    };
    let bundle = build(json!({"order": "sequential", "validation": 0.25})).unwrap();
    assert_eq!(bundle.order, OrderKind::Sequential);
    assert_eq!(bundle.dataset.len(Split::Validation), 18);
    assert_eq!(build(json!({"validation": 0})).unwrap().order, OrderKind::Shuffled);
    for (more, expected) in [
        (json!({"validation": true}), "expected a fraction from 0 to below 1, or the path of a file"),
        (json!({"sequence_lenght": 3}), "sequence_length"),
        (json!({"order": "random"}), "order"),
        (json!({"tokenizer": "nowhere"}), "data.tokenizer: "),
    ] {
        let error = build(more).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(expected), "{error}");
    }
}

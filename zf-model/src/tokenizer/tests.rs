use std::fs;

use serde_json::json;
use tempfile::TempDir;

use super::*;

/// Turns as SmolLM2 and Qwen write them.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
                      '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
                      {% endif %}";

/// A byte-level BPE vocabulary with three merges, two special tokens and a template processor that adds the first.
fn vocabulary() -> Value {
    let mut ids = serde_json::Map::new();
    // The letters of GPT-2's byte alphabet that stand for themselves, and its blank and line break.
    let letters = ('!'..='~').chain(['Ġ', 'Ċ', 'Ã', '¼']);
    let tokens = letters.map(String::from).chain(["he", "ll", "hell"].map(String::from));
    for (id, token) in tokens.enumerate() {
        ids.insert(token, json!(id));
    }
    let (start, end) = (ids.len(), ids.len() + 1);
    let added = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [added(start, "<|im_start|>"), added(end, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [start], "tokens": ["<|im_start|>"]}}},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": ids,
                  "merges": ["h e", "l l", "he ll"]},
    })
}

pub(crate) fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, contents) in files {
        fs::write(folder.path().join(name), contents).unwrap();
    }
    folder
}

/// A folder with [`vocabulary`], [`CHATML`] and `<|im_end|>` as the end of text.
pub(crate) fn chat_folder(template: &str) -> TempDir {
    let settings = json!({"eos_token": {"content": "<|im_end|>"}, "chat_template": template});
    folder(&[("tokenizer.json", &vocabulary().to_string()), ("tokenizer_config.json", &settings.to_string())])
}

fn say(role: &str, content: &str) -> Message {
    Message { role: role.into(), content: content.into() }
}

/// The text of the tokens that count, and of those that do not.
fn halves(tokenizer: &Tokenizer, chat: &ChatTokens) -> (String, String) {
    let Kind::Json { tokenizer, .. } = &tokenizer.kind else { panic!("a vocabulary") };
    let part = |wanted: bool| {
        let pairs = chat.ids.iter().zip(&chat.counts).filter(|(_, counts)| **counts == wanted);
        tokenizer.decode(&pairs.map(|(id, _)| *id).collect::<Vec<_>>(), false).unwrap()
    };
    (part(true), part(false))
}

#[test]
fn bytes_come_back() {
    let bytes = Tokenizer::open(None).unwrap();
    let text = "naïve ☃\n";
    let ids = bytes.encode(text, true).unwrap();
    assert_eq!(ids.len(), text.len());
    assert_eq!(bytes.decode(&ids), text);
    assert_eq!((bytes.eos(), bytes.stops(), bytes.start()), (Some(0), &[0][..], &[][..]));
    assert_eq!(bytes.decode(&[0xe2, 0x98, 300, 65]), "\u{fffd}A");
    assert!(bytes.is_bytes());
}

#[test]
fn a_vocabulary_is_read_whole() {
    let folder = chat_folder(CHATML);
    let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
    let hello = tokenizer.encode("hello hell", false).unwrap();
    assert_eq!(hello.len(), 4, "hell o Ġ hell; and nothing is truncated: {hello:?}");
    assert_eq!(tokenizer.decode(&hello), "hello hell");
    let special = tokenizer.encode("hello hell", true).unwrap();
    assert_eq!(special[0], tokenizer.start()[0]);
    assert_eq!(special[1..], hello);
    assert_eq!(tokenizer.eos(), Some(tokenizer.start()[0] + 1));
    assert_eq!(tokenizer.vocabulary(), tokenizer.eos().unwrap() as usize + 1);
    assert_eq!(tokenizer.decode(&special), "hello hell", "special tokens are not shown");
}

#[test]
fn the_end_comes_from_the_first_file_that_names_it() {
    let words = vocabulary().to_string();
    let check = |files: &[(&str, &str)], eos: Option<u32>, stops: &[u32]| {
        let folder = folder(files);
        let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
        assert_eq!((tokenizer.eos(), tokenizer.stops()), (eos, stops), "{:?}", &files[1..]);
    };
    let json = ("tokenizer.json", words.as_str());
    check(&[json], None, &[]);
    check(&[json, ("config.json", r#"{"eos_token_id": 7}"#)], Some(7), &[7]);
    check(&[json, ("config.json", r#"{"eos_token_id": null}"#)], None, &[]);
    let generation = ("generation_config.json", r#"{"eos_token_id": [9, 3]}"#);
    check(&[json, generation], Some(9), &[3, 9]);
    check(&[json, ("tokenizer_config.json", r#"{"eos_token": "!"}"#), generation], Some(0), &[0, 3, 9]);
    let beyond = ("config.json", r#"{"eos_token_id": 50256}"#);
    check(&[("x", ""), beyond], Some(0), &[0]);
    check(&[("x", ""), ("config.json", r#"{"eos_token_id": 10}"#)], Some(10), &[10]);
}

#[test]
fn identity_follows_what_decides_the_ids() {
    let identity = |folder: TempDir| Tokenizer::open(Some(folder.path())).unwrap().identity().to_owned();
    let first = identity(chat_folder(CHATML));
    assert_eq!(first, identity(chat_folder(CHATML)));
    assert_ne!(first, identity(chat_folder("{{ messages }}")));
    let other = vocabulary().to_string().replace("he ll", "e ll");
    assert_ne!(identity(folder(&[("tokenizer.json", &vocabulary().to_string())])), first);
    assert!(Tokenizer::open(Some(folder(&[("tokenizer.json", &other)]).path())).is_err());
}

#[test]
fn characters_are_streamed_whole() {
    let bytes = Tokenizer::open(None).unwrap();
    let text = "a☃b\u{1f600}é\n";
    let mut stream = bytes.stream();
    let got: Vec<String> = text.bytes().map(|b| stream.push(u32::from(b))).collect();
    assert_eq!(got.concat(), text);
    assert_eq!(got[1..4], ["", "", "☃"]);
    assert_eq!(stream.finish(), "");
    let mut stream = bytes.stream();
    assert_eq!(stream.push(0xe2), "");
    assert_eq!(stream.finish(), "\u{fffd}");

    let folder = chat_folder(CHATML);
    let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
    let mut stream = tokenizer.stream();
    let ids = tokenizer.encode("hell ü hello", false).unwrap();
    let got: String = ids.iter().map(|&id| stream.push(id)).collect();
    assert_eq!(got + &stream.finish(), "hell ü hello");
}

#[test]
fn templates_render_as_transformers_does() {
    for (template, expected) in [
        (CHATML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        // Blocks take their line's indentation and line break with them.
        ("{% for m in messages %}\n    {%- if true %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\n", "  hi\n"),
        ("{{ messages[0]['content'].strip().upper() }}{{ messages[0].role.startswith('u') }}", "HITrue"),
        (
            "{{ eos_token }}{{ bos_token }}|{{ messages | tojson }}",
            "<|im_end|>|[{\"role\": \"user\", \"content\": \"hi\"}]",
        ),
        ("{{ {'a': '<ü>'} | tojson(indent=2) }}", "{\n  \"a\": \"<ü>\"\n}"),
        ("{% if tools is none and strftime_now is defined %}{{ strftime_now('%Y')[:1] }}{% endif %}", "2"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
    ] {
        let folder = chat_folder(template);
        let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
        assert_eq!(tokenizer.chat(&[say("user", "hi")], true).unwrap(), expected, "{template}");
    }
}

#[test]
fn templates_are_found_where_folders_keep_them() {
    let words = vocabulary().to_string();
    let list =
        r#"{"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]}"#;
    for (files, expected) in [
        (vec![("tokenizer_config.json", list)], "list"),
        (vec![("tokenizer_config.json", list), ("chat_template.jinja", "file")], "file"),
    ] {
        let folder = folder(&[files, vec![("tokenizer.json", &words)]].concat());
        let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
        assert_eq!(tokenizer.chat(&[], false).unwrap(), expected);
    }
}

#[test]
fn only_the_assistant_counts() {
    let talk = [say("user", "hello"), say("assistant", "hell"), say("user", "he"), say("assistant", "\nll")];
    let marked = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}\
                  {%- generation %}\n{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\
                  {% endif %}{{ '\n' }}{% endfor %}";
    // The last turn is printed in another way than earlier ones.
    let thinking = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}\
                    {{ '<think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}\
                    {{ '<|im_start|>assistant\n' }}{% endif %}";
    let rest = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<|im_start|>user\nhe<|im_end|>\n\
                <|im_start|>assistant\n";
    for (template, counted, rest) in [
        (CHATML, "hell<|im_end|>\n\nll<|im_end|>\n", rest.to_owned()),
        (
            marked,
            "hell<|im_end|>\nll<|im_end|>",
            rest.replace("<|im_start|>user\nhe<", "\n<|im_start|>user\nhe<") + "\n",
        ),
        (thinking, "hell<|im_end|>\n<think>\nll<|im_end|>\n", rest.to_owned()),
    ] {
        let folder = chat_folder(template);
        let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
        let chat = tokenizer.chat_mask(&talk).unwrap();
        assert_eq!(chat.ids.len(), chat.counts.len());
        assert_eq!(halves(&tokenizer, &chat), (counted.to_owned(), rest), "{template}");
    }
}

#[test]
fn training_text_does_not_depend_on_the_day() {
    let folder = chat_folder("{{ strftime_now('%d') }}{{ messages[0].content }}");
    let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
    let chat = tokenizer.chat_mask(&[say("user", "hi")]).unwrap();
    assert_eq!(tokenizer.decode(&chat.ids), "26hi");
}

#[test]
fn wrong_folders_are_refused() {
    let words = vocabulary().to_string();
    for (files, expected) in [
        (vec![("tokenizer.json", "{")], "tokenizer.json: no tokenizer: EOF"),
        (vec![("tokenizer.json", "{}")], "tokenizer.json: no tokenizer"),
        (vec![("tokenizer_config.json", "[1")], "tokenizer_config.json: broken JSON"),
        (vec![("config.json", "nonsense")], "config.json: broken JSON"),
        (vec![("vocab.json", "{}")], "the tokenizer is in `vocab.json`, expected tokenizer.json"),
        (vec![("tokenizer.model", "")], "the tokenizer is in `tokenizer.model`"),
        (
            vec![("tokenizer.json", &words), ("tokenizer_config.json", r#"{"chat_template": 3}"#)],
            "`chat_template` must be a string or a list",
        ),
        (
            vec![("tokenizer.json", &words), ("tokenizer_config.json", r#"{"chat_template": []}"#)],
            "`chat_template` must be a string or a list",
        ),
        (
            vec![("tokenizer.json", &words), ("chat_template.jinja", "a\n{% if %}")],
            "chat_template.jinja: chat template, line 2: unexpected",
        ),
    ] {
        let folder = folder(&files);
        let error = Tokenizer::open(Some(folder.path())).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(expected), "{error}\n{expected}");
    }
}

#[test]
fn wrong_conversations_are_refused() {
    let talk = [say("user", "a"), say("assistant", "b"), say("user", "c")];
    for (template, expected) in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ strftime_now('%Q') }}", "does not know `%Q`"),
        ("{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}", "assistant's tokens of message 1"),
    ] {
        let folder = chat_folder(template);
        let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
        let error = tokenizer.chat_mask(&talk).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(expected), "{error}");
    }
    let folder = chat_folder(CHATML);
    let tokenizer = Tokenizer::open(Some(folder.path())).unwrap();
    let error = tokenizer.chat(&[say("user", "\u{fdd0}")], false).unwrap_err();
    assert!(error.to_string().contains("U+FDD0"), "{error}");
    let error = Tokenizer::open(None).unwrap().chat(&talk, false).unwrap_err();
    assert!(error.to_string().contains("need a chat template"), "{error}");
}

//! Reading `.jsonl`: a document a line.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::{Map, Value};
use zf_core::{Error, Result};

use crate::tokenizer::Message;

/// What a line may hold; other fields beside these are ignored.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// `{"text": "..."}`.
    Text(String),
    /// `{"prompt": "...", "completion": "..."}`; only the completion counts in the loss.
    Completion {
        /// What is given.
        prompt: String,
        /// What is to be learned.
        completion: String,
    },
    /// `{"messages": [{"role": "...", "content": "..."}]}`; only the assistant's tokens count.
    Chat(Vec<Message>),
}

/// Calls `each` with every line that is not blank and its number (from 1).
pub(super) fn lines(reader: impl Read, path: &Path, each: &mut dyn FnMut(u64, Line) -> Result<()>) -> Result<()> {
    let mut reader = BufReader::with_capacity(1 << 20, reader);
    let mut bytes = Vec::new();
    let mut offset = 0_u64;
    for number in 1.. {
        bytes.clear();
        let read = reader.read_until(b'\n', &mut bytes).map_err(|e| super::source::input(path, e))?;
        if read == 0 {
            break;
        }
        let text = std::str::from_utf8(&bytes).map_err(|e| {
            let at = offset + e.valid_up_to() as u64;
            wrong(path, number, format!("broken UTF-8 at byte {at}"))
        })?;
        let text = text.trim_start_matches('\u{feff}').trim();
        if !text.is_empty() {
            let value =
                serde_json::from_str(text).map_err(|e| wrong(path, number, format!("broken JSON: {}", plain(&e))))?;
            let line = understand(value).map_err(|what| wrong(path, number, what))?;
            each(number, line)?;
        }
        offset += read as u64;
    }
    Ok(())
}

/// An error of line `number`.
pub(super) fn wrong(path: &Path, number: u64, what: impl std::fmt::Display) -> Error {
    Error::Input(format!("{}:{number}: {what}", path.display()))
}

/// serde_json counts lines within what it was given, which is always line 1 here.
fn plain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.split_once(" at line ") {
        Some((what, _)) => format!("{what} at column {}", error.column()),
        None => text,
    }
}

const FORMS: &str = "expected an object with `text`, with `prompt` and `completion`, or with `messages`";

fn understand(value: Value) -> Result<Line, String> {
    let Value::Object(mut object) = value else {
        return Err(format!("{FORMS}, found {}", kind(&value)));
    };
    let has = |name: &str| object.contains_key(name);
    if has("messages") {
        return messages(object.remove("messages").unwrap_or_default()).map(Line::Chat);
    }
    if has("prompt") && has("completion") {
        return Ok(Line::Completion {
            prompt: string(&mut object, "prompt")?,
            completion: string(&mut object, "completion")?,
        });
    }
    if has("text") {
        return string(&mut object, "text").map(Line::Text);
    }
    let names: Vec<&str> = object.keys().take(8).map(String::as_str).collect();
    Err(match names.len() {
        0 => format!("{FORMS}, found an empty object"),
        _ => format!("{FORMS}, found `{}`", names.join("`, `")),
    })
}

fn string(object: &mut Map<String, Value>, name: &str) -> Result<String, String> {
    match object.remove(name) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!("`{name}` must be a string, found {}", kind(&other))),
        None => Err(format!("`{name}` is missing")),
    }
}

fn messages(value: Value) -> Result<Vec<Message>, String> {
    let Value::Array(list) = value else {
        return Err(format!("`messages` must be a list, found {}", kind(&value)));
    };
    if list.is_empty() {
        return Err("`messages` is empty".into());
    }
    list.into_iter()
        .enumerate()
        .map(|(at, value)| match value {
            Value::Object(mut object) => Ok(Message {
                role: string(&mut object, "role").map_err(|e| format!("message {at}: {e}"))?,
                content: string(&mut object, "content").map_err(|e| format!("message {at}: {e}"))?,
            }),
            other => Err(format!("message {at} must be an object with `role` and `content`, found {}", kind(&other))),
        })
        .collect()
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Vec<(u64, Line)>> {
        let mut got = Vec::new();
        lines(text, Path::new("a.jsonl"), &mut |number, line| {
            got.push((number, line));
            Ok(())
        })?;
        Ok(got)
    }

    #[test]
    fn reads_the_three_forms() {
        let got = read(
            b"{\"text\": \"a\", \"id\": 1}\n\n{\"completion\": \"c\", \"prompt\": \"p\"}\r\n\
              {\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}",
        )
        .unwrap();
        assert_eq!(got[0], (1, Line::Text("a".into())));
        let (prompt, completion) = ("p".into(), "c".into());
        assert_eq!(got[1], (3, Line::Completion { prompt, completion }));
        let message = Message { role: "user".into(), content: "hi".into() };
        assert_eq!(got[2], (4, Line::Chat(vec![message])));
    }

    #[test]
    fn wrong_lines_are_named() {
        for (text, expected) in [
            (&b"{\"text\": \"a\"}\n{\"text\": "[..], "a.jsonl:2: broken JSON: EOF"),
            (b"{\"text\": \"a\"} x", "a.jsonl:1: broken JSON: trailing characters at column 15"),
            (b"\n[1]", "a.jsonl:2: expected an object with `text`, with `prompt` and `completion`"),
            (b"{\"txet\": 1, \"b\": 2}", "found `b`, `txet`"),
            (b"{}", "found an empty object"),
            (b"{\"prompt\": \"p\"}", "found `prompt`"),
            (b"{\"text\": 3}", "`text` must be a string, found a number"),
            (b"{\"prompt\": null, \"completion\": \"\"}", "`prompt` must be a string, found null"),
            (b"{\"messages\": {}}", "`messages` must be a list, found an object"),
            (b"{\"messages\": []}", "`messages` is empty"),
            (b"{\"messages\": [\"hi\"]}", "message 0 must be an object"),
            (b"{\"messages\": [{\"role\": \"user\"}]}", "message 0: `content` is missing"),
            (b"{\"messages\": [{\"content\": [], \"role\": \"user\"}]}", "`content` must be a string"),
            (b"{\"text\": \"\xff\"}", "a.jsonl:1: broken UTF-8 at byte 10"),
        ] {
            let error = read(text).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(expected), "{error}\n{expected}");
        }
    }
}

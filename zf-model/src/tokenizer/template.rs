//! Chat templates: the Jinja dialect that Hugging Face folders use, rendered by minijinja.

use std::path::Path;

use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, context};
use serde::Serialize;
use serde_json::Value;
use zf_core::{Error, Result};

use super::{Message, clock};

/// Brackets around what `{% generation %}` blocks render to: two noncharacters, which no text should hold.
pub(super) const OPEN: char = '\u{fdd0}';
/// The closing bracket.
pub(super) const CLOSE: char = '\u{fdd1}';

/// A compiled template with the special tokens it may print.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    origin: String,
    bos: Option<String>,
    eos: Option<String>,
    /// Whether it marks the assistant's text with `{% generation %}` blocks.
    pub(super) marked: bool,
}

impl ChatTemplate {
    /// Finds a folder's template: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (a string, or
    /// a list of named templates of which `default` is taken).
    pub(super) fn find(folder: &Path, settings: &Value, jinja: Option<Vec<u8>>) -> Result<Option<Self>> {
        let file = folder.join("chat_template.jinja");
        let (origin, source) = if let Some(bytes) = jinja {
            let source =
                String::from_utf8(bytes).map_err(|e| Error::Input(format!("{}: no UTF-8: {e}", file.display())))?;
            (file, source)
        } else {
            let origin = folder.join("tokenizer_config.json");
            match &settings["chat_template"] {
                Value::Null => return Ok(None),
                Value::String(source) => (origin, source.clone()),
                Value::Array(list) => {
                    let named = |name: &str| list.iter().find(|entry| entry["name"] == name);
                    let source = named("default").or(list.first()).and_then(|entry| entry["template"].as_str());
                    match source {
                        Some(source) => (origin, source.to_owned()),
                        None => return Err(wrong_form(&origin)),
                    }
                }
                _ => return Err(wrong_form(&origin)),
            }
        };
        let origin = origin.display().to_string();
        let bos = special_token(settings, "bos_token");
        let eos = special_token(settings, "eos_token");
        Self::compile(origin, &source, bos, eos).map(Some)
    }

    fn compile(origin: String, source: &str, bos: Option<String>, eos: Option<String>) -> Result<Self> {
        let (source, marked) = filter_blocks(source);
        let mut environment = Environment::new();
        // As transformers' `_compile_jinja_template` sets up Jinja.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |text: String| -> Result<(), _> {
            Err::<(), _>(minijinja::Error::new(ErrorKind::InvalidOperation, text))
        });
        environment.add_filter("tojson", tojson);
        environment.add_filter("zf_generation", |body: String| format!("{OPEN}{body}{CLOSE}"));
        environment.add_template_owned("chat", source).map_err(|e| complain(&origin, &e))?;
        Ok(Self { environment, origin, bos, eos, marked })
    }

    /// Renders `messages` at a time in seconds since 1970, without the brackets of generation blocks.
    pub(super) fn render(&self, messages: &[Message], add_generation_prompt: bool, time: u64) -> Result<String> {
        let mut text = self.render_marked(messages, add_generation_prompt, time)?;
        text.retain(|c| c != OPEN && c != CLOSE);
        Ok(text)
    }

    /// Renders with the brackets.
    pub(super) fn render_marked(&self, messages: &[Message], add_generation_prompt: bool, time: u64) -> Result<String> {
        if let Some(at) = messages.iter().position(|message| message.content.contains([OPEN, CLOSE])) {
            return Err(Error::Input(format!("message {at} holds U+FDD0 or U+FDD1, which are no characters")));
        }
        let strftime_now = minijinja::Value::from_function(move |format: String| {
            clock::strftime(time, &format).map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e))
        });
        let template = self.environment.get_template("chat").map_err(|e| complain(&self.origin, &e))?;
        template
            .render(context! {
                messages,
                add_generation_prompt,
                strftime_now,
                tools => (),
                documents => (),
                bos_token => self.bos.as_deref().unwrap_or_default(),
                eos_token => self.eos.as_deref().unwrap_or_default(),
            })
            .map_err(|e| complain(&self.origin, &e))
    }

    /// Where the template came from, for messages.
    pub(super) fn origin(&self) -> &str {
        &self.origin
    }
}

/// A special token of `tokenizer_config.json`: a string, or an object with its `content`.
pub(super) fn special_token(settings: &Value, name: &str) -> Option<String> {
    let value = &settings[name];
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// minijinja has no `generation` block, but a filter block has the same rules for white space and scope.
fn filter_blocks(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut marked = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_matches(|c: char| "{%}-+".contains(c) || c.is_whitespace());
        match word {
            "generation" => {
                marked = true;
                out.push_str(&tag.replace(word, "filter zf_generation"));
            }
            "endgeneration" => out.push_str(&tag.replace(word, "endfilter")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    (out, marked)
}

/// `tojson` as transformers defines it: Python's `json.dumps` without escapes for HTML or beyond ASCII.
fn tojson(value: minijinja::Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let done = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent.min(64));
            let format = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, format))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Python)),
    };
    done.map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    String::from_utf8(out).map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// The separators of `json.dumps`: `", "` and `": "`.
struct Python;

impl serde_json::ser::Formatter for Python {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

fn complain(origin: &str, error: &minijinja::Error) -> Error {
    let reason = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    let line = error.line().map_or(String::new(), |line| format!(", line {line}"));
    Error::Input(format!("{origin}: chat template{line}: {reason}"))
}

fn wrong_form(origin: &Path) -> Error {
    Error::Input(format!(
        "{}: `chat_template` must be a string or a list of {{\"name\", \"template\"}}",
        origin.display()
    ))
}

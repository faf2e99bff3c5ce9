//! Text to token ids and back: a folder's `tokenizer.json`, or plain bytes without one.

mod clock;
mod mask;
mod stream;
mod template;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{PostProcessor, PostProcessorWrapper};
use zf_core::{Error, Result};

pub use stream::TextStream;
use template::ChatTemplate;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// The tokens of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChatTokens {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each token whether the assistant produced it, so that it counts in the loss.
    pub counts: Vec<bool>,
}

/// A tokenizer with the chat template of its folder.
///
/// Without a `tokenizer.json` the ids are the bytes of UTF-8 (0 to 255) and documents end in byte 0, which text does
/// not contain, unless `config.json` names another id below 256.
///
/// ```
/// use zf_model::tokenizer::Tokenizer;
///
/// let bytes = Tokenizer::open(None)?;
/// assert_eq!(bytes.encode("Hi", false)?, [72, 105]);
/// assert_eq!(bytes.decode(&[72, 105]), "Hi");
/// assert_eq!(bytes.vocabulary(), 256);
/// # Ok::<(), zf_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Tokenizer {
    kind: Kind,
    eos: Option<u32>,
    stops: Vec<u32>,
    start: Vec<u32>,
    identity: String,
    template: Option<ChatTemplate>,
}

#[derive(Debug)]
enum Kind {
    Bytes,
    Json {
        tokenizer: Box<tokenizers::Tokenizer>,
        /// Kept apart from the tokenizer: the one of byte-level vocabularies moves the offsets of blanks, which would
        /// give the wrong tokens to the assistant.
        post: Option<PostProcessorWrapper>,
        path: PathBuf,
        vocabulary: usize,
    },
}

impl Tokenizer {
    /// Opens the tokenizer of a Hugging Face folder, or bytes for `None` and for a folder without one.
    ///
    /// The end-of-text token is the `eos_token` of `tokenizer_config.json`, else the (first) `eos_token_id` of
    /// `config.json`, else of `generation_config.json`. Truncation and padding settings of the file are ignored.
    ///
    /// # Errors
    /// [`Error::Input`] for files that cannot be read, broken JSON, a vocabulary in another form than
    /// `tokenizer.json`, and a chat template that does not compile.
    pub fn open(folder: Option<&Path>) -> Result<Self> {
        let mut identity = blake3::Hasher::new();
        let mut read = |name: &str| -> Result<Option<Vec<u8>>> {
            let Some(folder) = folder else {
                return Ok(None);
            };
            let contents = read_optional(&folder.join(name))?;
            if let Some(contents) = &contents {
                identity.update(name.as_bytes());
                identity.update(&(contents.len() as u64).to_le_bytes());
                identity.update(contents);
            }
            Ok(contents)
        };
        let vocabulary = read("tokenizer.json")?;
        let settings = read("tokenizer_config.json")?;
        let jinja = read("chat_template.jinja")?;
        let folder = folder.unwrap_or(Path::new("."));
        let settings = match settings {
            Some(bytes) => parse(&folder.join("tokenizer_config.json"), &bytes)?,
            None => Value::Null,
        };
        let kind = match vocabulary {
            Some(bytes) => Kind::json(folder.join("tokenizer.json"), &bytes)?,
            None => {
                refuse_other_forms(folder)?;
                Kind::Bytes
            }
        };
        let mut this = Self {
            kind,
            eos: None,
            stops: Vec::new(),
            start: Vec::new(),
            identity: String::new(),
            template: ChatTemplate::find(folder, &settings, jinja)?,
        };
        this.find_ends(folder, &settings)?;
        // What the tokenizer's own post-processor puts before a text (Llama: the start-of-text token).
        this.start = this.encode("", true)?;
        this.start.retain(|id| Some(*id) != this.eos);
        identity.update(format!("{:?}", this.eos).as_bytes());
        this.identity = identity.finalize().to_hex()[..32].to_string();
        Ok(this)
    }

    /// Token ids of `text`. With `special` also the tokens that the tokenizer itself puts around a text. Special
    /// tokens written out in the text are recognised either way.
    ///
    /// # Errors
    /// [`Error::Input`] when the tokenizer refuses the text (no unknown token).
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Json { tokenizer, post, path, .. } => tokenizer
                .encode_fast(text, false)
                .and_then(|encoding| match post {
                    Some(post) if special => post.process(encoding, None, true),
                    _ => Ok(encoding),
                })
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|e| cannot_encode(path, &e)),
        }
    }

    /// The text of `ids`, without special tokens. Bytes that are no UTF-8 become U+FFFD, unknown ids vanish.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> =
                    ids.iter().filter(|&&id| Some(id) != self.eos).filter_map(|&id| u8::try_from(id).ok()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::Json { tokenizer, .. } => tokenizer.decode(ids, true).unwrap_or_else(|_| {
                // A decoder that cannot join the tokens still lets them be shown one by one.
                ids.iter().filter_map(|&id| tokenizer.id_to_token(id)).collect()
            }),
        }
    }

    /// A decoder that takes one token after the other and gives out text as soon as its characters are complete.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// The token that ends a document, if there is one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The tokens at which generation stops: [`Tokenizer::eos`] and those of `generation_config.json`.
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// The tokens that the tokenizer puts before a document (Llama's start-of-text), often none.
    pub fn start(&self) -> &[u32] {
        &self.start
    }

    /// One more than the largest id.
    pub fn vocabulary(&self) -> usize {
        match &self.kind {
            Kind::Bytes => 256,
            Kind::Json { vocabulary, .. } => *vocabulary,
        }
    }

    /// Whether ids are bytes.
    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, Kind::Bytes)
    }

    /// A hash of everything that decides which ids a text gets.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Renders a conversation with the folder's own chat template, for generation with the opening of the
    /// assistant's next turn.
    ///
    /// # Errors
    /// [`Error::Input`] without a template, and with what the template itself refuses (`raise_exception`).
    pub fn chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        self.template()?.render(messages, add_generation_prompt, clock::now())
    }

    /// The tokens of a conversation and which of them are the assistant's, for training.
    ///
    /// Where the template marks them with `{% generation %}` these marks decide. Otherwise a turn of the assistant is
    /// what rendering the conversation up to it adds to the opening of that turn. Templates that print today's date
    /// get a fixed one, so that a file gives the same tokens on every day.
    ///
    /// # Errors
    /// As [`Tokenizer::chat`], and when the template changes earlier turns so that the assistant's part cannot be
    /// told.
    pub fn chat_mask(&self, messages: &[Message]) -> Result<ChatTokens> {
        let (text, spans) = mask::spans(self.template()?, messages)?;
        match &self.kind {
            Kind::Bytes => Ok(ChatTokens {
                ids: text.bytes().map(u32::from).collect(),
                counts: (0..text.len()).map(|at| mask::covers(&spans, at)).collect(),
            }),
            Kind::Json { tokenizer, path, .. } => {
                let encoding = tokenizer.encode(text, false).map_err(|e| cannot_encode(path, &e))?;
                Ok(ChatTokens {
                    ids: encoding.get_ids().to_vec(),
                    counts: encoding.get_offsets().iter().map(|&(from, _)| mask::covers(&spans, from)).collect(),
                })
            }
        }
    }

    fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().ok_or_else(|| {
            Error::Input(
                "chat messages need a chat template, and the tokenizer's folder has none: expected `chat_template` in \
                 tokenizer_config.json or a file chat_template.jinja"
                    .into(),
            )
        })
    }

    fn find_ends(&mut self, folder: &Path, settings: &Value) -> Result<()> {
        let named = match &self.kind {
            Kind::Json { tokenizer, .. } => {
                template::special_token(settings, "eos_token").and_then(|token| tokenizer.token_to_id(&token))
            }
            Kind::Bytes => None,
        };
        let mut ids: Vec<u32> = named.into_iter().collect();
        for name in ["config.json", "generation_config.json"] {
            let path = folder.join(name);
            if let Some(bytes) = read_optional(&path)? {
                ids.extend(eos_ids(&parse(&path, &bytes)?));
            }
        }
        if self.is_bytes() {
            ids.retain(|&id| id < 256);
            if ids.is_empty() {
                ids.push(0);
            }
        }
        self.eos = ids.first().copied();
        ids.sort_unstable();
        ids.dedup();
        self.stops = ids;
        Ok(())
    }
}

impl Kind {
    fn json(path: PathBuf, bytes: &[u8]) -> Result<Self> {
        let broken = |e: &dyn std::fmt::Display| Error::Input(format!("{}: no tokenizer: {e}", path.display()));
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| broken(&e))?;
        tokenizer.with_truncation(None).map_err(|e| broken(&e))?;
        tokenizer.with_padding(None);
        let post = tokenizer.get_post_processor().cloned();
        tokenizer.with_post_processor(None::<PostProcessorWrapper>);
        let largest = tokenizer.get_vocab(true).into_values().max();
        let largest = largest.ok_or_else(|| broken(&"its vocabulary is empty"))?;
        Ok(Self::Json { tokenizer: Box::new(tokenizer), post, path, vocabulary: largest as usize + 1 })
    }
}

/// The `eos_token_id` of a configuration: a number, a list of numbers, or nothing.
fn eos_ids(config: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match &config["eos_token_id"] {
        Value::Array(ids) => ids.iter().filter_map(id).collect(),
        value => id(value).into_iter().collect(),
    }
}

/// A folder whose vocabulary is in an older form must not silently be read as bytes.
fn refuse_other_forms(folder: &Path) -> Result<()> {
    for name in ["tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"] {
        if folder.join(name).is_file() {
            return Err(Error::Input(format!(
                "{}: the tokenizer is in `{name}`, expected tokenizer.json; save it with \
                 `AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers",
                folder.display()
            )));
        }
    }
    Ok(())
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::Input(format!("{}: {e}", path.display()))),
    }
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes).map_err(|e| Error::Input(format!("{}: broken JSON: {e}", path.display())))
}

fn cannot_encode(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::Input(format!("{}: cannot encode the text: {error}", path.display()))
}

#[cfg(test)]
pub(crate) mod tests;

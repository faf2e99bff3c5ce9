//! The `[data]` section of a run file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use zf_core::data::OrderKind;
use zf_core::registry::{Build, BuildContext, DataBundle};
use zf_core::{Error, Result, slots};

use super::dataset::TextDataset;
use super::segment::{Segment, Stream, Width};
use super::source::{self, Format, Source};
use super::split::{self, Part};
use super::token_file;
use super::tokenise::Tokeniser;
use crate::tokenizer::Tokenizer;

/// Settings of a dataset of text or tokens: the default of `[data]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A `.txt` file (one document), a `.jsonl` file (a document a line: `text`, `prompt` and `completion`, or
    /// `messages`), a `.bin` file (token ids), or a folder of these.
    pub path: PathBuf,
    /// Tokens of a sequence.
    pub sequence_length: usize,
    /// How sequences are ordered: another permutation in each epoch, or that of the file.
    #[serde(default)]
    pub order: OrderKind,
    /// What is kept for validation: a fraction from the end, or a file or folder of its own.
    #[serde(default)]
    #[schemars(extend("format" = "path"))]
    pub validation: Validation,
    /// Join documents by the end-of-text token and cut at the sequence length; otherwise a document is a row, padded
    /// on the right or cut.
    #[serde(default = "yes")]
    pub pack: bool,
    /// Bytes of a token in `.bin` files, little-endian: 2 or 4.
    #[serde(default = "two")]
    pub token_bytes: u32,
    /// A folder with `tokenizer.json`. Default: the model's folder; without one, tokens are bytes.
    #[serde(default)]
    #[schemars(extend("format" = "path"))]
    pub tokenizer: Option<PathBuf>,
    /// Where tokenised text is kept. Default: `$XDG_CACHE_HOME/zenflow/tokens` or `~/.cache/zenflow/tokens`.
    #[serde(default)]
    #[schemars(extend("format" = "path"))]
    pub cache: Option<PathBuf>,
}

/// What is kept for validation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a fraction from 0 to below 1, or the path of a file")]
pub enum Validation {
    /// About this part of the sequences, from the end, at least one; 0 keeps none.
    Fraction(f64),
    /// A file or folder that is no training data.
    Path(PathBuf),
}

impl Default for Validation {
    fn default() -> Self {
        Self::Fraction(0.0)
    }
}

impl DataConfig {
    /// The settings for `path` with the defaults for all else.
    pub fn new(path: impl Into<PathBuf>, sequence_length: usize) -> Self {
        Self {
            path: path.into(),
            sequence_length,
            order: OrderKind::default(),
            validation: Validation::default(),
            pack: true,
            token_bytes: 2,
            tokenizer: None,
            cache: None,
        }
    }

    /// Opens the dataset: finds and hashes the files, tokenises what the cache does not have, checks all ids against
    /// `vocabulary` and cuts sequences. Relative paths are as seen from `base`; [`DataConfig::tokenizer`] is not
    /// looked at.
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// use zf_core::data::{Dataset, Split};
    /// use zf_model::data::DataConfig;
    /// use zf_model::tokenizer::Tokenizer;
    ///
    /// let folder = tempfile::tempdir()?;
    /// std::fs::write(folder.path().join("text.txt"), "to be or not to be")?;
    /// let mut config = DataConfig::new("text.txt", 4);
    /// config.cache = Some("cache".into());
    /// let data = config.open(folder.path(), &Tokenizer::open(None)?, Some(256))?;
    /// assert_eq!(data.len(Split::Train), 4);
    /// let (mut inputs, mut targets) = ([0; 4], [0; 4]);
    /// data.read(Split::Train, 1, &mut inputs, &mut targets)?;
    /// assert_eq!(inputs.map(|id| id as u8), *b"e or");
    /// assert_eq!(targets.map(|id| id as u8), *b" or ");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] for settings out of range, [`Error::Input`] for files that are missing, empty, broken, too
    /// short, or hold ids beyond the vocabulary.
    pub fn open(&self, base: &Path, tokenizer: &Tokenizer, vocabulary: Option<usize>) -> Result<TextDataset> {
        let width = self.check()?;
        let tokeniser = Tokeniser {
            tokenizer,
            cache: match &self.cache {
                Some(folder) => base.join(folder),
                None => token_file::default_folder(),
            },
            width,
        };
        let mut notes = Vec::new();
        let path = base.join(&self.path);
        let (sources, stream) = load(&path, "data.path", &tokeniser, vocabulary, &mut notes)?;
        let name = path.display().to_string();
        let (mut validation_stream, mut validation_sources) = (None, Vec::new());
        let (train, validation) = match &self.validation {
            Validation::Fraction(0.0) => (self.whole(&stream, &name, &mut notes)?, None),
            Validation::Fraction(fraction) => {
                let (train, validation) = if self.pack {
                    split::packed_split(&stream, self.sequence_length, *fraction, &name)?
                } else {
                    let rows = self.rows(&stream, &mut notes)?;
                    split::rows_split(rows, *fraction, &name)?
                };
                (train, Some(validation))
            }
            Validation::Path(path) => {
                let path = base.join(path);
                let setting = "data.validation";
                let (own, own_stream) = load(&path, setting, &tokeniser, vocabulary, &mut notes)?;
                refuse_shared(&sources, &own)?;
                let train = self.whole(&stream, &name, &mut notes)?;
                let name = path.display().to_string();
                let part = self.whole(&own_stream, &name, &mut notes)?;
                validation_stream = Some(own_stream);
                validation_sources = own;
                (train, Some(part))
            }
        };
        let identity = self.identity(&sources, &validation_sources, tokenizer);
        Ok(TextDataset {
            train,
            validation,
            stream,
            validation_stream,
            length: self.sequence_length,
            pad: tokenizer.eos().map_or(0, i64::from),
            identity,
            notes,
        })
    }

    fn check(&self) -> Result<Width> {
        if self.sequence_length == 0 {
            return Err(Error::Config("data.sequence_length must be at least 1, found 0".into()));
        }
        if u32::try_from(self.sequence_length).is_err() {
            return Err(Error::Config(format!("data.sequence_length = {} must be below 2^32", self.sequence_length)));
        }
        if let Validation::Fraction(fraction) = self.validation
            && !(0.0..1.0).contains(&fraction)
        {
            return Err(Error::Config(format!(
                "data.validation = {fraction} must be at least 0 and below 1, or the path of a file"
            )));
        }
        Width::new(self.token_bytes)
            .ok_or_else(|| Error::Config(format!("data.token_bytes = {} must be 2 (u16) or 4 (u32)", self.token_bytes)))
    }

    fn whole(&self, stream: &Stream, name: &str, notes: &mut Vec<String>) -> Result<Part> {
        if self.pack {
            return split::packed(stream, self.sequence_length, name);
        }
        let rows = self.rows(stream, notes)?;
        if rows.is_empty() {
            return Err(Error::Input(format!(
                "{name}: no document has a token that counts in the loss within data.sequence_length = {}",
                self.sequence_length
            )));
        }
        Ok(Part::Rows(rows))
    }

    fn rows(&self, stream: &Stream, notes: &mut Vec<String>) -> Result<Vec<split::Row>> {
        let found = split::rows(stream, self.sequence_length)?;
        if found.cut > 0 {
            notes.push(format!(
                "{} documents are longer than data.sequence_length = {} and were cut",
                found.cut, self.sequence_length
            ));
        }
        if found.useless > 0 {
            notes.push(format!("{} documents have no token that counts in the loss and were left out", found.useless));
        }
        Ok(found.rows)
    }

    fn identity(&self, train: &[Source], validation: &[Source], tokenizer: &Tokenizer) -> String {
        let mut hash = blake3::Hasher::new();
        for sources in [train, validation] {
            hash.update(&(sources.len() as u64).to_le_bytes());
            for source in sources {
                hash.update(source.hash.as_bytes());
                match source.format {
                    Format::Tokens => hash.update(&self.token_bytes.to_le_bytes()),
                    _ => hash.update(tokenizer.identity().as_bytes()),
                };
            }
        }
        let fraction = match self.validation {
            Validation::Fraction(fraction) => fraction,
            Validation::Path(_) => 0.0,
        };
        let settings = (self.sequence_length, self.order, self.pack, fraction.to_bits());
        hash.update(format!("{settings:?}").as_bytes());
        hash.finalize().to_hex()[..32].to_string()
    }
}

impl Build<slots::Data> for DataConfig {
    fn build(self, cx: &BuildContext) -> anyhow::Result<DataBundle> {
        let folder = match &self.tokenizer {
            Some(folder) => {
                let folder = cx.path(folder);
                if !folder.join("tokenizer.json").is_file() {
                    return Err(
                        Error::Input(format!("data.tokenizer: {} has no tokenizer.json", folder.display())).into()
                    );
                }
                Some(folder)
            }
            None => cx.model_folder.clone(),
        };
        let tokenizer = Tokenizer::open(folder.as_deref())?;
        let dataset = self.open(&cx.base, &tokenizer, cx.vocabulary)?;
        Ok(DataBundle { dataset: Arc::new(dataset), order: self.order })
    }
}

zf_core::register!(
    slots::Data,
    "text",
    DataConfig,
    "text or tokens from files, packed or one document a row",
    "path = \"text.txt\"\nsequence_length = 256\nvalidation = 0.05"
);

/// Finds, reads and checks the files of one path.
fn load(
    path: &Path,
    setting: &str,
    tokeniser: &Tokeniser<'_>,
    vocabulary: Option<usize>,
    notes: &mut Vec<String>,
) -> Result<(Vec<Source>, Stream)> {
    let (sources, other) = source::find(path, setting)?;
    if other > 0 {
        notes.push(format!("{}: {other} files with other extensions were left out", path.display()));
    }
    let segments: Vec<Segment> =
        sources.iter().map(|source| tokeniser.segment(source, notes)).collect::<Result<_>>()?;
    if let Some(vocabulary) = vocabulary {
        for segment in &segments {
            segment.check_vocabulary(vocabulary)?;
        }
    }
    let skipped: u64 = segments.iter().map(Segment::skipped).sum();
    if skipped > 0 {
        notes.push(format!("{}: {skipped} empty documents were left out", path.display()));
    }
    let text = sources.iter().any(|s| s.format != Format::Tokens);
    if text && tokeniser.tokenizer.eos().is_none() {
        notes.push("the tokenizer names no end-of-text token, so documents follow each other without a mark".into());
    }
    Ok((sources, Stream::new(segments)))
}

/// Nothing may be in both training and validation.
fn refuse_shared(train: &[Source], validation: &[Source]) -> Result<()> {
    for source in validation {
        if let Some(same) = train.iter().find(|other| other.hash == source.hash) {
            return Err(Error::Input(format!(
                "data.validation: {} has the same contents as the training file {}",
                source.path.display(),
                same.path.display()
            )));
        }
    }
    Ok(())
}

fn yes() -> bool {
    true
}

fn two() -> u32 {
    2
}
